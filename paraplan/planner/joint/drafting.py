"""A pipeline from its estimate: in the sharding that was priced, its stages cut and recomputing as was estimated.

Where allocators would reserve more for it than there is, it is estimated and planned again for as many bytes alive as
would do if as large a share of what is reserved were alive, as long as there is time.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from paraplan.ir.errors import ConstraintError, NoPlanError, SolverLimitError
from paraplan.ir.sizes import say_size
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.estimate import Estimate, Pricer
from paraplan.planner.joint.prices.pricing import Pricing
from paraplan.planner.pipeline.draft import Draft
from paraplan.planner.pipeline.pipeline_search import Slower, Start, search_from
from paraplan.planner.pipeline.prices.same_layouts import in_same_layouts
from paraplan.planner.pipeline.prices.stage_prices import Sharding, StagePrices
from paraplan.planner.pipeline.searched_schedule import SEARCHED
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.recompute.class_memory import ClassMemory
from paraplan.planner.schedules.full_rounds import FULL, FULL_BY_MANY

ROUNDS = 4
"""How often a pipeline is planned, each time for fewer bytes."""
LEANER = 2.0
"""Times what a pipeline's fullest device is over, what a sharding is to keep less on every one."""
DRAFT_S, CALL_S, WHOLE = 0.2, 1.0e-3, 1.25
"""Seconds that a pipeline takes to plan, and a segment of it per microbatch that it is planned for, before the first
pipeline has said so; how many times as long it takes until the plan is whole (see `full_rounds`)."""

EASY = 40.0
"""As many times as long as a pipeline takes to plan is left, for others to be planned as if all of the time were."""


def no_room(needed_bytes: int, budget: int) -> SolverLimitError:
    """What is said of a plan that allocators have no room for."""
    return SolverLimitError(
        f"it fits by the bytes alive, but {say_size(needed_bytes)} would be reserved, of {say_size(budget)}"
    )


@dataclass
class PlanningEffort:
    """What pipelines take to plan.

    Attributes:
        segments: of the model.
        draft_s, call_s: what one takes, and a segment of it in a microbatch: half of it what the last one took.
    """

    segments: int
    draft_s: float = DRAFT_S
    call_s: float = CALL_S

    def seconds(self, combination: Combination) -> float:
        """Until its plan is whole; of one stage nothing to speak of."""
        if combination.pp == 1:
            return 0.0
        return self._draft_s(combination) * WHOLE

    def left(self, combination: Combination, deadline: Deadline) -> float:
        """The share of the time that is left once its plan is whole, below 0 where that is later; of what takes a small
        part of what is left now, more.

        Args:
            combination: which.
            deadline: of the search.
        """
        left_s, seconds = deadline.limit_s - deadline.passed_s, self.seconds(combination)
        share = (left_s - seconds) / deadline.limit_s
        return max(share, min(left_s / (EASY * seconds), 1.0)) if 0 < share and seconds > 0 else share

    def took(self, combination: Combination, seconds: float) -> None:
        """A pipeline was planned for its first microbatches."""
        if combination.pp > 1:
            times = (1 + seconds / self._draft_s(combination)) / 2
            self.draft_s, self.call_s = times * self.draft_s, times * self.call_s

    def _draft_s(self, combination: Combination) -> float:
        """What it takes with the microbatches that a plan is lowered with."""
        rounds = FULL if combination.each == 1 else FULL_BY_MANY
        microbatches = min(combination.microbatches, rounds * combination.pp)
        return self.draft_s + self.call_s * self.segments * microbatches


