"""What positions make of a cut: what their stages recompute to fit, and when the last of them ends a step.

Positions need not be equal: each has prices of its own devices, and room of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from paraplan.planner.pipeline.cuts.balanced_cuts import Short
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds
from paraplan.planner.pipeline.prices.stage_prices import StagePrices
from paraplan.planner.schedules.order_memory import Waiting
from paraplan.planner.schedules.order_times import Ended, OrderTimes
from paraplan.planner.schedules.schedule_problem import StageCosts

FULLEST = 2
"""Instants at which positions are fullest, one after another, at which bytes are priced."""


@dataclass(frozen=True)
class PricedPosition:
    """A position of a pipeline.

    Attributes:
        prices: of its devices.
        room: bytes that it may hold beside what reductions under way hold for a moment.
    """

    prices: StagePrices
    room: int

    @property
    def least_room(self) -> int:
        """Bytes that it may hold whatever segments it has."""
        return self.room_of([(0, len(self.prices.call_bytes))], (0,))

    def room_of(self, bounds: Sequence[tuple[int, int]], mine: Sequence[int]) -> int:
        """Bytes that it may hold beside what calls of its stages hold for a moment as well."""
        return self.room - self.prices.workspace_bytes(*(bounds[stage] for stage in mine))


def recomputed(
    positions: Sequence[PricedPosition], bounds: Bounds, stages: tuple[StageCosts, ...], orders: OrderTimes
) -> tuple[tuple[StageCosts, ...], int | None, tuple[int, ...]]:
    """Stages with as much recomputed as fits.

    Args:
        positions, bounds, stages: of the pipeline, the cut and its stages, nothing recomputed.
        orders: of the schedule.
    Returns:
        the stages; None where nothing had to be, 0 where that fits, else the bytes that are missing; what each segment
        takes, () where nothing had to be.
    """
    found, missing, any_over = list(stages), 0, False
    taken = [0] * len(positions[0].prices.options)
    saved, deferred = [each.activation_bytes for each in stages], [each.weight_grad_bytes for each in stages]
    for position, mine in enumerate(orders.held):
        room = positions[position].room - sum(stages[stage].fixed_bytes for stage in mine)
        at = _Holding(positions[position].prices, position, mine, bounds, stages, orders, saved, deferred, taken, room)
        if at.over_bytes() <= 0:
            continue
        any_over, prices = True, positions[position].prices
        over = _taken_to_fit(at)
        missing = max(missing, over)
        for stage in mine:
            extra = sum(prices.options[i][taken[i]].extra_s for i in range(*bounds[stage]))
            was = stages[stage]
            found[stage] = msgspec.structs.replace(
                was,
                backward_s=was.backward_s + extra,
                input_grad_s=was.input_grad_s + extra,
                activation_bytes=saved[stage],
                weight_grad_bytes=deferred[stage],
            )
    return tuple(found), (missing if any_over else None), tuple(taken) if any(taken) else ()


def least_over(at: PricedPosition, number: int, bound: tuple[int, int], costs: StageCosts, orders: OrderTimes) -> int:
    """What a position of one stage is over by with as much made again as there is; below 0 what it has left.

    Args:
        at: the position; `number`: which one.
        bound: its segments.
        costs: of its stage, nothing recomputed.
        orders: of the schedule.
    """
    positions = len(orders.held)
    saved, deferred = [costs.activation_bytes] * positions, [costs.weight_grad_bytes] * positions
    taken = [len(options) - 1 for options in at.prices.options]
    bounds, stages, room = (bound,) * positions, (costs,) * positions, at.room - costs.fixed_bytes
    return _Holding(at.prices, number, (number,), bounds, stages, orders, saved, deferred, taken, room).over_bytes()


def held_bytes(
    prices: StagePrices, bounds: Bounds, stages: Sequence[StageCosts], orders: OrderTimes, taken: Sequence[int]
) -> tuple[int, ...]:
    """Per position, what it holds where it is fullest.

    Args:
        prices: of every position.
        bounds, stages: of the pipeline, the cut and its stages, nothing recomputed.
        orders: of the schedule.
        taken: per segment, the number of the option to recompute that it takes.
    """
    saved, deferred = [each.activation_bytes for each in stages], [each.weight_grad_bytes for each in stages]
    found = []
    for position, mine in enumerate(orders.held):
        at = _Holding(prices, position, mine, bounds, stages, orders, saved, deferred, list(taken), 0)
        found.append(sum(stages[stage].fixed_bytes for stage in mine) + at.over_bytes())
    return tuple(found)


def _taken_to_fit(at: _Holding) -> int:
    """Have a position's segments make again as little as lets it fit. What it is over by then.

    Bytes are priced as they are held where it is fullest; where it is not that any more once that is so, as they are
    held there.
    """
    kinds, before, over = [segment.kind for segment in at.prices.sharding.job.program.segments], at.taken[:], 0
    for _ in range(FULLEST):
        share = at.waiting().share
        at.taken[:] = before
        for choice in at.prices.choices(share):
            was = at.taken[:]
            for i in at.segments:
                at.taken[i] = choice[kinds[i]]
            if at.over_bytes() <= 0:
                return _undone(at.taken, [(i, was[i]) for i in at.segments if was[i] != at.taken[i]], at.over_bytes)
        over = at.over_bytes()
    return over


@dataclass(frozen=True)
class _Holding:
    """What a position is over by as its segments take one option or another.

    Attributes:
        prices: of the position; `number`: which one; `mine`: its stages.
        bounds, stages, orders: of the pipeline.
        saved, deferred: per stage, what a microbatch saves, and holds between the halves of its backward (0 where that
            is one); changed with what is taken.
        taken: per segment, its option.
        room: for microbatches, and what calls hold for a moment.
    """

    prices: StagePrices
    number: int
    mine: Sequence[int]
    bounds: Bounds
    stages: Sequence[StageCosts]
    orders: OrderTimes
    saved: list[int]
    deferred: list[int]
    taken: list[int]
    room: int

    @property
    def segments(self) -> list[int]:
        """Its own, in the order of the chain."""
        return [i for stage in self.mine for i in range(*self.bounds[stage])]

    def over_bytes(self) -> int:
        """What it is over its room by, with what its segments take now."""
        calls = max((self._call_bytes(i) for i in self.segments), default=0)
        return max(self.waiting().nbytes + calls, self.prices.other_bytes) - self.room

    def _call_bytes(self, i: int) -> int:
        """What a segment's calls hold for a moment, with what its backward made again, where that does not wait."""
        most, *_ = options = self.prices.options[i]
        again = most.saved_bytes - options[self.taken[i]].saved_bytes
        return self.prices.call_bytes[i] + (0 if any(self.deferred[stage] for stage in self.mine) else again)

    def waiting(self) -> Waiting:
        """What it holds of microbatches where it is fullest, with what its segments take now."""
        options = self.prices.options
        for stage in self.mine:
            chosen = [options[i][self.taken[i]] for i in range(*self.bounds[stage])]
            self.saved[stage] = sum(each.saved_bytes for each in chosen)
            if self.deferred[stage]:
                self.deferred[stage] = sum(each.deferred_bytes for each in chosen)
        return self.orders.waiting(self.number, self.saved, self.deferred, self.stages)


