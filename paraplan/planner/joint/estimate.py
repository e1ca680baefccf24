"""What a combination comes to: its stages cut, priced and scheduled, without a plan being made.

Stages are cut so that the fullest position has least to do, what it makes again included (`balanced_cuts`), or where
none of these fits so that all do (`cut_fitting`). Orders of the schedule are simulated over stages' seconds and
messages (`schedules.order_times`); what a position holds is its parameters' share, what its microbatches save until
their backward and keep between its halves, and a call's workspace. Where that is over the budget, as much is recomputed
in its stages as fits, by the kinds' own options at one price per byte. A stage's gradients are reduced from its last
backward's end on (the first stage's beside it), one stage of a position after another, beside what it still computes;
updates follow. Where two positions hold a stage, they exchange its gradients (an all-reduce of two ranks moves each
byte once). Limits: an estimate, neither a bound nor a simulated plan; links are thought to be shared by nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.planner.joint.at_cut import (
    PricedPosition,
    deferred_bytes,
    held_bytes,
    least_over,
    recomputed,
    short_of,
    step_ended_s,
)
from paraplan.planner.joint.closed_form import ClosedForm
from paraplan.planner.joint.combinations import ONE_STAGE, Combination
from paraplan.planner.pipeline.cuts.balanced_cuts import Short, cut_balanced
from paraplan.planner.pipeline.cuts.cut_fitting import cut_fitting
from paraplan.planner.pipeline.cuts.cut_in_step import cut_in_step
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds, ChainMemory
from paraplan.planner.pipeline.links import rank_bytes
from paraplan.planner.pipeline.prices.stage_prices import StagePrices
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.schedules.order_times import OrderTimes, named_times
from paraplan.planner.schedules.schedule_problem import StageCosts
from paraplan.rules.time_axis import program_micro

DEFERRED = 0.08
"""Of the budget, by how much a position may be over once recomputing does no more, as what waits for the second half of
a backward waits all the same; the step is taken to be longer by half as much."""

RECUT = 3
"""How often a chain is cut anew by what its positions have to make again."""


@dataclass(frozen=True)
class Estimate:
    """A combination with what it comes to.

    Attributes:
        combination: which.
        step_s: of a step; infinite where nothing is recomputed enough to fit.
        over_bytes: by how much the fullest position is over the budget with all recomputed; 0 where it fits.
        bounds: of its stages.
        prices: those of its sharding.
        taken: per segment, the number of the option to recompute that it takes; () where nothing is.
        is_recut: whether stages are cut by what positions have to make again.
    """

    combination: Combination
    step_s: float
    over_bytes: int
    bounds: Bounds
    prices: StagePrices
    taken: tuple[int, ...] = ()
    is_recut: bool = False

    @property
    def numbers(self) -> EstimateNumbers:
        """It without what was priced, as processes tell it each other."""
        return EstimateNumbers(self.step_s, self.over_bytes, self.bounds, self.taken, self.is_recut)

    @property
    def rank(self) -> tuple[float, int]:
        """By which the most promising come first: those that fit by their step, the others by what they are over."""
        return self.step_s, self.over_bytes

    @property
    def family(self) -> str:
        """What it leaves out, others of a family leave out too: those of a schedule that recompute apart from those
        that do not."""
        family = self.combination.family
        return family if family == ONE_STAGE or not self.taken else f"{family}, recomputing"


class EstimateNumbers(NamedTuple):
    """An estimate without its combination and prices.

    Attributes:
        step_s, over_bytes, bounds, taken, is_recut: as of `Estimate`.
    """

    step_s: float
    over_bytes: int
    bounds: Bounds
    taken: tuple[int, ...]
    is_recut: bool

    def priced(self, combination: Combination, prices: StagePrices) -> Estimate:
        """The estimate of a combination, with its prices."""
        return Estimate(combination, self.step_s, self.over_bytes, self.bounds, prices, self.taken, self.is_recut)


class _AtCut(NamedTuple):
    """An estimate at a cut, and what memory makes of its positions' loads; () where none is short of any."""

    estimate: Estimate
    short: tuple[Short, ...]