@dataclass(frozen=True)
class Drafting:
    """Plans estimates.

    Attributes:
        pricing: of positions.
        shardings: of stages' devices, where a priced one does not fit.
        reserves: whether allocators have to have room.
        roomless: added to: pipelines that they have no room for, however few bytes they are planned for.
        ended_s: added to: what estimates came to in the end, where they were planned for fewer bytes.
    """

    pricing: Pricing
    shardings: Shardings
    reserves: bool
    roomless: list[Draft]
    ended_s: list[float] = field(default_factory=list)

    def pins(self, estimate: Estimate) -> Constraints:
        """An estimate's combination as constraints have it, with its stages where the usual ones are others."""
        pinned = estimate.combination.pinned(self.pricing.constraints)
        stages = self.pricing.constraints.stages
        if stages is None and estimate.combination.pp > 1 and (estimate.combination.each > 1 or estimate.is_recut):
            pinned = msgspec.structs.replace(pinned, stages=estimate.bounds)
        return pinned

    def drafted(self, estimate: Estimate, within_s: float) -> Draft | Slower:
        """The pipeline of an estimate.

        Args:
            estimate: see there.
            within_s: the step of a plan known: where this one's cannot be shorter, it is left.
        Raises:
            ConstraintError: what is pinned contradicts it.
            SolverLimitError: it does not fit.
        """
        found, ended, _ = self.drafted_with(estimate, within_s)
        self.ended_s.append(ended.step_s)
        return found

    def drafted_with(self, estimate: Estimate, within_s: float) -> tuple[Draft | Slower, Estimate, Constraints]:
        """As `drafted`, with the estimate and the constraints that it came of in the end."""
        job, budget, pins = self.pricing.job, self.pricing.budget, self.pins(estimate)
        check_constraints(pins, job.cluster.num_devices)
        first, allowed = None, budget
        start = self.start(estimate, within_s)
        for _ in range(ROUNDS):
            try:
                found = self._searched(estimate, pins, start)
            except NoPlanError:
                if first is None:
                    raise
                break
            if isinstance(found, Slower) or not start.memory.reserves or start.sharding is None:
                return found, estimate, pins
            needed = max(start.memory.needed(found.sample, budget))
            if needed <= budget or self.pricing.deadline.is_over:
                return found, estimate, pins
            first, over_bytes = first or found, needed - budget
            allowed -= over_bytes
            fewer = self._estimated(estimate.combination, allowed, start.sharding, over_bytes)
            if fewer is None:
                break
            estimate, pins = fewer, msgspec.structs.replace(self.pins(fewer), memory_bytes=allowed)
            start = replace(start, sharding=self._sharding(estimate), taken=estimate.taken)
        assert first is not None
        self.roomless.append(first)
        raise no_room(needed, budget)

    def ordering(self, limit_s: float) -> Drafting:
        """The same where the schedule is searched, in so many seconds."""
        pins = msgspec.structs.replace(self.pricing.constraints, schedule=SEARCHED)
        return replace(self, pricing=replace(self.pricing, constraints=pins, deadline=Deadline(limit_s)))

    def ordered_anew(self, estimate: Estimate) -> Draft | Slower:
        """The pipeline of an estimate where a schedule was found that is shorter than the named ones: those are planned
        as other estimates.

        Args:
            estimate: as of `drafted`; the schedule is searched (`ordering`).
        Raises:
            SolverLimitError: as of `drafted`.
        """
        found = self.drafted(estimate, math.inf)
        is_anew = isinstance(found, Slower) or found.made().schedule.name == SEARCHED
        return found if is_anew else Slower(found.step_s)

    def _searched(self, estimate: Estimate, pins: Constraints, start: Start) -> Draft | Slower:
        """What is found of an estimate in its stages; where nothing fits in those, in such as do not need too much."""
        try:
            return search_from(self.pricing.job, pins, self.shardings, start)
        except NoPlanError:
            if not estimate.is_recut or estimate.combination.each > 1:
                raise
        start = replace(start, taken=())
        return search_from(self.pricing.job, msgspec.structs.replace(pins, stages=None), self.shardings, start)

    def start(self, estimate: Estimate, within_s: float) -> Start:
        """What is known of an estimate's pipeline before it is planned."""
        memory = ClassMemory(self.reserves)
        known = self._sharding(estimate), estimate.taken, within_s, math.isfinite(estimate.step_s)
        return Start(*known, memory, self.pricing.deadline)

    def _estimated(self, combination: Combination, budget: int, sharding: Sharding, less_bytes: int) -> Estimate | None:
        """What a combination comes to within so many bytes, in the sharding where that is least: of those priced, and
        of one that keeps more than so many bytes less on a device than the last one; None where it fits in none."""
        known = list(self.pricing.of(combination))
        shape = sharding.decisions.mesh.shape
        kept = sharding.prices.kept_bytes(shape) - LEANER * combination.pp * less_bytes
        with suppress(NoPlanError):
            known.append(self.pricing.leaner(combination, kept))
        pricer = Pricer(self.pricing.job.cluster, budget, self.pricing.constraints.stages)
        found = [
            pricer.estimate(combination, prices, self.pricing.mesh_shape(combination, prices.shape)) for prices in known
        ]
        fitting = [each for each in found if each is not None and math.isfinite(each.step_s)]
        return min(fitting, key=lambda each: each.rank, default=None)

    def _sharding(self, estimate: Estimate) -> Sharding | None:
        """The priced sharding on the combination's own mesh; where its dims do not divide there, the one of that mesh
        which comes to least; None where there is none."""
        combination = estimate.combination
        try:
            part, _, mesh = self.pricing.position(combination)
        except ConstraintError:
            return None

        def there(prices: StagePrices) -> Sharding | None:
            return in_same_layouts(part, prices.sharding.decisions, mesh, combination.microbatches)

        if (found := there(estimate.prices)) is not None:
            return found
        pricer = Pricer(self.pricing.job.cluster, self.pricing.budget)
        own = min(
            self.pricing.priced(combination, [combination]),
            key=lambda prices: pricer.quick_s(combination, prices.totals, prices.shape),
            default=None,
        )
        return None if own is None else there(own)
