"""What a pipeline over differing positions comes to at a cut, and the cut at which it comes to least.

The chain is cut so that the slowest stage takes least, each stage by its own position's seconds, with and without what
positions have room for when they recompute nothing and all they can (`cuts.unequal_cuts`). From the best of these cuts
on boundaries shift by a segment as long as the estimated step gets shorter. Orders are simulated over stages' seconds
and messages over their own links; what is short of memory is recomputed by its own position's options. An estimate,
neither a bound nor a simulated plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paraplan.planner.joint.at_cut import deferred_bytes, recomputed, step_ended_s
from paraplan.planner.joint.estimate import DEFERRED
from paraplan.planner.mixed.links import Handing
from paraplan.planner.mixed.positions import MixedPipeline, Position
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds
from paraplan.planner.pipeline.cuts.unequal_cuts import Costs, cut_unequal, stage_costs
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.schedules.order_times import OrderTimes, named_times
from paraplan.planner.schedules.schedule_problem import StageCosts
from paraplan.rules.time_axis import program_micro

MOVES = 24
"""Boundaries shifted one after another at most."""


@dataclass(frozen=True)
class MixedEstimate:
    """A pipeline with what it comes to.

    Attributes:
        pipeline, positions: which.
        bounds: of its stages.
        step_s: infinite where nothing is recomputed enough to fit.
        over_bytes: by how much the position that lacks most is over its room with all recomputed.
        taken: per segment, the number of the option to recompute that it takes on its position; () where nothing is.
    """

    pipeline: MixedPipeline
    positions: tuple[Position, ...]
    bounds: Bounds
    step_s: float
    over_bytes: int = 0
    taken: tuple[int, ...] = ()

    @property
    def rank(self) -> tuple[float, int]:
        """By which the most promising come first."""
        return self.step_s, self.over_bytes


class MixedPricer:
    """Estimates a pipeline on its positions.

    Args:
        pipeline: which.
        positions: in its order.
        handing: what stages hand on.
    Raises:
        ConstraintError: the schedule does not take so many microbatches.
    """

    def __init__(self, pipeline: MixedPipeline, positions: Sequence[Position], handing: Handing) -> None:
        self.pipeline, self.positions, self.handing = pipeline, tuple(positions), handing
        self.orders: OrderTimes = named_times(pipeline.schedule, pipeline.pp, pipeline.microbatches, pipeline.each)
        self.of = [0] * pipeline.num_stages
        for position, mine in enumerate(self.orders.held):
            for stage in mine:
                self.of[stage] = position
        program = positions[0].prices.sharding.job.program
        self.segments, self.tail = len(program.segments), program_micro(program, pipeline.microbatches).tail
        self._known: dict[Bounds, MixedEstimate] = {}

    def begun(self) -> MixedEstimate | None:
        """The best of the first cuts; None where there is none."""
        return min((self.at(bounds) for bounds in self._cuts()), key=lambda each: each.rank, default=None)

    def improved(self, found: MixedEstimate) -> MixedEstimate:
        """The estimate at the cut to which boundaries shift from that of another, as long as it gets better."""
        for _ in range(MOVES):
            near = min(map(self.at, shifted(found.bounds, self.tail)), key=lambda each: each.rank, default=found)
            if near.rank >= found.rank:
                break
            found = near
        return found

    def at(self, bounds: Bounds) -> MixedEstimate:
        """The estimate at a cut."""
        if bounds not in self._known:
            self._known[bounds] = self._at(bounds)
        return self._known[bounds]

    def _at(self, bounds: Bounds) -> MixedEstimate:
        whole = tuple(self._stage(stage, bounds) for stage in range(len(bounds)))
        stages, over, taken = recomputed(self.positions, bounds, whole, self.orders)
        least = min(position.budget for position in self.positions)
        if over and (not NAMED[self.pipeline.schedule].splits or over > DEFERRED * least):
            return MixedEstimate(self.pipeline, self.positions, bounds, math.inf, over)
        ended_s = step_ended_s(self.positions, bounds, stages, self.orders, self.orders.ended(stages))
        step_s = ended_s * (1 + (over or 0) / least / 2)
        return MixedEstimate(self.pipeline, self.positions, bounds, step_s, 0, taken)

    def _stage(self, stage: int, bounds: Bounds) -> StageCosts:
        first, stop = bounds[stage]
        position = self.positions[self.of[stage]]
        prices, memory, m = position.prices, position.memory, self.pipeline.microbatches
        after = self.positions[self.of[min(stage + 1, len(bounds) - 1)]]
        before = self.positions[self.of[max(stage - 1, 0)]]
        splits = NAMED[self.pipeline.schedule].splits
        return StageCosts(
            **prices.stage_seconds(bounds[stage], splits)._asdict(),
            send_forward_s=self.handing.hop_s(position, after, stop, m),
            send_backward_s=self.handing.hop_s(before, position, first, m),
            activation_bytes=sum(memory.saved_bytes[first:stop]),
            weight_grad_bytes=deferred_bytes(prices, bounds[stage]) if splits else 0,
            fixed_bytes=memory.kept_bytes(first, stop),
            grad_bytes=memory.gradient_bytes(first, stop),
            reduced_bytes=memory.reduced(first, stop),
            gathered_bytes=memory.gathered(first, stop),
        )

    def _cuts(self) -> Iterator[Bounds]:
        """Cuts by time alone, by what fits if nothing is recomputed, and if all is."""
        for option in (None, 0, -1):
            cut = cut_unequal(self._costs(option), self.tail)
            if cut is not None:
                yield cut

    def _costs(self, option: int | None) -> list[Costs]:
        """Per stage, what runs of segments take on its position; infinite where they hold more than its share of the
        room, under the options to recompute that save most (0) or least (-1) of a microbatch."""
        found: list[Costs] = []
        known: dict[tuple[int, int, int], Costs] = {}
        ones = [0] * self.pipeline.num_stages
        for stage, at in enumerate(self.of):
            position, alone = self.positions[at], list(ones)
            alone[stage] = 1
            flying = 0 if option is None else self.orders.waiting_bytes(at, alone, ones)
            key = id(position.prices), position.room, flying
            if key not in known:
                cost = stage_costs(position.prices.seconds)
                if option is not None:
                    saved = np.array([0, *itertools.accumulate(e[option].saved_bytes for e in position.prices.options)])
                    held = position.memory.kept + flying * (saved[None, :] - saved[:, None])
                    cost = np.where(held <= position.least_room / self.pipeline.each, cost, np.inf)
                known[key] = cost
            found.append(known[key])
        return found


def shifted(bounds: Bounds, tail: int) -> Iterator[Bounds]:
    """Cuts in which one boundary lies a segment lower or higher, and every stage keeps one."""
    for stage, step in itertools.product(range(1, len(bounds)), (-1, 1)):
        at = bounds[stage][0] + step
        is_kept = bounds[stage - 1][0] < at < bounds[stage][1] and (stage < len(bounds) - 1 or at <= tail)
        if is_kept:
            found = list(bounds)
            found[stage - 1], found[stage] = (bounds[stage - 1][0], at), (at, bounds[stage][1])
            yield tuple(found)
