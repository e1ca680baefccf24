"""A lower bound on the step of every combination of a space: what its certificate says.

Of a combination of pp positions and m microbatches, let y_i be what a microbatch of segment i takes of what is done in
it at least (`relaxations`: computed, waited for, or busy links). Any order of a schedule and any cut into stages has

    step >= m . y(p) + idle(p)          p: a position; y(p): of its segments; idle(p): a first microbatch's forward
                                        comes to its lowest stage, a last one's backward goes on from it
    step >= m / r . c / k               k: the most microbatches in flight at once in a stage 0, each while all segments
                                        compute, c; r: groups of positions

so of all cuts the least is found: of one stage a position by filling positions from the first on up to a limit, which
covers most; of several by what has to be together at least. What a schedule's own orders take in whatever stages is
bounded by paths through them (`order_bounds`). And summed over positions,

    pp . step >= work(x) + once(x) + again(x) + sum of idle(p)
    pp . budget >= kept(x) + sum over segments of waiting(i) . saved_i(x)

for the sharding x and what is recomputed: the least step that keeps the second is bounded at a price per byte, raised
as long as that pays. In how many microbatches a segment waits (`in_flight`) depends on cuts, of which only those are
looked at that may beat the best step known. Work of a microbatch is priced at the samples it has, before that at the
most that any has on such positions, and before that at that of the whole batch, shared out. Combinations are refined
in the order of what is known of them, the lowest first, until the lowest needs no more or time is up (`refining`);
whatever the time, the least of them is a bound.

Where nothing is idle, ranks update on the average what all parameters take over all devices. Left out, so that the
bound holds whatever is done: reductions of gradients in every microbatch, messages between positions, what calls hold
for a moment. Assumed: an op or a transfer takes no less time in total when its samples or its work are divided
further, and where positions have several stages, these are cut evenly but for one, or for as many as the best plan is;
the scope says so.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from paraplan.ir.errors import ConstraintError, NoPlanError, ParaplanError
from paraplan.ir.machine.mesh import Mesh
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.joint.bounding.cut_bounds import filled_s, shared_s
from paraplan.planner.joint.bounding.in_flight import even_stages, fullest, most_at_once, spread_of, waiting
from paraplan.planner.joint.bounding.least import Flying, Least, passing_s
from paraplan.planner.joint.bounding.order_bounds import Counts, orders_s, passed
from paraplan.planner.joint.bounding.refining import NEAR, Level, Refining, Timed
from paraplan.planner.joint.bounding.relaxations import (
    Activations,
    RelaxedPosition,
    Tangent,
    kept_bytes,
    next_price,
    segments_s,
    updated_s,
)
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.pipeline.first_devices import first_devices
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.schedules.named import NAMED, named_orders
from paraplan.planner.sharding.solve import problem_of
from paraplan.planner.sharding.space import Space

FEW = 2
"""Microbatches a position below which schedules are bounded by how many are in flight."""
EACH_S = 3.0
"""Seconds for one relaxation."""
PRICES = 6
"""Prices per byte that are tried for a combination at most."""
FIRST = 0.03
"""The share of a step that all bytes over the room cost at the first price, where activations ask for none."""
FILLED = 4
"""Microbatches a position of which a schedule's orders are looked at: it has as many in flight in more."""

Moments = list[tuple[bool, list[float]]]
"""When positions are fullest: whether gradients that add up are there, and per kind, in how many microbatches its
instances wait at least."""
Where = Callable[[Combination], tuple[Job, Constraints, Mesh]]
Way = tuple[object, float]
"""What combinations alike have in common, and the samples of their microbatches."""


