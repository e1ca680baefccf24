"""The search loop: propose a mesh and a microbatch count, solve, price, keep the best.

Meshes: the pinned one, or those of `meshes.py`. Microbatches: the pinned count, or 1, doubled while memory binds and
the step gets faster.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from paraplan.cost_models.catalog import devices_with
from paraplan.cost_models.predict import with_used_profile
from paraplan.ir.collecting import seldom_collected
from paraplan.ir.errors import ConstraintError, InfeasibleError, NoPlanError, SolverLimitError
from paraplan.ir.lower import lower
from paraplan.ir.mesh import Mesh
from paraplan.ir.micro import splittable
from paraplan.ir.plan import HERE, Plan
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.casting import cast_once
from paraplan.planner.certifying import certified
from paraplan.planner.constraints import (
    AUTO,
    Constraints,
    check_constraints,
    check_param_names,
    check_reduce_dtype,
    check_time_limit,
    device_budget,
)
from paraplan.planner.delaying import choose_ahead, choose_delay, delay_note
from paraplan.planner.meshes import candidate_meshes
from paraplan.planner.op_by_op import solve_op_by_op, what_would_do
from paraplan.planner.overlap import overlapped
from paraplan.planner.pipeline_degrees import search_degrees
from paraplan.planner.pipeline_search import alone_note, search_pipeline
from paraplan.planner.placing import choose_places
from paraplan.planner.placing_note import places_note
from paraplan.planner.realise import Realised, realised
from paraplan.planner.recompute.presets import in_layers
from paraplan.planner.recompute.solve import solve_with_recomputation
from paraplan.planner.reducing import reducing
from paraplan.planner.sharding.solve import Candidate, Limits, Skipped, choose, solve_mesh
from paraplan.planner.stage_sharding import Shardings

HIDDEN = 0.02
"""How much more work than the best plan's three axes may take and still be solved: a plan that moves more may hide it
better, though on the meshes measured never by as much."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """The best plan and how long it took to find: solver seconds and all seconds."""

    plan: Plan
    solve_s: float
    total_s: float


@seldom_collected()
def search(
    job: Job, constraints: Constraints, time_limit_s: float = 60.0, progress: Progress = lambda text: None,
    certify: bool = True,
) -> Found:  # fmt: skip
    """The fastest plan that fits.

    Args:
        job: what is planned.
        constraints: what the user pins; with `pp`, a pipeline (see `pipeline_search`).
        time_limit_s: solver time per mesh.
        progress: told what is being tried.
        certify: whether to bound the step of every plan in scope; without, the certificate's bound is 0.
    Raises:
        ConstraintError: choices contradict each other or the cluster, or the time limit is none.
        InfeasibleError: proved on every mesh tried.
        SolverLimitError: nothing was found, nor proved impossible everywhere.
    """
    started = time.perf_counter()
    check_time_limit(time_limit_s)
    check_param_names(constraints, job.program.params)
    check_constraints(constraints, job.cluster.num_devices)
    _check_rates(job)
    check_reduce_dtype(constraints, job.program.precision)
    job, constraints = in_layers(job, constraints)
    job = replace(job, compiled=constraints.compiled, reduce_dtype=constraints.reduce_dtype)
    if job.program.apart > 1 and constraints.microbatches is None:
        constraints = msgspec.structs.replace(constraints, microbatches=job.program.apart)
    constraints, unpriced = _with_states(job, constraints)
    _check_tiers(job, constraints)
    if constraints.pp not in (None, 1):
        pipeline = _pipeline(job, constraints, time_limit_s, progress)
        pipeline = msgspec.structs.replace(pipeline, notes=(*pipeline.notes, *alone_note(pipeline)))
        seconds = time.perf_counter() - started
        return Found(pipeline, seconds, seconds)
    limits = Limits(
        time_s=time_limit_s, memory_bytes=device_budget(job.cluster, constraints), certify=certify and not job.compiled
    )
    meshes = candidate_meshes(job, constraints)
    found: list[Candidate] = []
    skipped: list[Skipped] = []
    failures: list[NoPlanError] = []
    for mesh in meshes:
        here = _on_mesh(job, mesh, constraints, limits, failures, progress, _cutoff_s(mesh, found))
        if isinstance(here, Skipped):
            skipped.append(here)
        else:
            found += here
    if not found:
        fault = next((fault for fault in failures if isinstance(fault, SolverLimitError)), failures[-1])
        raise type(fault)(lambda: f"{fault}{_what_would_do(job, meshes[0], constraints, limits)}") from None
    if constraints.delayed_update is not None:
        found = [_placed(candidate, limits, constraints) for candidate in found]
    best = _quickened(min(found, key=lambda candidate: candidate.simulation.step_s), limits, constraints)
    plan = certified(best, min(candidate.bound_s for candidate in found), len(meshes) - len(skipped))
    notes = (*plan.notes, *_meshes_note(found, skipped, best), *unpriced, *delay_note(plan))
    plan = msgspec.structs.replace(plan, notes=(*notes, *places_note(best, found, failures, constraints)))
    if plan.profile is not None:
        plan = with_used_profile(plan, lower(plan))
    return Found(plan, sum(candidate.solve_s for candidate in found), time.perf_counter() - started)


def _pipeline(job: Job, constraints: Constraints, time_limit_s: float, progress: Progress) -> Plan:
    """A plan of several stages, or, where the degree is to be chosen, the fastest of any."""

    def one_stage(pinned: Constraints) -> Plan:
        return search(job, pinned, time_limit_s, progress).plan

    shardings = Shardings(partial(_sharding, time_limit_s=time_limit_s, progress=progress))
    if constraints.pp == AUTO:
        return search_degrees(job, constraints, shardings, one_stage, progress)
    return search_pipeline(job, constraints, shardings)


def _sharding(
    job: Job, constraints: Constraints, kept_bytes: float | None, mesh: Mesh | None, time_limit_s: float,
    progress: Progress,
) -> Decisions:  # fmt: skip
    """The sharding of a pipeline's stages; where the mesh is not known, on that of the fastest plan of one stage."""
    if mesh is None:
        mesh, *more = candidate_meshes(job, constraints)
        if more:
            mesh = search(job, constraints, time_limit_s, progress, certify=False).plan.stages[0].mesh
    limits = Limits(time_s=time_limit_s, memory_bytes=device_budget(job.cluster, constraints), certify=False)
    return choose(job, mesh, constraints.microbatches or 1, constraints, limits, kept_bytes)


