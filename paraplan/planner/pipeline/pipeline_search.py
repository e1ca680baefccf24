"""The pipeline that constraints ask for: stages, sharding and recomputation for a given degree and schedule.

The stages' meshes are equal in shape, and they take one sharding per kind, chosen on one stage's devices: first that of
least work, memory left out. Stages not given are cut so that the slowest takes as little time as can be
(`stage_cuts`), each segment as long as simulated. What a rank holds is what the simulation of the pipeline says. Where
that is too much, there are three ways, and the fastest simulated plan of those that fit is taken: stages cut by what
they hold as well; activations recomputed, in each stage as little as its own memory needs (`stage_memory`); and a
sharding that keeps less, with parameters, gradients and states bounded by what the fullest stage may keep (states off
the device where that is allowed; parameters too where otherwise nothing fits).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from paraplan.cost_models.bound import rank_bound
from paraplan.cost_models.predict import predict, with_used_profile
from paraplan.ir.errors import ConstraintError, NoPlanError, SolverLimitError
from paraplan.ir.execution.schedule import Schedule
from paraplan.ir.machine.rank_groups import group_of_class, holdings
from paraplan.ir.plan import Certificate, Plan
from paraplan.ir.sizes import say_size
from paraplan.planner.assemble import Job, assemble
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.evaluate_plan import Realised, realised
from paraplan.planner.passes.cast_holding import cast_once
from paraplan.planner.passes.delayed_updates import choose_ahead, choose_delay, delay_note
from paraplan.planner.passes.grad_reductions import ROOM, WORTH, reducing, waiting_less
from paraplan.planner.passes.message_parts import parted
from paraplan.planner.passes.overlap_products import overlapped
from paraplan.planner.pipeline.first_devices import first_devices
from paraplan.planner.pipeline.open_choices import check_turns, count_stages, first_microbatches, usual_schedule
from paraplan.planner.pipeline.pipeline import pipelined, rescheduled
from paraplan.planner.pipeline.searched_schedule import SEARCHED, searched
from paraplan.planner.pipeline.stage_cuts import Bounds, chain_memory, cut_chain, cut_evenly
from paraplan.planner.pipeline.stage_memory import Activations, in_flight, recomputing
from paraplan.planner.pipeline.stage_prices import Sharding
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.recompute.presets import preset_activations
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.named import NAMED, named_orders
from paraplan.planner.schedules.order_times import OrderTimes
from paraplan.planner.schedules.schedule_problem import Orders, StageCosts, holders_of
from paraplan.rules.time_axis import program_micro

SHARDINGS = 3
"""Shardings tried, each keeping less than the one before."""
FILLED, SAVED = 3, 1.5
"""Microbatches a position with which plans are tried where there are this many times more."""
TIMES = 2
"""How often: the second time as much less may be held as all microbatches held more the first time."""
CUTS = 4
"""Cuts by memory simulated before giving up."""
SCOPE = "these stages, this schedule and this sharding: the work of the busiest stream of any rank"


def search_pipeline(job: Job, constraints: Constraints, shardings: Shardings, first: Sharding | None = None) -> Plan:
    """The fastest plan found that fits.

    Args:
        job: what is planned.
        constraints: with `pp`.
        shardings: of one stage's devices.
        first: the sharding that is tried first; None for that of least work.
    Raises:
        ConstraintError: the devices, segments or microbatches cannot be divided so.
        SolverLimitError: none tried fits, which proves nothing of others; says which rank is over, and by how much.
    """
    if constraints.schedule == SEARCHED:
        return _searched(job, constraints, shardings)
    case = _case(job, constraints)
    few = _of_few_microbatches(case)
    for _ in range(TIMES if few is not None else 0):
        assert few is not None
        best = _fastest(few, shardings, first)
        whole = realised(rescheduled(best.plan, case.schedule, holders_of(case.orders)))
        if case.fits(whole):
            return _told(whole)
        few = replace(few, budget=case.budget - max(whole.peak_bytes - best.peak_bytes, 0))
    return _told(_fastest(case, shardings, first))


def _fastest(case: _Case, shardings: Shardings, first: Sharding | None) -> Realised:
    """The fastest pipeline of a case found that fits.

    Raises:
        SolverLimitError: none does.
    """
    tried: list[Realised] = []
    fitting: list[Realised] = []
    for rung in case.constraints.placing.rungs(case.constraints.tiers)[:2]:
        if not fitting:
            tried += _with_shardings(replace(case, inner=case.inner.placed(rung)), shardings, first)
            fitting = [made for made in tried if case.fits(made)]
    if not fitting:
        raise SolverLimitError(_overflow(tried, case.budget, case.positions))
    return _quickened(min(fitting, key=_taken_s), case.constraints, case.budget)


def _searched(job: Job, constraints: Constraints, shardings: Shardings) -> Plan:
    """Every named schedule planned, then one searched for the stages of the fastest (`searched_schedule`)."""
    assert isinstance(constraints.pp, int)
    found: dict[str, Plan] = {}
    faults: list[NoPlanError | ConstraintError] = []
    for name in NAMED:
        try:
            found[name] = search_pipeline(job, msgspec.structs.replace(constraints, schedule=name), shardings)
        except (ConstraintError, NoPlanError) as fault:
            faults.append(fault)
    if not found:
        raise next((fault for fault in faults if not isinstance(fault, ConstraintError)), faults[0])
    best = min(found.values(), key=_step_s)
    alike = [plan for plan in found.values() if plan is not best and _cut(plan) == _cut(best)]
    return searched((best, *alike), _priced_alone, device_budget(job.cluster, constraints))


def _cut(plan: Plan) -> tuple[int, list[tuple[int, int]]]:
    """Microbatches, and the segments of every stage."""
    return plan.num_microbatches, [(stage.first, stage.stop) for stage in plan.stages]


def _priced_alone(plan: Plan) -> Plan:
    return _told(realised(msgspec.structs.replace(plan, notes=())))


def _with_shardings(case: _Case, shardings: Shardings, first: Sharding | None) -> list[Realised]:
    """Plans with shardings that keep less and less, until one fits as it is; of a given sharding, until one fits."""
    tried: list[Realised] = []
    kept_bytes: float | None = None
    for _ in range(SHARDINGS):
        try:
            known = first if kept_bytes is None else None
            sharding = known or shardings.get(case.part, case.inner, kept_bytes)
        except NoPlanError:
            if not tried:
                raise
            break
        plans = case.plans(sharding)
        tried += plans
        if case.fits(plans[0]) or (first is not None and any(map(case.fits, plans))):
            break
        kept_bytes = case.less_kept(sharding, plans[0])
    return tried


def _quickened(best: Realised, constraints: Constraints, budget: int) -> Realised:
    """The plan with what makes its step shorter in the same layouts: messages in parts, more under way, products in
    pieces, the host's updates one step late, and states that come to theirs ahead."""

    def step_s(tried: Plan) -> float:
        made = realised(tried)
        return made.simulation.step_s if made.peak_bytes <= budget and not made.over_bytes else math.inf

    made = parted(cast_once(best, budget), budget)
    made = overlapped(reducing(made, budget), constraints.overlap, budget)
    plan = choose_ahead(choose_delay(made.plan, constraints.delayed_update, step_s, lambda tried: tried), step_s)
    return made if plan == made.plan else realised(plan)


