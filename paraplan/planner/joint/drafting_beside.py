"""Pipelines drafted by another process while this one drafts another: what goes there, and what comes back.

What passes is data: an estimate and prices without the job, which both sides have, and the plan; that of the first
microbatches where it is not the best known, which is made whole here, as any draft is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import msgspec

from paraplan.cost_models.predict import with_reserved
from paraplan.ir.errors import NoPlanError, SolverLimitError
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.drafting import Drafting
from paraplan.planner.joint.estimate import Estimate, EstimateNumbers
from paraplan.planner.joint.prices.pricing import Packed, Pricing
from paraplan.planner.pipeline.draft import Draft
from paraplan.planner.pipeline.pipeline_search import Slower, whole_of
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.schedules.full_rounds import programs_of


@dataclass(frozen=True)
class PackedEstimate:
    """An estimate that fits, without the job.

    Attributes:
        combination: as of `Estimate`.
        numbers: what it comes to.
        prices: its own.
        others: what else was priced for its combination.
    """

    combination: Combination
    numbers: EstimateNumbers
    prices: Packed
    others: tuple[Packed, ...] = ()

    @staticmethod
    def of(estimate: Estimate, pricing: Pricing) -> PackedEstimate:
        """An estimate, of what was priced."""
        others = tuple(Packed.of(each) for each in pricing.of(estimate.combination) if each is not estimate.prices)
        return PackedEstimate(estimate.combination, estimate.numbers, Packed.of(estimate.prices), others)

    def estimate(self, pricing: Pricing) -> Estimate:
        """It, with its job, its combination being priced as it was."""
        own, *_ = [each.at_hand(pricing, self.combination) for each in (self.prices, *self.others)]
        return self.numbers.priced(self.combination, own)


@dataclass(frozen=True)
class Drafted:
    """What came of an estimate.

    Attributes:
        why: nothing came of it: why; "" otherwise.
        over_bytes: as of `SolverLimitError`.
        step_s: as of `Slower`, or of `Draft`.
        ended_s: what it was estimated at in the end.
        sample, peak_bytes: of the draft; None where it was left.
        is_whole: whether the sample is the plan.
        estimate, pins: of which, and with which, the draft is.
    """

    why: str = ""
    over_bytes: int = 0
    step_s: float = math.inf
    ended_s: float = math.inf
    sample: Plan | None = None
    peak_bytes: int = 0
    is_whole: bool = False
    estimate: PackedEstimate | None = None
    pins: Constraints | None = None


def drafted_beside(pricing: Pricing, asked: PackedEstimate, within_s: float, reserves: bool) -> Drafted:
    """An estimate's pipeline, of another process.

    Args:
        pricing: there.
        asked: the estimate.
        within_s, reserves: as of `Drafting`.
    """
    drafting = Drafting(pricing, Shardings(_unasked), reserves, [])
    try:
        found, estimate, pins = drafting.drafted_with(asked.estimate(pricing), within_s)
    except NoPlanError as fault:
        return Drafted(str(fault), fault.over_bytes)
    if isinstance(found, Slower):
        return Drafted(step_s=found.step_s, ended_s=estimate.step_s)
    if found.step_s < within_s:  # what was worked out for its first microbatches is at hand here
        with suppress(NoPlanError):
            whole = found.made()
            found = Draft.of(with_reserved(whole, programs_of(whole), pricing.budget) if reserves else whole)
    packed = PackedEstimate.of(estimate, pricing)
    numbers = found.step_s, estimate.step_s
    return Drafted("", 0, *numbers, found.sample, found.peak_bytes, found.plan is not None, packed, pins)


def received_from(answer: Callable[[], Drafted], drafting: Drafting) -> Draft | Slower:
    """As `received`, once another process answers."""
    return received(answer(), drafting)


def received(drafted: Drafted, drafting: Drafting) -> Draft | Slower:
    """What another process drafted, with this one's job.

    Raises:
        SolverLimitError: nothing came of it.
    """
    if drafted.why:
        raise SolverLimitError.of_over(drafted.why, drafted.over_bytes)
    drafting.ended_s.append(drafted.ended_s)
    if drafted.sample is None or drafted.estimate is None or drafted.pins is None:
        return Slower(drafted.step_s)
    job, pricing = drafting.pricing.job, drafting.pricing
    sample = msgspec.structs.replace(drafted.sample, program=job.program, cluster=job.cluster, profile=job.profile)
    if drafted.is_whole:
        return Draft.of(sample)
    start = drafting.start(drafted.estimate.estimate(pricing), math.inf)
    whole = partial(whole_of, job, drafted.pins, drafting.shardings, start, sample)
    return Draft(drafted.step_s, whole, sample, drafted.peak_bytes)


def _unasked(job: Job, constraints: Constraints, kept_bytes: float | None, mesh: Mesh | None) -> NoReturn:
    raise SolverLimitError(f"{constraints.as_data}: the sharding that was priced does not do")
