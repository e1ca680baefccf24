"""The pipeline that constraints ask for: stages, sharding and recomputation for a given degree and schedule.

The stages' meshes are equal in shape, and they take one sharding per kind, chosen on one stage's devices: first that of
least work, memory left out. Stages not given are cut so that the slowest, and with several a position the fullest
position, takes as little time as can be (`stage_cuts`, `balanced_cuts`), each segment as long as simulated. What a rank
holds is what the simulation of the pipeline says. Where that is too much, there are three ways, and the fastest
simulated plan of those that fit is taken: stages cut by what they hold as well; activations recomputed, in each stage
as little as its own memory needs (`stage_memory`); and a sharding that keeps less, with parameters, gradients and
states bounded by what the fullest stage may keep (states off the device where that is allowed; parameters too where
otherwise nothing fits).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import msgspec

from paraplan.cost_models.bound import rank_bound
from paraplan.cost_models.predict import predict, with_used_profile
from paraplan.cost_models.realised_plan import Budget, Realised, realised
from paraplan.ir.errors import ConstraintError, NoPlanError, SolverLimitError
from paraplan.ir.plan import Certificate, Plan
from paraplan.ir.sizes import say_size
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.deadline import Deadline
from paraplan.planner.evaluate_plan import gathers_often
from paraplan.planner.passes.delayed_updates import delay_note
from paraplan.planner.passes.gather_timing import gathered
from paraplan.planner.passes.pass_context import PassContext
from paraplan.planner.passes.quickened import quickened
from paraplan.planner.pipeline.cuts.stage_cuts import chain_memory
from paraplan.planner.pipeline.draft import Draft
from paraplan.planner.pipeline.pipeline import activations_of, rescheduled
from paraplan.planner.pipeline.pipeline_case import PipelineCase, case_of, of_few_microbatches, taken_s
from paraplan.planner.pipeline.prices.stage_prices import Sharding
from paraplan.planner.pipeline.searched_schedule import SEARCHED, searched
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.recompute.class_memory import ClassMemory
from paraplan.planner.schedules.full_rounds import as_a_whole, carried
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.schedules.schedule_problem import holders_of

SHARDINGS = 3
"""Shardings tried, each keeping less than the one before."""
TIMES = 3
"""How often all microbatches of a plan are looked at: as much less may be held as they needed too much before."""
QUICKER, HIDDEN = 0.02, 0.5
"""What a plan is thought to gain at most once its messages, reductions and products are; or so much of what it waits
for communication, if that is more."""
SCOPE = "these stages, this schedule and this sharding: the work of the busiest stream of any rank"


@dataclass(frozen=True)
class Start:
    """What is known of a pipeline before it is planned.

    Attributes:
        sharding: the one that is tried first; None for that of least work.
        taken: per segment, the number of the option to recompute that it is thought to have to take; () for none.
        within_s: the step of a plan known: where this one's cannot be shorter, it is left.
        is_only: whether no other sharding is tried where nothing fits with this one.
        memory: what rank classes need: what is alive, or what allocators reserve.
        deadline: after which nothing else is tried once a plan fits, no pass either; None for none.
    """

    sharding: Sharding | None = None
    taken: tuple[int, ...] = ()
    within_s: float = math.inf
    is_only: bool = False
    memory: ClassMemory = field(default_factory=ClassMemory)
    deadline: Deadline | None = None

    @property
    def is_late(self) -> bool:
        """Whether the deadline is over."""
        return self.deadline is not None and self.deadline.is_over


class Slower(NamedTuple):
    """A pipeline that was left: its step is no shorter than this."""

    step_s: float


def search_pipeline(job: Job, constraints: Constraints, shardings: Shardings) -> Plan:
    """The fastest plan found that fits.

    Args:
        job: what is planned.
        constraints: with `pp`.
        shardings: of one stage's devices.
    Raises:
        ConstraintError: the devices, segments or microbatches cannot be divided so.
        SolverLimitError: none tried fits, which proves nothing of others; says which rank is over, and by how much.
    """
    found = search_from(job, constraints, shardings, Start())
    assert isinstance(found, Draft)
    return found.made()


def search_from(job: Job, constraints: Constraints, shardings: Shardings, start: Start) -> Draft | Slower:
    """As `search_pipeline`, from what is known, and not made whole yet; `Slower` where it takes longer than is known.

    Args:
        job: what is planned.
        constraints: with pipeline degree and schedule pinned.
        shardings: made so far for positions, to be shared.
        start: what is known.
    """
    if constraints.schedule == SEARCHED:
        return Draft.of(_searched(job, constraints, shardings, start))
    case = replace(case_of(job, constraints), memory=start.memory)
    few = of_few_microbatches(case)
    best = _fastest(few or case, shardings, start)
    if isinstance(best, Slower):
        return best
    if few is None:
        return Draft.of(_told(best))
    step_s, plan = few.least_s(best), rescheduled(best.plan, case.schedule, holders_of(case.orders))
    if step_s <= start.within_s and (found := carried(plan, best)) is not None:
        step_s = found.simulation.step_s
    if step_s > start.within_s:
        return Slower(step_s)
    return Draft(step_s, partial(_whole, case, few, plan, shardings, start), best.plan, best.peak_bytes)


def whole_of(job: Job, constraints: Constraints, shardings: Shardings, start: Start, sample: Plan) -> Plan:
    """The plan of all microbatches from that of the first ones.

    Args:
        job, constraints, shardings, start: as for `search_from`, which found the sample.
        sample: of a draft that is not its plan.
    """
    case = replace(case_of(job, constraints), memory=start.memory)
    few = of_few_microbatches(case)
    assert few is not None
    return _whole(case, few, rescheduled(sample, case.schedule, holders_of(case.orders)), shardings, start)


def _whole(case: PipelineCase, few: PipelineCase, plan: Plan, shardings: Shardings, start: Start) -> Plan:
    """The plan of all microbatches, priced; where they need more than there is, with more made again, or with as much
    less for the first ones."""
    start, budget = replace(start, within_s=math.inf), few.budget
    for again in range(TIMES):
        whole = as_a_whole(plan)
        needed = case.needed(whole)
        if case.fits(whole) or (whole.peak_bytes <= case.budget and again == TIMES - 1):
            return _told(whole)  # what allocators reserve for it may still be too much
        less = None
        if start.sharding is not None and case.constraints.recompute is None and not whole.over_bytes:
            less = case.lessened(start.sharding, plan, needed)
        budget -= max(max(needed) - case.budget, 0)
        best = less or _realised(_fastest(replace(few, budget=budget), shardings, start)).plan
        plan = rescheduled(best, case.schedule, holders_of(case.orders))
    return _told(_realised(_fastest(case, shardings, start)))


def _realised(found: Realised | Slower) -> Realised:
    assert isinstance(found, Realised)  # nothing is too slow
    return found


def _fastest(case: PipelineCase, shardings: Shardings, start: Start) -> Realised | Slower:
    """The fastest pipeline of a case found that fits.

    Raises:
        SolverLimitError: none does.
    """
    tried: list[Realised] = []
    fitting: list[Realised] = []
    begun: Realised | None = None
    taken = start.taken if case.is_cut_by_time else ()
    if start.sharding is not None and case.constraints.recompute is None:
        begun = case.begun(start.sharding, taken)
        if _is_slower(case, begun, start.within_s):
            quicker = gathered(begun, _context(case, begun, case.budget, start))
            if _is_slower(case, quicker, start.within_s):
                return Slower(case.least_s(quicker))
    for rung in case.constraints.placing.rungs(case.constraints.tiers)[:2]:
        if not fitting:
            here = replace(case, inner=case.inner.placed(rung))
            tried += _with_shardings(here, shardings, start, None if tried else begun, taken)
            fitting = [made for made in tried if case.fits(made)]
    later: Realised | Slower | None = None
    short = len(fitting) < len(tried) or any(map(any, (activations_of(made.plan) for made in fitting)))
    is_enough = bool(fitting) and start.is_late
    gathered_ahead = case.params_ahead and any(gathers_often(made.programs, large=True) for made in tried)
    if gathered_ahead and short and not is_enough:
        with suppress(SolverLimitError):
            later = _fastest(replace(case, params_ahead=False), shardings, start)
    if not fitting:
        if later is None:
            raise _overflow(case, tried)
        return later
    best = min(fitting, key=taken_s)
    if not start.is_late:  # what allocators need is not looked at, then
        best = quickened(best, _context(case, best, case.alive_budget(best), start))
    return later if isinstance(later, Realised) and taken_s(later) < taken_s(best) else best


def _context(case: PipelineCase, made: Realised, budget: Budget, start: Start) -> PassContext:
    """Of passes over a pipeline of a case."""
    return PassContext(budget, case.constraints, case.least_s(made) / taken_s(made), start.deadline)


def _is_slower(case: PipelineCase, made: Realised, within_s: float) -> bool:
    """Whether a plan stays slower than so much whatever passes gain."""
    waits = HIDDEN * made.simulation.exposed_comm_s / made.simulation.step_s
    return case.least_s(made) > (1 + max(QUICKER, waits)) * within_s


def _searched(job: Job, constraints: Constraints, shardings: Shardings, start: Start) -> Plan:
    """Every named schedule planned, then one searched for the stages of the fastest (`searched_schedule`), in half of
    the time that is left."""
    assert isinstance(constraints.pp, int)
    found: dict[str, Plan] = {}
    faults: list[NoPlanError | ConstraintError] = []
    for name in NAMED:
        if found and start.is_late:
            break
        try:
            found[name] = search_pipeline(job, msgspec.structs.replace(constraints, schedule=name), shardings)
        except (ConstraintError, NoPlanError) as fault:
            faults.append(fault)
    if not found:
        raise next((fault for fault in faults if not isinstance(fault, ConstraintError)), faults[0])
    best = min(found.values(), key=_step_s)
    alike = [plan for plan in found.values() if plan is not best and _cut(plan) == _cut(best)]
    limit_s = math.inf if start.deadline is None else start.deadline.share_s(0.5)
    return searched((best, *alike), _priced_alone, device_budget(job.cluster, constraints), limit_s)


def _cut(plan: Plan) -> tuple[int, list[tuple[int, int]]]:
    """Microbatches, and the segments of every stage."""
    return plan.num_microbatches, [(stage.first, stage.stop) for stage in plan.stages]


def _priced_alone(plan: Plan) -> Plan:
    return _told(realised(msgspec.structs.replace(plan, notes=())))


def _with_shardings(
    case: PipelineCase, shardings: Shardings, start: Start, begun: Realised | None, taken: Sequence[int]
) -> list[Realised]:
    """Plans with shardings that keep less and less, until one fits as it is; of a given sharding, until one fits.

    `begun` is the first plan of that sharding where it was made, `taken` what it recomputes.
    """
    tried: list[Realised] = []
    kept_bytes: float | None = None
    first = start.sharding
    for _ in range(1 if first is not None and start.is_only else SHARDINGS):
        try:
            known = first if kept_bytes is None else None
            sharding = known or shardings.get(case.part, case.inner, kept_bytes)
        except NoPlanError:
            if not tried:
                raise
            break
        plans = case.plans(sharding) if known is None else case.plans(sharding, begun, taken if begun else ())
        tried += plans
        if case.fits(plans[0]) or (first is not None and any(map(case.fits, plans))):
            break
        kept_bytes = case.less_kept(sharding, plans[0])
    return tried


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def _overflow(case: PipelineCase, tried: Sequence[Realised]) -> SolverLimitError:
    needs = [case.needed(made) for made in tried]
    first, least = needs[0], min(needs, key=max)
    does, ways = "peaks at", ""
    over = f"a pipeline over {case.positions} groups of devices" if case.positions > 1 else "a plan of one stage"
    if case.memory.reserves:
        does, ways = "reserves", "; or reserve=0 and train with expandable segments (PYTORCH_CUDA_ALLOC_CONF)"
    fastest, leanest = (f"rank class {each.index(max(each))} {does} {say_size(max(each))}" for each in (first, least))
    said = (
        f"{over} needs more than the {say_size(case.budget)} a device may hold: as planned for speed alone, {fastest}; "
        f"at best, of {len(tried)} plans, {leanest}; "
        f"{_advised(case, min(tried, key=lambda made: max(case.needed(made))).plan)}{ways}"
    )
    return SolverLimitError.of_over(said, max(least) - case.budget)


def _advised(case: PipelineCase, plan: Plan) -> str:
    """What may help a pipeline that does not fit: neither more stages nor more microbatches where what single segments
    keep is too much by itself."""
    params = {name: layouts for stage in plan.stages for name, layouts in stage.params.items()}
    first, last, count = plan.stages[0], plan.stages[-1], len(plan.program.segments)
    alike = msgspec.structs.replace(plan, stages=(msgspec.structs.replace(first, params=params),))
    memory = chain_memory(alike, [0] * len(plan.program.kinds))
    each = [memory.kept_bytes(index, index + 1) for index in range(count)]
    ends_bytes = each[0] + each[-1] if set(first.meshes) & set(last.meshes) and count > 1 else 0
    less = "a sharding that holds less (zero, tp)"
    if case.positions == 1:
        return f"use more microbatches, or {less}"
    if max(each) > case.budget:
        return f"one segment keeps {say_size(max(each))} by itself: use {less}"
    if ends_bytes > case.budget:
        return (
            f"the first and the last segment keep {say_size(ends_bytes)}, and {plan.schedule.name} has both on one "
            f"position: use another schedule, or {less}"
        )
    return f"use more stages, more microbatches, or {less}"


def _told(made: Realised) -> Plan:
    """The plan with its prediction and certificate."""
    plan, programs, simulation = made.plan, made.programs, made.simulation
    bound = min(rank_bound(trace.work for trace in simulation.traces), simulation.step_s)
    bound = bound if len(plan.stages) > 1 else 0.0  # that of one stage's own sharding is hardly less than its step
    certificate = Certificate(
        status="feasible",
        objective_s=simulation.step_s,
        bound_s=bound,
        bound_scope=SCOPE,
        gap=(simulation.step_s - bound) / simulation.step_s,
    )
    notes = (
        f"a pipeline of {len(plan.stages)} stages, schedule {plan.schedule.name}; sharding was chosen for one stage's "
        "devices as if they held the whole model",
    )
    prediction = predict(plan, programs, simulation)
    plan = msgspec.structs.replace(
        plan,
        prediction=prediction,
        certificate=certificate,
        notes=(*plan.notes, *(notes if len(plan.stages) > 1 else ()), *delay_note(plan)),
    )
    return plan if plan.profile is None else with_used_profile(plan, programs)