class Pricer(ClosedForm):
    """Estimates combinations on a cluster.

    Args:
        cluster, budget: as of `ClosedForm`.
        stages: the segments [first, stop) of every stage where they are pinned.
    """

    def __init__(self, cluster: ClusterSpec, budget: int, stages: Bounds | None = None) -> None:
        super().__init__(cluster, budget)
        self.stages = stages

    def estimate(self, combination: Combination, prices: StagePrices, mesh_shape: tuple[int, ...]) -> Estimate | None:
        """What a combination comes to; None where its stages cannot be cut.

        Args:
            combination: degrees, schedule and microbatches.
            prices: of a sharding for its positions.
            mesh_shape: of a position.
        Raises:
            ConstraintError: its schedule does not take its microbatches.
        """
        program = prices.sharding.job.program
        schedule, pp = NAMED[combination.schedule], combination.pp
        orders = named_times(combination.schedule, pp, combination.microbatches, combination.each)
        tail = program_micro(program, combination.microbatches).tail
        bounds = self.stages or cut_balanced(prices.seconds, orders.held, tail, combination.microbatches)
        if bounds is None:
            return None
        found = self._cut(combination, prices, mesh_shape, orders, bounds)
        in_step = None if self.stages else cut_in_step(prices.seconds, orders.held, tail)
        if in_step is not None:
            other = self._cut(combination, prices, mesh_shape, orders, in_step)
            found = min(found, other, key=lambda each: each.estimate.rank)
        for _ in range(RECUT if found.short and self.stages is None else 0):
            bounds = cut_balanced(
                prices.seconds, orders.held, tail, combination.microbatches, found.short, found.estimate.bounds
            )
            if bounds is None or bounds == found.estimate.bounds:
                break
            recut = self._cut(combination, prices, mesh_shape, orders, bounds)
            if recut.estimate.rank >= found.estimate.rank:
                break
            found = recut._replace(estimate=replace(recut.estimate, is_recut=True))
        holds_one = combination.each == schedule.num_replicas == 1
        if math.isinf(found.estimate.step_s) and pp > 1 and holds_one and self.stages is None:
            return self.cut_to_fit(found.estimate, mesh_shape, orders) or found.estimate
        return found.estimate

    def cut_to_fit(self, estimate: Estimate, mesh_shape: tuple[int, ...], orders: OrderTimes) -> Estimate | None:
        """An estimate that does not fit, of the cut whose longest stage is shortest of all that fit with as much made
        again as there is; None where none does.

        Args:
            estimate: of one stage a position.
            mesh_shape: of a position.
            orders: of its schedule.
        """
        combination, prices = estimate.combination, estimate.prices
        memory, splits = prices.memory(mesh_shape), NAMED[combination.schedule].splits
        at = PricedPosition(prices, self.room(0, combination.pp))

        over: dict[tuple[int, int, int], int] = {}

        def fits(slack: float, position: int, first: int, stop: int) -> bool:
            key = position, first, stop
            if key not in over:
                costs = _stage_costs(prices, memory, (first, stop), (0.0, 0.0), splits)
                over[key] = least_over(at, position, (first, stop), costs, orders)
            return over[key] <= slack

        tail, bounds = program_micro(prices.sharding.job.program, combination.microbatches).tail, None
        for slack in (0.0, DEFERRED * self.budget) if splits else (0.0,):
            bounds = bounds or cut_fitting(prices.seconds, combination.pp, partial(fits, slack), tail)
        if bounds is None:
            return None
        found = self._cut(combination, prices, mesh_shape, orders, bounds).estimate
        return replace(found, is_recut=True) if math.isfinite(found.step_s) else None

    def held_bytes(self, estimate: Estimate, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Per position, what an estimated pipeline holds where that is most, but for reductions under way.

        Args:
            estimate: of this cluster.
            mesh_shape: of a position.
        """
        combination, prices, bounds = estimate.combination, estimate.prices, estimate.bounds
        orders = named_times(combination.schedule, combination.pp, combination.microbatches, combination.each)
        stages = self._stages(combination, prices, mesh_shape, orders, bounds)
        return held_bytes(prices, bounds, stages, orders, estimate.taken or (0,) * len(prices.options))

    def _cut(
        self,
        combination: Combination,
        prices: StagePrices,
        mesh_shape: tuple[int, ...],
        orders: OrderTimes,
        bounds: Bounds,
    ) -> _AtCut:
        """What a combination comes to with its stages cut so."""
        schedule, memory = NAMED[combination.schedule], prices.memory(mesh_shape)
        whole = self._stages(combination, prices, mesh_shape, orders, bounds)
        at = (PricedPosition(prices, self.room(0, combination.pp)),) * combination.pp
        stages, over, taken = recomputed(at, bounds, whole, orders)
        short = () if over is None else short_of(at, bounds, whole, orders, taken)
        if over and (not schedule.splits or over > DEFERRED * self.budget):
            return _AtCut(Estimate(combination, math.inf, over, bounds, prices), short)
        ended_s = step_ended_s(at, bounds, stages, orders, orders.ended(stages))
        if schedule.num_replicas > 1:
            grads = (sum(memory.gradient_bytes(*bounds[stage]) for stage in mine) for mine in orders.held)
            ended_s += self.message_s(max(grads), math.prod(mesh_shape), (0, combination.pp - 1))  # both hold a stage
        else:
            ended_s += self._tied_s(prices, memory, bounds, orders, math.prod(mesh_shape))
        step_s = ended_s * (1 + (over or 0) / self.budget / 2)
        return _AtCut(Estimate(combination, step_s, 0, bounds, prices, taken), short)

    def _stages(
        self,
        combination: Combination,
        prices: StagePrices,
        mesh_shape: tuple[int, ...],
        orders: OrderTimes,
        bounds: Bounds,
    ) -> tuple[StageCosts, ...]:
        """What the stages of a cut take and hold, nothing recomputed."""
        at = {stage: position for position, mine in enumerate(orders.held) for stage in mine}
        hops_s = [
            self._hop_s(prices, stop, combination, mesh_shape, (at[stage], at[stage + 1]))
            for stage, (_, stop) in enumerate(bounds[:-1])
        ]
        ends = zip([*hops_s, 0.0], [0.0, *hops_s], strict=True)
        memory, splits = prices.memory(mesh_shape), NAMED[combination.schedule].splits
        return tuple(
            _stage_costs(prices, memory, bound, hop_s, splits) for bound, hop_s in zip(bounds, ends, strict=True)
        )

    def _tied_s(self, prices: StagePrices, memory: ChainMemory, bounds: Bounds, orders: OrderTimes, size: int) -> float:
        """What positions take to add up the gradients of parameters that several of them have."""
        program, found = prices.sharding.job.program, 0.0
        holders: dict[str, dict[int, int]] = {}
        for position, mine in enumerate(orders.held):
            for i in (i for stage in mine for i in range(*bounds[stage])):
                for name in program.segments[i].params:
                    holders.setdefault(name, {}).setdefault(position, i)
        for name, at in holders.items():
            if len(at) > 1:
                (first, segment), *_, (last, _) = at.items()
                of = sum(program.params[each].spec.nbytes for each in program.segments[segment].params)
                share = program.params[name].spec.nbytes / max(of, 1)
                found += self.message_s(int(memory.gradient_bytes(segment, segment + 1) * share), size, (first, last))
        return found

    def _hop_s(
        self,
        prices: StagePrices,
        stop: int,
        combination: Combination,
        mesh_shape: tuple[int, ...],
        hop: tuple[int, int],
    ) -> float:
        """What a microbatch of what the segments before `stop` make takes from a position to another, or its gradient
        back; nothing where both are one. What several ranks hold is sent by each, or in parts that these gather."""
        program, size = prices.sharding.job.program, math.prod(mesh_shape)
        if not 0 < stop < len(program.segments) or hop[0] == hop[1]:
            return 0.0
        held = rank_bytes(prices, stop - 1, combination.microbatches, mesh_shape)
        kind = program.kinds[program.segments[stop - 1].kind]
        nbytes = sum(kind.graph.values[name].nbytes for name in kind.outputs)
        part = nbytes // (combination.microbatches * size)
        whole_s = self.message_s(held, size, hop)
        if held <= part:
            return whole_s
        return min(whole_s, self.message_s(part, size, hop) + self.message_s(held - part, 1, (0, size - 1)))


def _stage_costs(
    prices: StagePrices, memory: ChainMemory, bound: tuple[int, int], sends_s: tuple[float, float], splits: bool
) -> StageCosts:
    first, stop = bound
    return StageCosts(
        **prices.stage_seconds(bound, splits)._asdict(),
        send_forward_s=sends_s[0],
        send_backward_s=sends_s[1],
        activation_bytes=sum(memory.saved_bytes[first:stop]),
        weight_grad_bytes=deferred_bytes(prices, bound) if splits else 0,
        fixed_bytes=memory.kept_bytes(first, stop),
        grad_bytes=memory.gradient_bytes(first, stop),
        reduced_bytes=memory.reduced(first, stop),
        gathered_bytes=memory.gathered(first, stop),
    )