class SpaceBound:
    """Bounds a space of combinations.

    Args:
        job, constraints: what is planned, and what is pinned.
        budget: bytes a device may hold.
        position: of a combination: the job on a position's devices, what is pinned there, and the mesh.
        way: of a combination, what those alike have in common, and the samples of its microbatches.
        cut: per stage of the best plan, its segments [first, stop); none where it is of no matter.

    Attributes:
        spread: stages that a segment may be off an even cut, where positions have several.
        updated_s: what every rank computes of updates at least, on the average.
    """

    def __init__(
        self,
        job: Job,
        constraints: Constraints,
        budget: int,
        position: Where,
        way: Callable[[Combination], Way],
        cut: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.job, self.constraints, self.budget, self.where, self.way = job, constraints, budget, position, way
        self.cut, self.spread, self.updated_s = cut, 1, 0.0
        self._even_by: Sequence[float] = ()
        self._positions = Timed[RelaxedPosition | None]()
        self._weights: dict[str, float] = {}
        self._flying: dict[object, Flying | None] = {}
        self._passed: dict[object, Counts | None] = {}
        self._kept: dict[bool, float] = {}
        self._waits: dict[tuple[Flying, tuple[float, ...]], Moments | None] = {}

    def bound_s(self, listed: Sequence[Combination], best_s: float, stop: float) -> float:
        """No combination has a shorter step.

        Args:
            listed: the space.
            best_s: the shortest step known.
            stop: `time.perf_counter()` at which to come back with what there is.
        Returns:
            Seconds; 0.0 where nothing was proved, as where a combination cannot be relaxed.
        """
        try:
            refining = self.refining(listed, best_s)
            refining.go_on(stop)
        except ParaplanError:  # the plan that was found is none the worse
            return 0.0
        return refining.least_s

    def refining(self, listed: Sequence[Combination], best_s: float) -> Refining:
        """The bounds of combinations, to be refined.

        Args:
            listed: the space.
            best_s: the shortest step known.
        """
        alike = {self.way(each): each for each in sorted(listed, key=lambda each: each.pp)}
        undivided = self._undivided(min(each.microbatches for each in listed))  # whose ranks may have all its samples
        self._even_by = undivided(listed[0]).each_s
        self.spread = max(spread_of(self.cut, self._even_by), 1) if len(self.cut) > 1 else 1
        self._waits.clear()
        largest = largest_of(alike)

        def own(each: Combination) -> Combination:
            return alike[self.way(each)]

        def coarser(each: Combination) -> Combination:
            return alike[largest[self.way(each)]]

        def first_s(each: Combination) -> float:
            return self.combination_s(each, undivided(each))

        def shared_out_s(each: Combination) -> float:
            return self._relaxed_s(each, undivided(each), best_s)

        def coarser_s(each: Combination) -> float:
            times = self.way(each)[1] / self.way(coarser(each))[1]
            return self._relaxed_s(each, self._relaxed(coarser(each), times) or undivided(each), best_s)

        def own_s(each: Combination) -> float:
            return self._relaxed_s(each, self._relaxed(own(each)) or undivided(each), best_s)

        def in_order_s(each: Combination) -> float:
            return self._orders_s(each, self._relaxed(own(each)) or undivided(each))

        def within_s(each: Combination) -> float:
            return self._fitting_s(each, self._relaxed(own(each)) or undivided(each), best_s)

        def key_of(which: Callable[[Combination], Combination]) -> Callable[[Combination], Hashable]:
            return lambda each: self._key(which(each))

        levels = (
            Level(shared_out_s, key_of(coarser)),
            Level(coarser_s, key_of(coarser)),
            Level(own_s, key_of(own)),
            Level(in_order_s, key_of(own)),
            Level(within_s, self._key),
        )
        return Refining(listed, first_s, levels, self._positions, best_s)

    def combination_s(self, combination: Combination, least: Least) -> float:
        """The bound of a combination by what its microbatches take."""
        pp, m, replicas = combination.pp, combination.microbatches, NAMED[combination.schedule].num_replicas
        found_s = m * least.whole_s / pp + self._once_s(combination, least)
        if replicas > 1:
            return found_s
        if combination.each > 1:
            return max(found_s, m * shared_s(least.each_s, pp))
        return max(found_s, filled_s(least.each_s, passing_s(combination, least), pp, m))

    def _orders_s(self, combination: Combination, least: Least) -> float:
        """The bound of a combination by the orders of its schedule, in whatever stages; 0.0 where they are too long."""
        name, pp, count, each = combination.schedule, combination.pp, combination.microbatches, combination.each
        key = name, pp, count, each
        if key not in self._passed:
            self._passed[key] = passed(combination.orders(), EACH_S)
        if (counts := self._passed[key]) is None:
            return 0.0
        first = tuple(both - f for both, f in zip(least.round_s, least.forward_s, strict=True))
        second = tuple(b - i for b, i in zip(least.backward_s, first, strict=True))
        return orders_s(counts, (least.forward_s, least.backward_s, first, second))

    def _rounds_s(self, combination: Combination, least: Least) -> float:
        """The bound of a combination by how long a microbatch is in flight, at most so many at once; infinite where its
        schedule does not exist. Of schedules with few microbatches, or few in flight: of others it says little."""
        count, replicas = combination.microbatches, NAMED[combination.schedule].num_replicas
        if replicas == 1 and count >= FEW * combination.pp:
            return 0.0
        flying = self.flying(combination)
        return math.inf if flying is None else count // replicas * sum(least.round_s) / flying.at_once

    def _idle_s(self, combination: Combination, least: Least) -> float:
        """What positions are idle for, on the average: a first microbatch passes what lies before the lowest stage of
        each, and a last one on its way back where backwards are whole. That is a segment a stage at least, and where
        stages are cut evenly, all that no such cut has so late."""
        pp, before = combination.pp, [0.0, *itertools.accumulate(passing_s(combination, least))]
        both = NAMED[combination.schedule].num_replicas > 1
        lowest = [min(p, pp - 1 - p) if both else p for p in range(pp)]
        surely = list(lowest)
        if both or combination.each > 1:
            even = even_stages(self._even_by or least.each_s, pp * combination.each)
            surely = [bisect_left(even, stage - self.spread) for stage in lowest]
        return sum(before[max(each)] for each in zip(lowest, surely, strict=True)) / pp

    def _once_s(self, combination: Combination, least: Least) -> float:
        """What positions are idle for, or, of those that go on to update while others still have a microbatch, what
        they update for; on the average."""
        return max(self._idle_s(combination, least), least.computed * self.updated_s)

    def flying(self, combination: Combination) -> Flying | None:
        """How many microbatches are in flight in a combination; None where its schedule does not exist."""
        name, pp, each, count = combination.schedule, combination.pp, combination.each, combination.microbatches
        few = count if name == "gpipe" else min(count, FILLED * pp)
        if (name, pp, each, few) not in self._flying:
            try:
                orders = named_orders(name, pp, few, each)
                self._flying[name, pp, each, few] = Flying(fullest(orders), most_at_once(orders))
            except ConstraintError:
                self._flying[name, pp, each, few] = None
        return self._flying[name, pp, each, few]

    def _relaxed_s(self, combination: Combination, least: Least, best_s: float) -> float:
        """The bound of a combination by what its microbatches take, and recompute to fit beside what parameters keep
        where all are sharded as far as can be."""
        found_s = max(self.combination_s(combination, least), self._rounds_s(combination, least))
        if least.position is None or found_s >= (1 - NEAR) * best_s:
            return found_s
        if (moments := self._moments(combination, least, best_s)) is None:
            return max(found_s, best_s)
        pp, m, again_s = combination.pp, combination.microbatches, 0.0
        for have_grads, counts in moments:
            room = self.budget * pp - self._kept_bytes(combination, m > 1 and have_grads)
            activations = Activations(least.position, counts, m, least.share)
            price = activations.price_of(least.computed, room)
            again_s = max(again_s, activations.least(least.computed, price)[0] - price * max(room, 0.0))
        return max(found_s, (m * least.whole_s + again_s) / pp + self._once_s(combination, least))

    def _kept_bytes(self, combination: Combination, has_grads: bool) -> float:
        """What the positions' ranks keep of parameters and states at least, a rank of each, and of gradients."""
        if self.constraints.state_tiers:
            return 0.0
        if has_grads not in self._kept:
            self._kept[has_grads] = kept_bytes(self.job, has_grads) / self.job.cluster.num_devices
        return NAMED[combination.schedule].num_replicas * self._kept[has_grads] * combination.pp

    def _moments(self, combination: Combination, least: Least, best_s: float) -> Moments | None:
        """When positions are fullest, of cuts that may beat the best step; None where there are no such cuts."""
        if self.constraints.tiers:
            return [(False, [0.0] * len(self.job.program.kinds))]
        flying = self.flying(combination)
        if flying is None:
            return None
        if combination.each == 1 and NAMED[combination.schedule].num_replicas == 1:
            return self._waiting(flying, least.each_s, best_s / combination.microbatches)
        key = flying, tuple(self._even_by or least.each_s)
        if key not in self._waits:
            self._waits[key] = self._waiting(*key, None)
        return self._waits[key]

    def _waiting(self, flying: Flying, seconds: Sequence[float], limit_s: float | None) -> Moments | None:
        """The moments of cuts within a limit (see `waiting`)."""
        found: Moments = []
        for moment in flying.fullest:
            waits = waiting(moment.counts, seconds, limit_s, self.spread)
            if waits is None:
                return None
            counts = [0.0] * len(self.job.program.kinds)
            for segment, count in zip(self.job.program.segments, waits, strict=True):
                counts[segment.kind] += count
            found.append((moment.have_grads, counts))
        return found

    def _fitting_s(self, combination: Combination, least: Least, best_s: float) -> float:
        """The bound of a combination within what devices may hold, of cuts that may beat the best step."""
        position, moments = self._position(combination), self._moments(combination, least, best_s)
        if position is None:
            return 0.0
        if moments is None:
            return best_s
        pp, replicas = combination.pp, NAMED[combination.schedule].num_replicas
        idle_s, room, found_s = self._idle_s(combination, least), float(self.budget * pp), 0.0
        for have_grads, counts in moments:
            activations = Activations(position, counts, combination.microbatches)
            tangents: list[Tangent] = []
            price: float | None = 0.0
            while price is not None and len(tangents) < PRICES and found_s / pp + idle_s < (1 - NEAR) * best_s:
                kept = position.kept(price * replicas, have_grads)
                if kept is None:
                    break
                again_s, waits_bytes = activations.least(kept.computed, price)
                over = replicas * kept.kept_bytes + waits_bytes - room
                tangents.append(Tangent(price, kept.least_s + again_s - price * room, over))
                found_s = max(found_s, tangents[-1].value_s)
                usual = min(activations.price_of(kept.computed, room / 2), 4 * price or math.inf)
                usual = usual or FIRST * found_s / max(over, 1.0)
                price = next_price(tangents, usual)
        return found_s / pp + idle_s

    def _relaxed(self, combination: Combination, times: float = 1.0) -> Least | None:
        """What a microbatch of so many times the samples of a combination's takes at least, as its own does relaxed;
        None where there is none."""
        position = self._position(combination)
        if position is None:
            return None
        whole_s, each_s, computed = self._positions.took(lambda: position.waited_s)
        forward_s, backward_s, round_s = (tuple(times * s for s in phase) for phase in position.computed_s)
        each_s = tuple(times * s for s in each_s)
        return Least(times * whole_s, each_s, forward_s, backward_s, round_s, computed, position, times)

    def _key(self, combination: Combination) -> tuple[object, ...]:
        """What combinations share the relaxations of their positions by."""
        return *self.way(combination), combination.pp

    def _position(self, combination: Combination) -> RelaxedPosition | None:
        """The relaxations of a combination's positions; None where there are none."""
        return self._positions.get(self._key(combination), lambda: self._made(combination))

    def _made(self, combination: Combination) -> RelaxedPosition | None:
        try:
            part, inner, mesh = self.where(combination)
            count = combination.microbatches
            space = problem_of(part, mesh, count, inner)
            return RelaxedPosition(part, space, inner, count, EACH_S, self._weights)
        except (ConstraintError, NoPlanError):
            return None

    def _undivided(self, count: int) -> Callable[[Combination], Least]:
        """What a combination's microbatch takes where the whole batch's work, as on one device in so many microbatches,
        no more than any has, is shared out over all, and every op is launched: no division makes it less."""
        job, n = self.job, self.job.cluster.num_devices
        part = replace(job, cluster=first_devices(job.cluster, n))

        def space_of(count: int) -> tuple[Space, Constraints]:
            free = Constraints(microbatches=count, pp=1)
            return problem_of(part, candidate_meshes(part, free)[0], count, free), free

        space, _ = space_of(count)
        # of all samples at once, beside which what is there once weighs least
        whole = RelaxedPosition(part, *space_of(1), 1, EACH_S)
        self.updated_s = 0.0 if self.constraints.state_tiers else updated_s(job, space) / n
        launch_s = 0.0 if job.profile is not None else min(group.device.launch_s for group in job.cluster.groups)
        computed, launched = (segments_s(part, space, count, most_s) for most_s in (math.inf, launch_s))

        def shared(combination: Combination) -> Least:
            share = combination.pp / (combination.microbatches * n)
            forward_s, backward_s, round_s = (
                tuple(once + (each - once) * count * share for each, once in zip(*both, strict=True))
                for both in zip(computed, launched, strict=True)
            )
            both = tuple(f + b for f, b in zip(forward_s, backward_s, strict=True))
            return Least(sum(both), both, forward_s, backward_s, round_s, 1.0, whole, share)

        return shared


def largest_of(ways: Iterable[Way]) -> dict[Way, Way]:
    """Per way, that of the most samples whose microbatches are so many of its own."""
    found: dict[Way, Way] = {}
    of = sorted(ways, key=lambda way: -way[1])
    for way in of:
        times = ((other, other[1] / way[1]) for other in of if other[0] == way[0])
        found[way] = next(other for other, each in times if math.isclose(each, round(each), rel_tol=1e-9))
    return found
