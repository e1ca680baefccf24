"""The schedules by name, and which of them a pipeline of so many stages and positions can take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.schedule import Schedule
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.families.bidirectional import chimera, gems
from paraplan.planner.schedules.families.interleaved import interleaved
from paraplan.planner.schedules.families.synchronous import gpipe, one_f_one_b
from paraplan.planner.schedules.families.wave import hanayo
from paraplan.planner.schedules.families.zero_bubble import at_once, drained, zb_h1, zb_v
from paraplan.planner.schedules.schedule_problem import Orders, StageCosts


class Named(NamedTuple):
    """A schedule of the literature.

    Attributes:
        make: its orders, from positions, microbatches and stages a position.
        stages: stages a position it takes: that number, or any multiple of `step` from there on.
        step: 0 where only `stages` will do.
        num_replicas: groups of positions that hold each stage.
        splits: whether gradients of weights are made apart from the rest of a backward, of some microbatch at least.
        idle: of the bubble of 1F1B with as many stages a position, what is left, more or less.
        flying: about how many microbatches of all its stages a position has in flight at most, from positions, which
            it is, and stages a position.
        counts: whether it can be made for so many positions and microbatches.
    """

    make: Callable[[int, int, int], Orders]
    stages: int = 1
    step: int = 0
    num_replicas: int = 1
    splits: bool = False
    idle: float = 1.0
    flying: Callable[[int, int, int], float] = lambda p, position, v: p
    counts: Callable[[int, int], bool] = lambda p, m: True

    def takes(self, stages_per_position: int) -> bool:
        """Whether it can be made for so many stages a position."""
        more = stages_per_position - self.stages
        return not more if not self.step else more >= 0 and more % self.step == 0


def _falling(p: int, position: int, v: int) -> float:
    return p - position


def _in_turns(p: int, position: int, v: int) -> float:
    return ((v - 1) * p + 2 * (p - position - 1) + 1) / v


NAMED: dict[str, Named] = {
    "gpipe": Named(lambda p, m, _: gpipe(p, m), flying=lambda p, position, v: math.inf),
    "1f1b": Named(lambda p, m, _: one_f_one_b(p, m), flying=_falling),
    "1f1b-zb": Named(lambda p, m, _: drained(one_f_one_b(p, m)), splits=True, idle=0.67, flying=_falling),
    "zb-h1": Named(lambda p, m, _: zb_h1(p, m), splits=True, idle=0.5, flying=_falling),
    "gems": Named(lambda p, m, _: gems(p, m), num_replicas=2, counts=lambda p, m: min(p, m) > 1),
    "chimera": Named(
        lambda p, m, _: chimera(p, m), num_replicas=2, idle=0.5, counts=lambda p, m: not p % 2 and not m % 2
    ),
    "interleaved": Named(interleaved, stages=2, step=1, flying=_in_turns, counts=lambda p, m: not m % p),
    "interleaved-zb": Named(
        lambda p, m, v: drained(interleaved(p, m, v)),
        stages=2,
        step=1,
        splits=True,
        idle=0.67,
        flying=_in_turns,
        counts=lambda p, m: not m % p,
    ),
    "zb-v": Named(lambda p, m, _: zb_v(p, m), stages=2, splits=True, idle=0.5),
    "zb-v-lean": Named(lambda p, m, _: at_once(zb_v(p, m)), stages=2, splits=True, idle=0.67),
    "hanayo": Named(lambda p, m, v: hanayo(p, m, v // 2), stages=2, step=2),
}


def named_orders(
    name: str, num_positions: int, num_microbatches: int, stages_per_position: int | None = None
) -> Orders:
    """The orders of a schedule of `NAMED`.

    Args:
        name: which.
        num_positions, num_microbatches: sizes.
        stages_per_position: None for the fewest the schedule takes.
    Raises:
        ConstraintError: no such schedule, or one that cannot take these sizes.
    """
    if name not in NAMED:
        raise ConstraintError(f"no schedule {name!r}; there are {', '.join(NAMED)}, and searched")
    kind = NAMED[name]
    v = kind.stages if stages_per_position is None else stages_per_position
    if not kind.takes(v):
        fits = f"{kind.stages}, {kind.stages + kind.step}, ..." if kind.step else str(kind.stages)
        raise ConstraintError(f"schedule {name}: {v} stages a position; it takes {fits}")
    return kind.make(num_positions, num_microbatches, v)


def named_schedule(
    name: str,
    num_positions: int,
    num_microbatches: int,
    stages_per_position: int | None = None,
    stages: tuple[StageCosts, ...] | None = None,
) -> Schedule:
    """A schedule of `NAMED` with its messages, one rank per position (see `named_orders`, `transfers.complete`).

    Args:
        name: of `NAMED`.
        num_positions: of the pipeline.
        num_microbatches: of a step.
        stages_per_position: left out, the schedule's own.
        stages: as of `complete`.
    """
    orders = named_orders(name, num_positions, num_microbatches, stages_per_position)
    return complete(name, orders, stages, NAMED[name].num_replicas)


def applicable(num_stages: int, num_positions: int, num_microbatches: int) -> dict[str, Orders]:
    """Every named schedule these sizes can take, by name.

    Args:
        num_stages: of the model.
        num_positions: of the pipeline.
        num_microbatches: of a step.
    """
    if num_positions < 1 or num_stages % num_positions:
        return {}
    found = {}
    for name in NAMED:
        try:
            found[name] = named_orders(name, num_positions, num_microbatches, num_stages // num_positions)
        except ConstraintError:
            continue
    return found
