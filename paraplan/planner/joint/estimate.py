"""What a combination comes to: its stages cut, priced and scheduled, without a plan being made.

Stages are cut so that the fullest position has least to do (`balanced_cuts`). Orders of the schedule are simulated over
stages' seconds and messages (`schedules.order_times`); what a position holds is its parameters' share, what its
microbatches in flight save, and a call's workspace. Where that is over the budget, as much is recomputed in its stages
as fits, by the kinds' own options at one price per byte, and the orders are simulated again. A stage's gradients are
reduced from its last backward's end on (the first stage's beside it), one stage of a position after another, beside
what it still computes; updates follow. Where two positions hold a stage, they exchange its gradients (an all-reduce of
two ranks moves each byte once). Limits: an estimate, neither a bound nor a simulated plan; halves of a backward are
taken to be equal; links are thought to be shared by nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from paraplan.planner.joint.closed_form import ClosedForm
from paraplan.planner.joint.combinations import ONE_STAGE, Combination
from paraplan.planner.pipeline.cuts.balanced_cuts import cut_balanced
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds, ChainMemory
from paraplan.planner.pipeline.stage_prices import StagePrices
from paraplan.planner.recompute.kind_options import RematOption
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.schedules.order_times import Ended, OrderTimes, named_times
from paraplan.planner.schedules.schedule_problem import StageCosts
from paraplan.rules.time_axis import program_micro

DEFERRED = 0.08
"""Of the budget, by how much a position may be over once recomputing does no more, as what waits for the second half of
a backward waits all the same; the step is taken to be longer by half as much."""


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
    """

    combination: Combination
    step_s: float
    over_bytes: int
    bounds: Bounds
    prices: StagePrices
    taken: tuple[int, ...] = ()

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