def _on_mesh(
    job: Job, mesh: Mesh, constraints: Constraints, limits: Limits,
    failures: list[NoPlanError], progress: Progress, cutoff_s: float,
) -> list[Candidate] | Skipped:  # fmt: skip
    """Plans for a mesh, with more and more microbatches as long as memory binds and the step gets faster, and there is
    time."""
    found: list[Candidate] = []
    best_s, clock = float("inf"), _Clock(limits)
    for count in _microbatch_counts(job, constraints, mesh):
        if found and clock.is_over:
            break
        named = "x".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.shape, strict=True))
        progress(f"mesh {named}, {count} microbatch{'es' if count > 1 else ''}")
        here = _solve(job, mesh, count, constraints, clock, failures, cutoff_s)
        if isinstance(here, Skipped):
            return found or here
        found += here
        step_s = min((candidate.simulation.step_s for candidate in here), default=float("inf"))
        if here and (step_s >= best_s or not here[0].memory_binds):
            break
        if not here and not _keeps_all(constraints) and isinstance(failures[-1], InfeasibleError):
            break  # what is kept whatever is recomputed does not get less with smaller microbatches
        best_s = min(best_s, step_s)
    return found


class _Clock:
    """What all tries on one mesh share of the time."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._started = limits, time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Whether the time has passed."""
        return time.perf_counter() - self._started >= self._limits.time_s

    @property
    def left(self) -> Limits:
        """The limits of a try that begins now."""
        return replace(self._limits, time_s=self._limits.left_s(time.perf_counter() - self._started))