def _undone(taken: list[int], turned: Sequence[tuple[int, int]], over_by: Callable[[], int]) -> int:
    """As many segments as may keep what they took before take it again, the last ones first, which wait in fewest
    microbatches. What the position is over by then.

    Args:
        taken: per segment, the option it takes; changed.
        turned: segments with what they took before, in the order of the chain.
        over_by: bytes that the position is over by.
    """
    after = [taken[i] for i, _ in turned]

    def with_first(count: int) -> int:
        for number, (i, was) in enumerate(turned):
            taken[i] = after[number] if number < count else was
        return over_by()

    least = bisect_left(range(len(turned)), True, key=lambda count: with_first(count) <= 0)
    return with_first(least)


def short_of(
    positions: Sequence[PricedPosition],
    bounds: Bounds,
    stages: Sequence[StageCosts],
    orders: OrderTimes,
    taken: Sequence[int],
) -> tuple[Short, ...]:
    """What memory makes of positions' loads: of one that is over, what it makes again for every byte it is over by; of
    one that is not, were it to be, the least of others'.

    Args:
        positions: of the pipeline, in order.
        bounds: per stage, its segments.
        stages: their costs with nothing recomputed.
        orders: of the schedule.
        taken: per segment, the number of the option to recompute that it has to take; () where nothing is recomputed.
    """
    peaks = orders.peak_bytes(tuple(stages))
    own_s, again = [], []
    for position, mine in enumerate(orders.held):
        prices, room = positions[position].prices, positions[position].room_of(bounds, mine)
        own_s.append(sum(sum(prices.seconds[slice(*bounds[stage])]) for stage in mine) or 1.0)
        extra = sum(prices.options[i][taken[i]].extra_s for s in mine for i in range(*bounds[s])) if taken else 0.0
        again.append(extra / max(peaks[position] - room, 1))
    least = min((each for each in again if each > 0), default=positions[0].prices.dearest)
    return tuple(
        Short(peak / own, float(at.room_of(bounds, mine)), each or least)
        for peak, own, each, at, mine in zip(peaks, own_s, again, positions, orders.held, strict=True)
    )


def step_ended_s(
    positions: Sequence[PricedPosition],
    bounds: Bounds,
    stages: Sequence[StageCosts],
    orders: OrderTimes,
    found: Ended,
) -> float:
    """When the last position has reduced its gradients and updated: those of a stage that hands a gradient on from
    its last backward's end, those of the first beside it.

    Args:
        positions, bounds, orders: as of `short_of`.
        stages: their costs, with what they recompute.
        found: when stages end.
    """
    over_s, ended_s, gathered_s = found.stage_s, found.step_s, 0.0
    for position, mine in enumerate(orders.held):
        prices, link_s = positions[position].prices, 0.0
        whole = sum(prices.seconds) or 1.0
        share = {stage: sum(prices.seconds[slice(*bounds[stage])]) / whole for stage in mine}
        for stage in sorted(mine, key=lambda stage: over_s[stage]):
            reduce_s, parts = prices.reduce_s * share[stage], bounds[stage][1] - bounds[stage][0]
            beside_s = stages[stage].backward_s * (parts - 1) / parts if stage == 0 else 0.0
            link_s = max(link_s, over_s[stage] - beside_s) + reduce_s
            link_s = max(link_s, over_s[stage] + (reduce_s / parts if stage == 0 else 0.0))
        ended_s = max(ended_s, link_s + prices.update_s * sum(share[stage] for stage in mine))
        if 0 in share:
            gathered_s = prices.gather_s * share[0]
    return ended_s + gathered_s


def deferred_bytes(prices: StagePrices, bound: tuple[int, int]) -> int:
    """What a stage that recomputes nothing keeps of a microbatch between the halves of its backward."""
    return sum(options[0].deferred_bytes for options in prices.options[slice(*bound)])
