"""Where a round that repeats may begin: its names are its own."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from paraplan.cost_models.simulator.repeated_rounds import Round, _apart
from paraplan.ir.execution.rank_program import StepKind


def engine_of(period: list[int], rounds: int) -> Any:
    """Steps that issue something, and what that many steps later waits for; a distance of 0 is nothing."""
    steps, blocks = [], {}
    for at in range(rounds * len(period)):
        back = period[at % len(period)]
        waits = [at - back] if back and at >= back else []
        blocks[str(at)] = SimpleNamespace(imported=[(i, None) for i in range(len(waits))], exported=[(0, None)])
        steps.append(SimpleNamespace(kind=StepKind.CALL, block=str(at), args=[f"n{w}" for w in waits], outs=[f"n{at}"]))
    return SimpleNamespace(program=SimpleNamespace(steps=steps), block=blocks.__getitem__)


def is_apart(engine: Any, first: int, length: int) -> bool:
    issued = set()
    for step in engine.program.steps[first : first + length]:
        if not issued.issuperset(step.args):
            return False
        issued.update(step.outs)
    return True


@pytest.mark.parametrize("seed", range(60))
def test_the_last_round_that_waits_for_nothing_before_it(seed: int) -> None:
    draw = random.Random(seed)
    length = draw.randint(2, 8)
    period = [draw.choice((0, 0, 0, 1, 2, 3)) for _ in range(length)]
    engine, earlier = engine_of(period, 5), draw.randint(0, length)
    last = Round(3 * length, length, earlier)
    starts = [at for at in range(last.first, last.first - earlier - 1, -1) if is_apart(engine, at, length)]
    assert _apart(engine, last) == (Round(starts[0], length) if starts else None)


def test_some_begin_earlier_and_some_nowhere() -> None:
    found = [_apart(engine_of(period, 5), Round(12, 4, 4)) for period in PERIODS]
    assert found == [Round(12, 4), Round(11, 4), None]


PERIODS = [[0, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