def _solve(
    job: Job, mesh: Mesh, count: int, constraints: Constraints, clock: _Clock,
    failures: list[NoPlanError], cutoff_s: float,
) -> list[Candidate] | Skipped:  # fmt: skip
    """Plans for a mesh: one that keeps every activation, and where memory binds what need not: one that does
    so by kinds, and on one device one that does so op by op. Where parameters may leave the device, plans of which they
    do come beside those of which only states do, so that allowing more is never worse; gradients wait elsewhere than
    where they are used only where nothing is found without."""
    rungs = [constraints]
    if constraints.offload_states == "any":
        rungs = [msgspec.structs.replace(constraints, offload_states=each) for each in ("either", "any", "any-grads")]
    found: list[Candidate] = []
    for rung in rungs:
        if found and rung.offload_states == "any-grads":
            break
        if constraints.recompute in (None, "none"):
            try:
                solved = solve_mesh(job, mesh, count, rung, clock.left, cutoff_s)
                if isinstance(solved, Skipped):  # recomputing would only add work
                    return found or solved
                found.append(solved)
                if rung is rungs[0] and not solved.memory_binds:
                    return found
            except NoPlanError as fault:
                failures.append(fault)
                if rung.offload_states in ("any", "any-grads") and isinstance(fault, SolverLimitError):
                    found += _by_places(job, mesh, count, rung, clock.left)
        if not _keeps_all(constraints):
            try:
                found.append(solve_with_recomputation(job, mesh, count, rung, clock.left))
            except NoPlanError as fault:
                failures.append(fault)
    op_by_op = mesh.size == 1 and constraints.recompute is None and not _states_pinned_away(constraints)
    if op_by_op and not _keeps_all(constraints):
        # Its failures are of one order of ops; what the others say is about all.
        with suppress(NoPlanError):
            kept = msgspec.structs.replace(constraints, offload_states="none")
            found.append(solve_op_by_op(job, mesh, count, kept, clock.left))
    return found


def _what_would_do(job: Job, mesh: Mesh, constraints: Constraints, limits: Limits) -> str:
    """On one device, where activations may be made again: what would do, for an error."""
    if mesh.size > 1 or constraints.recompute is not None or _states_pinned_away(constraints):
        return ""
    return what_would_do(job, mesh, _microbatch_counts(job, constraints, mesh)[-1], constraints, limits)


def _quickened(best: Candidate, limits: Limits, constraints: Constraints) -> Candidate:
    """The candidate with what makes its step shorter in the same layouts."""
    made, budget = Realised(best.plan, lower(best.plan), best.simulation), int(limits.memory_bytes)
    made = overlapped(reducing(cast_once(made, budget), budget), constraints.overlap, budget)
    return _placed(replace(best, plan=made.plan, simulation=made.simulation), limits, constraints)


def _by_places(job: Job, mesh: Mesh, count: int, constraints: Constraints, limits: Limits) -> list[Candidate]:
    """The plan of least work with memory for anything, within its limits by what leaves the device alone, if any is."""
    roomy = replace(limits, memory_bytes=float(1 << 60))
    try:
        free = solve_mesh(job, mesh, count, msgspec.structs.replace(constraints, offload_states="none"), roomy)
    except NoPlanError:
        return []
    if isinstance(free, Skipped):
        return []
    placed = replace(_placed(free, limits, constraints), status="feasible", memory_binds=True)
    made = realised(placed.plan)
    return [] if made.peak_bytes > limits.memory_bytes or made.over_bytes else [placed]


def _placed(best: Candidate, limits: Limits, constraints: Constraints) -> Candidate:
    """The candidate with states and parameters where that is fastest, and updated by whom and when, as far as the
    planner may choose."""
    away = any(layouts.place != HERE for stage in best.plan.stages for layouts in stage.params.values())
    away = away or max(best.simulation.peak_bytes) > limits.memory_bytes
    chooses = len(constraints.places) > 1 and best.plan.memory_actions is None
    if not away:
        return best

    def price(plan: Plan) -> tuple[float, float]:
        made = realised(plan)
        over = max(made.over_bytes.values(), default=-math.inf)
        return made.simulation.step_s, max(over, made.peak_bytes - limits.memory_bytes)

    def step_s(plan: Plan) -> float:
        seconds, over = price(plan)
        return seconds if over <= 0 else math.inf

    def place(plan: Plan) -> Plan:
        return choose_places(plan, constraints.places, price, constraints.params) if chooses else plan

    plan = choose_ahead(choose_delay(best.plan, constraints.delayed_update, step_s, place), step_s)
    return replace(best, plan=plan, simulation=realised(plan).simulation)


def _states_pinned_away(constraints: Constraints) -> bool:
    """Whether some state cannot be on the device."""
    named = msgspec.structs.replace(constraints, offload_states="none").state_tiers
    return bool(named) or HERE not in constraints.places