@dataclass(frozen=True)
class _Case:
    """A degree and a schedule.

    Attributes:
        job, constraints: what is planned, and what is pinned.
        part: the job on one position's devices.
        inner: what is pinned of a position's sharding.
        positions, num_stages, budget: sizes.
        orders, schedule: of the pipeline, one rank per position.
    """

    job: Job
    constraints: Constraints
    part: Job
    inner: Constraints
    positions: int
    num_stages: int
    budget: int
    orders: Orders
    schedule: Schedule

    def fits(self, made: Realised) -> bool:
        """Whether no rank, and no tier, holds more than it may."""
        return made.peak_bytes <= self.budget and not made.over_bytes

    def plans(self, sharding: Sharding) -> list[Realised]:
        """Plans with a sharding: the one that recomputes nothing (or what is pinned), and others if it does not
        fit."""
        pinned = self.constraints.recompute
        activations = preset_activations(self.job.program, pinned) if pinned not in (None, "none") else ()
        bounds = self.constraints.stages or cut_evenly(sharding.prices.seconds, self.num_stages, self.tail)
        if bounds is None:
            raise ConstraintError(
                f"{self.num_stages} stages: the last one holds all segments from {self.tail} on, which run once on the "
                "whole batch, so that too few are left for the others; use fewer stages"
            )
        found = [self._priced(sharding, bounds, activations)]
        if self.fits(found[0]) or activations:
            return found
        if self.constraints.stages is None and self.num_stages == self.positions and self.schedule.num_replicas == 1:
            found += self._cut_by_memory(sharding, bounds, found[0])
        if pinned is None:
            found.append(self._recomputing(sharding, bounds, found[0]))
            waiting = list(map(realised, waiting_less(found[0])))
            if waiting and _taken_s(less := min(waiting, key=_taken_s)) < (1 - WORTH) * _taken_s(found[0]):
                found.append(self._recomputing(sharding, bounds, less))
        return found

    def _recomputing(self, sharding: Sharding, bounds: Bounds, kept: Realised) -> Realised:
        """As little recomputed as fits, gradients being reduced as in a plan that keeps everything."""
        return recomputing(
            kept,
            lambda fates: self._priced(sharding, bounds, fates, kept.plan.reduce_every),
            sharding.options,
            self.budget,
        )

    @cached_property
    def tail(self) -> int:
        """The first segment that runs once on the whole batch."""
        return program_micro(self.job.program, self.inner.microbatches or 1).tail

    def _holds_tail(self, stage: int, first: int, stop: int) -> bool:
        """Whether a stage holds all of the tail or nothing."""
        return stop <= self.tail or stage == self.num_stages - 1

    def less_kept(self, sharding: Sharding, made: Realised) -> float:
        """What the whole model may keep for the fullest stage of a plan to fit, all else being equal."""
        plan = made.plan
        memory = chain_memory(sharding.whole, [0] * len(self.job.program.kinds))
        held, shares = holdings(plan), []
        for actions, peak in zip(plan.schedule.classes, made.simulation.peak_bytes, strict=True):
            stages = held[group_of_class(plan, held, actions)].stages
            kept = sum(memory.kept_bytes(plan.stages[s].first, plan.stages[s].stop) for s in stages)
            shares.append(1 - (peak - self.budget) / max(kept, 1))
        return memory.kept_bytes(0, len(self.job.program.segments)) * max(min(shares), 0.05)

    def _cut_by_memory(self, sharding: Sharding, bounds: Bounds, made: Realised) -> list[Realised]:
        """The plan whose stages are cut by time among those that fit, where there is one.

        What ops need for a moment is what the simulation found above what the stages hold.
        """
        memory = chain_memory(sharding.whole, [options[0].saved_bytes for options in sharding.options])
        flying = [int(in_flight(self.schedule, (stage,))) for stage in range(self.num_stages)]
        needed = [-float("inf")] * self.num_stages
        for _ in range(CUTS):
            for stage, peak in enumerate(_stage_peaks(made)):
                needed[stage] = max(needed[stage], peak - memory.stage_bytes(*bounds[stage], flying[stage]))

            def fits(stage: int, first: int, stop: int) -> bool:
                held = memory.stage_bytes(first, stop, flying[stage]) + needed[stage]
                return held <= self.budget and self._holds_tail(stage, first, stop)

            cut = cut_chain(sharding.prices.seconds, self.num_stages, fits)
            if cut is None:
                return []
            bounds, made = cut, self._priced(sharding, cut)
            if self.fits(made):
                return [made]
        return []

    def _priced(self, sharding: Sharding, bounds: Bounds, activations: Activations = (), every: int = 1) -> Realised:
        whole = assemble(self.part, replace(sharding.decisions, activations=activations))
        whole = msgspec.structs.replace(whole, reduce_every=every, reducing_bytes=self.budget // ROOM)
        return realised(pipelined(whole, self.job.cluster, bounds, self.schedule, holders_of(self.orders)))


def _case(job: Job, constraints: Constraints) -> _Case:
    assert isinstance(constraints.pp, int)
    positions, name = constraints.pp, constraints.schedule or usual_schedule(job.program, constraints)
    num_stages = count_stages(constraints, positions, name, len(job.program.segments))
    micros, orders = first_microbatches(job.program, constraints, name, positions, num_stages // positions)
    schedule = complete(name, orders, num_replicas=NAMED[name].num_replicas)
    check_turns(job.program, micros, name, schedule, num_stages)
    inner = msgspec.structs.replace(
        constraints,
        pp=None,
        schedule=None,
        stages=None,
        microbatches=micros,
        memory_bytes=None,
        reserve_bytes=0,
        recompute="none",
    )
    return _Case(
        job=job,
        constraints=constraints,
        part=replace(job, cluster=first_devices(job.cluster, positions)),
        inner=inner,
        positions=positions,
        num_stages=num_stages,
        budget=device_budget(job.cluster, constraints),
        orders=orders,
        schedule=schedule,
    )


def _of_few_microbatches(case: _Case) -> _Case | None:
    """The case in which only the first microbatches run, as many as fill the pipeline: its peaks are those of all, and
    what is faster with them is with more. None where that saves little, or more microbatches hold more."""
    positions, program, name = case.positions, case.job.program, case.schedule.name
    micros = case.inner.microbatches or 1
    few = FILLED * positions
    if positions == 1 or micros <= SAVED * few or program.buffer_updates or case.tail < len(program.segments):
        return None
    if case.constraints.delayed_update is not None:
        return None
    try:
        orders = named_orders(name, positions, few, case.num_stages // positions)
    except ConstraintError:
        return None
    alike = (StageCosts(),) * case.num_stages
    if len({OrderTimes(each, case.num_stages).peak_bytes(alike) for each in (orders, case.orders)}) > 1:
        return None
    schedule = complete(name, orders, num_replicas=NAMED[name].num_replicas)
    return replace(case, orders=orders, schedule=schedule)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def _taken_s(made: Realised) -> float:
    return made.simulation.step_s


def _stage_peaks(made: Realised) -> list[int]:
    """Per stage of a plan whose positions hold one each, the peak of its ranks."""
    plan = made.plan
    held, found = holdings(plan), [0] * len(plan.stages)
    for actions, peak in zip(plan.schedule.classes, made.simulation.peak_bytes, strict=True):
        (stage,) = held[group_of_class(plan, held, actions)].stages
        found[stage] = max(found[stage], peak)
    return found


def _overflow(tried: Sequence[Realised], budget: int, positions: int) -> str:
    peaks = [made.simulation.peak_bytes for made in tried]
    first, least = peaks[0], min(peaks, key=max)
    return (
        f"a pipeline over {positions} groups of devices needs more than the {say_size(budget)} a device may hold: as "
        f"planned for speed alone, rank class {first.index(max(first))} peaks at {say_size(max(first))}; at best, of "
        f"{len(tried)} plans, rank class {least.index(max(least))} peaks at {say_size(max(least))}; use more "
        "stages, more microbatches, or a sharding that holds less (zero, tp)"
    )


def _told(made: Realised) -> Plan:
    """The plan with its prediction and certificate."""
    plan, programs, simulation = made.plan, made.programs, made.simulation
    bound = min(rank_bound(trace.work for trace in simulation.traces), simulation.step_s)
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
