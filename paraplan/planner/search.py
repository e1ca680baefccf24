"""The search loop: propose a mesh and a microbatch count, solve, price, keep the best.

Meshes: the pinned one, or those of `meshes.py`. Microbatches: the pinned count, or 1, doubled while memory binds and
the step gets faster; where no mesh has a plan so, every other count that the batch divides into (`microbatches.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from paraplan.cost_models.predict import with_reserved, with_used_profile
from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.execution.rank_program import InstrKind
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.plan import Plan
from paraplan.ir.process.garbage import seldom_collected
from paraplan.ir.sizes import say_size
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.best_plan import BestPlan, Progress
from paraplan.planner.certificate import certified_alike, with_pins
from paraplan.planner.checks import check_rates, check_room, check_tiers, with_states
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.contradictions import check_constraints, check_param_names, check_reduce_dtype, planning_time_s
from paraplan.planner.deadline import FIRST, Deadline, SolveLimits
from paraplan.planner.interrupts import Interrupted, ended, found_until, interrupted_plan
from paraplan.planner.joint.combinations import Combination, combinations
from paraplan.planner.joint.drafting import no_room
from paraplan.planner.joint.search_joint import JointSearch, search_joint
from paraplan.planner.mixed.idle_groups import among_groups
from paraplan.planner.mixed.search_mixed import allows_mixed, search_mixed
from paraplan.planner.one_stage.all_alike import axes_alike
from paraplan.planner.one_stage.data_parallel import add_data_parallel
from paraplan.planner.one_stage.failures import failure
from paraplan.planner.one_stage.roomier import needed_bytes, others_with_room, with_room
from paraplan.planner.one_stage.solved_meshes import SolvedMeshes
from paraplan.planner.passes.leanest import what_would_do
from paraplan.planner.pipeline.draft import Draft, step_s
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.pipeline.pipeline import alone_note
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.recompute.presets import in_layers
from paraplan.planner.schedules.full_rounds import programs_of
from paraplan.planner.sharding.expert_pins import expert_axis
from paraplan.planner.sharding.solve import choose

TIGHTER = 3
"""How often one stage is searched in all, for fewer bytes each time, where allocators have no room for its plan."""
ENOUGH, HALF = 0.02, 0.5
"""How much slower a plan that allocators have room for may be than the one it is made of for no other to be searched;
of the time limit, after which none is once there is one."""
ONE_STAGE_SHARE, ROOMY_SHARE = 0.8, 0.6
"""Of what is left of the time, for solving one stage; and where room may have to be made for what is found."""


def search(
    job: Job,
    constraints: Constraints,
    time_limit_s: float = 60.0,
    progress: Progress = lambda text: None,
    certify: bool = True,
) -> BestPlan:
    """The fastest plan that fits, on all groups of nodes or on some (`mixed.idle_groups`).

    Args:
        job: what is planned.
        constraints: what the user pins; with `pp` above 1, a pipeline (see `pipeline_search`), and with none of any
            degree (see `joint`).
        time_limit_s: for all of it, 0 for the first plan that fits; a mesh has half of what is left while others wait.
            Where nothing was found by then, what is left to try has a little time each, and twice the limit at most.
        progress: told what is being tried.
        certify: whether to bound the step of every plan in scope; without, the certificate's bound is 0.
    Raises:
        ConstraintError: choices contradict each other or the cluster, or the time limit is none.
        InfeasibleError: proved on every mesh tried.
        KeyboardInterrupt: a second one, after one before a plan was found, for which the first that fits is given;
            after that, the search gives the fastest it has.
        SolverLimitError: nothing was found, nor proved impossible everywhere.
    """
    made = partial(among_groups, (find, find_mixed), job, constraints, progress=progress, certify=certify)
    try:
        return made(time_limit_s)
    except NoPlanError as fault:
        raise fault.explained() from None
    except KeyboardInterrupt as fault:
        return interrupted_plan(fault, partial(made, 0.0), progress)


@seldom_collected()
def find(
    job: Job,
    constraints: Constraints,
    time_limit_s: float = 60.0,
    progress: Progress = lambda text: None,
    certify: bool = True,
    reserves: bool = False,
    beside: bool = False,
    known: Sequence[Draft] = (),
) -> BestPlan:
    """As `search`, on all devices; errors are not explained yet.

    Args:
        job, constraints, time_limit_s, progress, certify: as of `search`.
        reserves: whether pipelines of any degree are to be such as allocators have room for.
        beside: whether plain data parallelism is planned beside it, and not to be here.
        known: plans that fit, found elsewhere: it ends with its time though it finds none, and where it searches
            pipelines they are among what it found.
    Raises:
        Interrupted: with the best plan until then, or none.
    """
    time_limit_s, asked = planning_time_s(time_limit_s), constraints
    deadline = Deadline(time_limit_s, kept=1 / FIRST if reserves else 1.0)
    check_constraints(constraints, job.cluster.num_devices)
    job, constraints, unpriced = _checked(job, constraints)
    check_room(job, constraints, device_budget(job.cluster, constraints), time_limit_s)
    listed = _combinations(job, constraints) if constraints.pp != 1 else []
    if any(each.pp > 1 for each in listed):
        shardings = Shardings(partial(_sharding, deadline=deadline, progress=progress))
        found = JointSearch(job, constraints, shardings, progress, deadline, reserves)
        found.know(known)
        (best, *drafts), is_interrupted = _pipelines_of(found, listed, certify)
        plan = with_pins(best.made(), asked)
        notes = dict.fromkeys((*plan.notes, *alone_note(plan), *_alike_note(plan), *_capped_note(plan, asked)))
        plan = msgspec.structs.replace(plan, notes=tuple(notes))
        return ended(BestPlan(plan, deadline.passed_s, deadline.passed_s, tuple(drafts)), is_interrupted)
    constraints = msgspec.structs.replace(constraints, pp=1)
    limits = SolveLimits(
        time_s=time_limit_s,
        memory_bytes=device_budget(job.cluster, constraints),
        certify=certify and not job.compiled,
        known_s=min(map(step_s, known), default=math.inf),
    )
    solved = SolvedMeshes(job, constraints, limits, candidate_meshes(job, constraints), deadline)
    try:
        if not beside:
            add_data_parallel(solved, progress)
        solved.solve(progress)
    except KeyboardInterrupt as fault:
        solved.interrupted(fault)
    if not solved.found:
        raise _none_found(solved) from None
    fastest, others = solved.fastest(unpriced)
    plan = with_pins(fastest, asked)
    plan = msgspec.structs.replace(plan, notes=(*plan.notes, *_alike_note(plan), *_capped_note(plan, asked)))
    if plan.profile is not None:
        plan = with_used_profile(plan, programs_of(plan))
    solve_s = sum(candidate.solve_s for candidate in solved.found)
    return ended(BestPlan(plan, solve_s, deadline.passed_s, others), solved.is_interrupted)


def _none_found(solved: SolvedMeshes) -> NoPlanError:
    kind, said, words = failure(solved.failures)
    advice = partial(what_would_do, solved.job, solved.meshes[0], solved.constraints, solved.deadline.limit_s)
    return kind(said, lambda: f"{words()}{advice()}")


def _alike_note(plan: Plan) -> tuple[str, ...]:
    """That dividing the work does not pay, where every device does all of it, or every set of devices along an axis."""
    (stage, *more), devices = plan.stages, plan.cluster.num_devices
    axes = axes_alike(stage)
    if more or not axes:
        return ()
    blocks = [block for program in programs_of(plan) for block in program.blocks.values()]
    busy = {instr.axis for block in blocks for instr in block.instrs if instr.kind is InstrKind.COLLECTIVE}
    sets = math.prod(stage.mesh.shape[axis] for axis in axes if axis not in busy)
    if sets == 1:
        return ()
    each = f"{devices} devices" if sets == devices else f"{sets} sets of {devices // sets} devices"
    one = "device" if sets == devices else "set"
    return (
        f"each of the {each} does all of the work, as one alone would: over these links whatever divides it takes "
        f"longer; use one {one}, or devices with faster links",
    )


def _capped_note(plan: Plan, asked: Constraints) -> tuple[str, ...]:
    """That more memory is allowed than devices have."""
    room, given = plan.cluster.plan_bytes(asked.reserve_bytes), asked.memory_bytes
    if given is None or given <= room:
        return ()
    return (f"{say_size(given)} are allowed on a device, of which it has {say_size(room)} for a plan",)


def _checked(job: Job, constraints: Constraints) -> tuple[Job, Constraints, tuple[str, ...]]:
    """The job and its constraints as they are searched, and notes; refused where they contradict the model or its
    devices."""
    check_param_names(constraints, job.program.params)
    if constraints.ep is not None:
        expert_axis(job.program, constraints.ep)
    check_rates(job)
    check_reduce_dtype(constraints, job.program.precision)
    job, constraints = in_layers(job, constraints)
    job = prepared(job, constraints)
    if job.program.apart > 1 and constraints.microbatches is None:
        constraints = msgspec.structs.replace(constraints, microbatches=job.program.apart)
    constraints, unpriced = with_states(job, constraints)
    check_tiers(job, constraints)
    return job, constraints, unpriced


@seldom_collected()
def find_mixed(
    job: Job,
    constraints: Constraints,
    time_limit_s: float = 60.0,
    progress: Progress = lambda text: None,
    certify: bool = True,
    reserves: bool = False,
) -> BestPlan:
    """The fastest pipeline found over groups of nodes that differ, each position on one of them (`mixed.search_mixed`).

    Args:
        job, constraints, time_limit_s, progress, certify: as of `search`; its certificate is made in any case.
        reserves: whether allocators have to have room for it.

    Raises:
        ConstraintError: what is pinned leaves no such pipeline.
        Interrupted: with the best plan until then, or none.
        SolverLimitError: none that fits was found.
    """
    deadline = Deadline(planning_time_s(time_limit_s))
    if not allows_mixed(job, constraints):
        raise ConstraintError("what is pinned, or may be off the device, leaves no pipeline over differing groups")
    job, constraints, unpriced = _checked(job, constraints)
    is_interrupted = False
    try:
        plan = search_mixed(job, constraints, deadline, progress, reserves)
    except KeyboardInterrupt as fault:
        if not (plans := found_until(fault, Plan)):
            raise
        plan, is_interrupted = plans[0], True
    plan = msgspec.structs.replace(
        plan, notes=(*plan.notes, *unpriced, *alone_note(plan), *_capped_note(plan, constraints))
    )
    return ended(BestPlan(plan, deadline.passed_s, deadline.passed_s), is_interrupted)


def _combinations(job: Job, constraints: Constraints) -> list[Combination]:
    """What a joint search would search; nothing where there is no pipeline to search, and none is asked for."""
    try:
        return combinations(job, constraints)
    except ConstraintError:
        if constraints.schedule is not None or constraints.pp is not None:
            raise
        return []


def prepared(job: Job, constraints: Constraints) -> Job:
    """The job as the constraints have it run."""
    return replace(job, compiled=constraints.compiled, reduce_dtype=constraints.reduce_dtype)


def _pipelines_of(found: JointSearch, listed: Sequence[Combination], certify: bool) -> tuple[tuple[Draft, ...], bool]:
    """The fastest plan of those listed, and what else was planned; whether the search was interrupted."""
    job, deadline, progress, reserves, budget = found.job, found.deadline, found.progress, found.reserves, found.budget

    def one_stage(constraints: Constraints, proved: bool, again: bool = True, within_s: float = math.inf) -> Draft:
        alone, needed, fitting = msgspec.structs.replace(constraints, pp=1), 0, list[Draft]()
        for _ in range(TIGHTER if again else 1):
            try:
                share_s = deadline.share_s(ROOMY_SHARE if reserves else ONE_STAGE_SHARE)
                certify, known = proved and not needed, found.drafts
                best = find(job, alone, min(share_s, within_s), progress, certify, beside=True, known=known)
            except NoPlanError:
                if not needed:
                    raise
                break
            except KeyboardInterrupt as fault:
                plans = [each.plan for each in found_until(fault, BestPlan)]
                plans = [with_reserved(each, programs_of(each), budget) for each in plans] if reserves else plans
                raise Interrupted([Draft.of(each) for each in plans if needed_bytes(each) <= budget]) from None
            plan = with_reserved(best.plan, programs_of(best.plan), budget) if reserves else best.plan
            made = Draft.of(plan)
            if not reserves or needed_bytes(plan) <= budget:
                fitting.append(made)
                break
            needed = needed_bytes(plan)
            others = [each.plan for each in others_with_room(best, budget)]
            more = with_room(job, alone, plan, budget, deadline.of_all, progress)  # as searches for fewer bytes are
            roomier = [Draft.of(each) for each in (*others, *more)]
            fitting += roomier
            if not roomier:
                found.roomless.append(made)
            least_s = min((each.step_s for each in fitting), default=math.inf)
            if least_s <= (1 + ENOUGH) * made.step_s or deadline.passed_s > (HALF if fitting else 1) * deadline.limit_s:
                break
            alone = msgspec.structs.replace(alone, memory_bytes=made.peak_bytes * budget // needed)
        if not fitting:
            raise no_room(needed, budget)
        return min(fitting, key=lambda draft: draft.step_s)

    best, *drafts = search_joint(found, listed, one_stage, certify)
    made = [draft.plan for draft in drafts if draft.plan is not None]
    return (Draft.of(certified_alike(best.made(), made)), *drafts), found.is_interrupted


def _sharding(
    job: Job,
    constraints: Constraints,
    kept_bytes: float | None,
    mesh: Mesh | None,
    deadline: Deadline,
    progress: Progress,
) -> Decisions:
    """The sharding of a pipeline's stages; where the mesh is not known, on that of the fastest plan of one stage."""
    if mesh is None:
        mesh, *more = candidate_meshes(job, constraints)
        if more:
            alone = msgspec.structs.replace(constraints, pp=1)
            try:
                share_s = deadline.share_s(0.5)
                mesh = find(job, alone, share_s, progress, certify=False, beside=True).plan.stages[0].mesh
            except KeyboardInterrupt:  # what it found is no pipeline
                raise KeyboardInterrupt from None
    limits = SolveLimits(
        time_s=deadline.share_s(0.5), memory_bytes=device_budget(job.cluster, constraints), certify=False
    )
    return choose(job, mesh, constraints.microbatches or 1, constraints, limits, kept_bytes)