def _keeps_all(constraints: Constraints) -> bool:
    """Whether every activation has to stay on its device."""
    return constraints.recompute == "none" and not constraints.tiers


def _with_states(job: Job, constraints: Constraints) -> tuple[Constraints, tuple[str, ...]]:
    """Where states and parameters may be is the planner's choice if nothing else was said; a note where that cannot be
    priced."""
    if constraints.offload_states is not None or not constraints.tiers:
        return constraints, ()
    rated = all(group.host_memory_bytes_per_s for group in job.cluster.groups)
    roomy = job.cluster.has_room("host", tuple(range(job.cluster.num_devices)))
    note = f"optimizer states stay on the device: {job.cluster.name} does not say host_memory_bytes_per_s"
    chosen = msgspec.structs.replace(constraints, offload_states="any" if rated and roomy else "none")
    return chosen, () if rated else (note,)


def _check_rates(job: Job) -> None:
    """Whether all devices multiply in float8, where the program is to.

    Raises:
        ConstraintError: one does not.
    """
    if job.program.precision != "fp8":
        return
    dtypes = {spec.dtype for kind in job.program.kinds for spec in kind.graph.values.values()}
    eight = sorted(dtype for dtype in dtypes if dtype.startswith("float8"))
    for dtype, group in itertools.product(eight, job.cluster.groups):
        if dtype not in group.device.flops_per_s:
            raise ConstraintError(
                f"precision='fp8' multiplies in {dtype}, for which {group.device.kind} has no rate (it has "
                f"{', '.join(group.device.flops_per_s)}); plan with precision='bf16', or for a device that has one: "
                f"{', '.join(devices_with(dtype))}"
            )


def _check_tiers(job: Job, constraints: Constraints) -> None:
    """The cluster has what may be used.

    Raises:
        ConstraintError: no link to a tier, or no room there.
    """
    devices = tuple(range(job.cluster.num_devices))
    updated_there = any(place.states and not place.fetched for place in constraints.every_place)
    if updated_there and not all(group.host_memory_bytes_per_s for group in job.cluster.groups):
        raise ConstraintError(
            f"states off the device are updated on the host, but {job.cluster.name} does not say how fast its memory "
            "is; give its groups host_memory_bytes_per_s, or offload_states='fetched' or 'none'"
        )
    for tier in dict.fromkeys((*constraints.tiers, *constraints.state_tiers)):
        if not job.cluster.has_room(tier, devices):
            pinned = f"offload={constraints.offload}" if tier in constraints.tiers else f"states on the {tier}"
            field = "host_memory_bytes" if tier == "host" else "disk and disk_bytes"
            raise ConstraintError(
                f"{pinned}: {job.cluster.name} describes no room on {tier} for every device; give its groups {field}"
            )


def _cutoff_s(mesh: Mesh, found: list[Candidate]) -> float:
    """The work above which a mesh is skipped; one and two axes never are."""
    if len(mesh.shape) < 3 or not found:
        return math.inf
    return (1 + HIDDEN) * min(candidate.objective_s for candidate in found)


def _meshes_note(found: list[Candidate], skipped: list[Skipped], best: Candidate) -> tuple[str, ...]:
    """What was searched and what was not, where there was a choice."""
    if len(found) + len(skipped) < 2:
        return ()
    solved = ", ".join(dict.fromkeys(_shape(candidate.plan.stages[0].mesh) for candidate in found))
    text = f"meshes solved: {solved}"
    if skipped:
        each = ", ".join(f"{_shape(mesh.mesh)} ({mesh.work_s:.4g} s)" for mesh in skipped)
        text += f"; skipped, as all plans there take more work than this one's {best.objective_s:.4g} s: {each}"
    return (text,)


def _shape(mesh: Mesh) -> str:
    return "x".join(map(str, mesh.shape))


def _microbatch_counts(job: Job, constraints: Constraints, mesh: Mesh) -> tuple[int, ...]:
    if constraints.microbatches is not None:
        return (constraints.microbatches,)
    batch = job.program.batch_size
    dp = mesh.shape[mesh.axes.index("dp")] if "dp" in mesh.axes else 1
    return tuple(m for m in (1, 2, 4, 8, 16) if batch % (m * dp) == 0 and splittable(job.program, m)) or (1,)
