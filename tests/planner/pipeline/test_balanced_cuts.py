"""Cuts that positions share out, against every cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from paraplan.planner.pipeline.cuts.balanced_cuts import cut_balanced
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds, cut_evenly
from paraplan.planner.schedules.named import named_orders
from paraplan.planner.schedules.schedule_problem import stages_of


def _step_s(seconds: Sequence[float], positions: Sequence[Sequence[int]], bounds: Bounds, microbatches: int) -> float:
    stages = [sum(seconds[first:stop]) for first, stop in bounds]
    loads = [sum(stages[stage] for stage in mine) for mine in positions]
    return microbatches * max(loads) + (len(positions) - 1) * max(stages)


def _every(segments: int, stages: int, tail: int) -> list[Bounds]:
    cuts = itertools.combinations(range(1, segments), stages - 1)
    return [tuple(itertools.pairwise((0, *cut, segments))) for cut in cuts if not cut or cut[-1] <= tail]


@pytest.mark.parametrize(("schedule", "pp", "each"), [("interleaved", 2, 2), ("interleaved", 3, 2), ("zb-v", 2, 2)])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_near_the_best_of_all_cuts_and_never_worse_than_an_even_one(
    schedule: str, pp: int, each: int, seed: int
) -> None:
    draw = random.Random(seed)
    seconds = [draw.choice((1.0, 2.0, 2.0, 5.0)) for _ in range(10)]
    positions, m, tail = stages_of(named_orders(schedule, pp, 2 * pp, each)), 4 * pp, draw.choice((8, 10))
    even = cut_evenly(seconds, pp * each, tail)
    found = cut_balanced(seconds, positions, tail, m)
    assert even is not None and found is not None
    assert found[0][0] == 0 and found[-1][1] == 10 and found[-1][0] <= tail
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found)) and all(first < stop for first, stop in found)
    best_s = min(_step_s(seconds, positions, cut, m) for cut in _every(10, pp * each, tail))
    found_s = _step_s(seconds, positions, found, m)
    assert best_s - 1e-9 <= found_s <= min(1.12 * best_s, _step_s(seconds, positions, even, m))


def test_alternating_halves_of_layers_leave_no_position_more_than_another() -> None:
    """Of a short and a long half alternating, an even cut sums up to loads a tenth apart."""
    seconds = [1.0, 2.0] * 40
    positions = stages_of(named_orders("interleaved", 8, 32, 6))
    even, found = cut_evenly(seconds, 48, 80), cut_balanced(seconds, positions, 80, 64)
    assert even is not None and found is not None

    def fullest(bounds: Bounds) -> float:
        return max(sum(sum(seconds[slice(*bounds[s])]) for s in mine) for mine in positions) / (sum(seconds) / 8)

    assert fullest(even) > 1.05 and fullest(found) < 1.02


def test_one_stage_a_position_is_cut_evenly() -> None:
    seconds = [1.0, 3.0, 2.0, 2.0]
    assert cut_balanced(seconds, ((0,), (1,)), 4, 8) == cut_evenly(seconds, 2, 4)
    assert cut_balanced(seconds, stages_of(named_orders("chimera", 2, 2)), 4, 2) is not None
    assert cut_balanced([1.0], ((0,), (1,)), 1, 8) is None