class Pricer(ClosedForm):
    """Estimates combinations on a cluster."""

    def estimate(self, combination: Combination, prices: StagePrices, mesh_shape: tuple[int, ...]) -> Estimate | None:
        """What a combination comes to; None where its stages cannot be cut.

        Raises:
            ConstraintError: its schedule does not take its microbatches.
        """
        program = prices.sharding.job.program
        schedule, pp = combination.schedule, combination.pp
        orders = named_times(schedule, pp, combination.microbatches, combination.each)
        tail = program_micro(program, combination.microbatches).tail
        bounds = cut_balanced(prices.seconds, orders.held, tail, combination.microbatches)
        if bounds is None:
            return None
        memory = prices.memory(mesh_shape)
        stages = tuple(self._stage(prices, memory, bound, combination, mesh_shape) for bound in bounds)
        found = orders.ended(stages)
        room = [self.room(prices.workspace_bytes, pp)] * pp
        stages, over, taken = _recomputed(prices, bounds, stages, orders.held, found.peak_bytes, room)
        if over:
            return Estimate(combination, math.inf, over, bounds, prices)
        short = 0.0
        if over is not None:
            found = orders.ended(stages)
            left = max(peak - each for peak, each in zip(found.peak_bytes, room, strict=True))
            if NAMED[schedule].splits and left > DEFERRED * self.budget:
                return Estimate(combination, math.inf, left, bounds, prices)
            short = max(left / self.budget, 0.0) / 2 if NAMED[schedule].splits else 0.0
        ended_s = self._ended_s(prices, bounds, stages, orders, found)
        if NAMED[schedule].num_replicas > 1:
            size = math.prod(mesh_shape)
            grads = (sum(memory.gradient_bytes(*bounds[stage]) for stage in mine) for mine in orders.held)
            ended_s += self.message_s(max(grads), size)
        return Estimate(combination, ended_s * (1 + short), 0, bounds, prices, taken)

    def _ended_s(
        self,
        prices: StagePrices,
        bounds: Bounds,
        stages: Sequence[StageCosts],
        orders: OrderTimes,
        found: Ended,
    ) -> float:
        """When the last position has reduced its gradients and updated: those of a stage that hands a gradient on from
        its last backward's end, those of the first beside it."""
        whole = sum(prices.seconds) or 1.0
        share = [sum(prices.seconds[slice(*bound)]) / whole for bound in bounds]
        over_s = found.stage_s
        ended_s = found.step_s
        for mine in orders.held:
            link_s = 0.0
            for stage in sorted(mine, key=lambda stage: over_s[stage]):
                reduce_s, parts = prices.reduce_s * share[stage], bounds[stage][1] - bounds[stage][0]
                beside_s = stages[stage].backward_s * (parts - 1) / parts if stage == 0 else 0.0
                link_s = max(link_s, over_s[stage] - beside_s) + reduce_s
                link_s = max(link_s, over_s[stage] + (reduce_s / parts if stage == 0 else 0.0))
            ended_s = max(ended_s, link_s + prices.update_s * sum(share[stage] for stage in mine))
        return ended_s + prices.gather_s * share[0]

    @staticmethod
    def _deferred(prices: StagePrices, bound: tuple[int, int]) -> int:
        """What a stage keeps of a microbatch between the halves of its backward."""
        sharding = prices.sharding
        return sum(sharding.deferred[segment.kind] for segment in sharding.job.program.segments[slice(*bound)])

    def _stage(
        self,
        prices: StagePrices,
        memory: ChainMemory,
        bound: tuple[int, int],
        combination: Combination,
        mesh_shape: tuple[int, ...],
    ) -> StageCosts:
        first, stop = bound
        forward_s = sum(prices.forward_s[first:stop]) + prices.cut_forward_s
        backward_s = sum(prices.backward_s[first:stop]) + prices.cut_backward_s
        send_s = self._hop_s(prices, stop, combination, mesh_shape)
        return StageCosts(
            forward_s=forward_s,
            backward_s=backward_s,
            input_grad_s=backward_s / 2,
            weight_grad_s=backward_s / 2,
            send_forward_s=send_s,
            send_backward_s=send_s,
            activation_bytes=sum(memory.saved_bytes[first:stop]),
            weight_grad_bytes=self._deferred(prices, bound) if NAMED[combination.schedule].splits else 0,
            fixed_bytes=memory.kept_bytes(first, stop),
        )

    def _hop_s(self, prices: StagePrices, stop: int, combination: Combination, mesh_shape: tuple[int, ...]) -> float:
        """What a microbatch of what the segments before `stop` make takes to the next position."""
        program, size = prices.sharding.job.program, math.prod(mesh_shape)
        if not 0 < stop < len(program.segments) or combination.pp == 1:
            return 0.0
        kind = program.kinds[program.segments[stop - 1].kind]
        nbytes = sum(kind.graph.values[name].nbytes for name in kind.outputs)
        return self.message_s(nbytes // (combination.microbatches * size), size)


def _recomputed(
    prices: StagePrices,
    bounds: Bounds,
    stages: tuple[StageCosts, ...],
    held: Sequence[Sequence[int]],
    peaks: Sequence[int],
    room: Sequence[int],
) -> tuple[tuple[StageCosts, ...], int | None, tuple[int, ...]]:
    """Stages with as much recomputed as fits.

    Returns:
        the stages; None where nothing had to be, 0 where that fits, else the bytes that are missing; what each segment
        takes, () where nothing had to be.
    """
    found, missing, any_over = list(stages), 0, False
    taken = [0] * len(prices.options)
    for position, mine in enumerate(held):
        if peaks[position] <= room[position]:
            continue
        any_over = True
        fixed = sum(stages[stage].fixed_bytes for stage in mine)
        flying = max(peaks[position] - fixed, 1)
        segments = [i for stage in mine for i in range(*bounds[stage])]
        whole = sum(prices.options[i][0].saved_bytes for i in segments)
        share = (room[position] - fixed) / flying
        fates = _cheapest(prices, segments, share * whole)
        if fates is None:
            least = sum(prices.options[i][-1].saved_bytes for i in segments)
            missing = max(missing, fixed + math.ceil(flying * least / max(whole, 1)) - room[position])
            continue
        for i in segments:
            taken[i] = fates[i]
        for stage in mine:
            chosen = [prices.options[i][fates[i]] for i in range(*bounds[stage])]
            extra, saved = sum(each.extra_s for each in chosen), sum(each.saved_bytes for each in chosen)
            was = stages[stage]
            found[stage] = msgspec.structs.replace(
                was, backward_s=was.backward_s + extra, input_grad_s=was.input_grad_s + extra, activation_bytes=saved
            )
    return tuple(found), (missing if any_over else None), tuple(taken) if any(taken) else ()


def _cheapest(prices: StagePrices, segments: Sequence[int], room: float) -> dict[int, int] | None:
    """Per segment the number of its option, at the least price per byte at which all fit; None: at none."""
    for price in prices.per_byte:
        best = {kind: _best(options, price) for kind, options in enumerate(prices.sharding.options)}
        fates = {i: best[prices.sharding.job.program.segments[i].kind] for i in segments}
        if sum(prices.options[i][o].saved_bytes for i, o in fates.items()) <= room:
            return fates
    return None


def _best(options: Sequence[RematOption], price: float) -> int:
    """The number of the option that takes least at a price per byte."""
    found = ((each.extra_s + price * each.saved_bytes, each.saved_bytes) for each in options)
    return min(enumerate(found), key=lambda each: each[1])[0]
