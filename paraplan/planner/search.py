"""The search loop: propose a mesh and a microbatch count, solve, price, keep the best.

Meshes: the pinned one, or those of `meshes.py`. Microbatches: the pinned count, or 1, doubled while nothing fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from paraplan.cost_models.predict import predict
from paraplan.ir.errors import InfeasibleError, SolverLimitError
from paraplan.ir.lower import lower
from paraplan.ir.mesh import Mesh
from paraplan.ir.micro import splittable
from paraplan.ir.plan import Certificate, Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints, check_constraints
from paraplan.planner.meshes import candidate_meshes
from paraplan.planner.sharding.solve import SCOPE, Candidate, Limits, solve_mesh

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """The best plan and how long it took to find: solver seconds and all seconds."""

    plan: Plan
    solve_s: float
    total_s: float


def search(
    job: Job, constraints: Constraints, time_limit_s: float = 60.0, progress: Progress = lambda text: None,
    certify: bool = True,
) -> Found:  # fmt: skip
    """The fastest plan that fits.

    Args:
        job: what is planned.
        constraints: what the user pins.
        time_limit_s: solver time per mesh.
        progress: told what is being tried.
        certify: whether to bound the step of every plan in scope; without, the certificate's bound is 0.
    Raises:
        InfeasibleError: proved on every mesh tried.
        SolverLimitError: nothing was found, nor proved impossible everywhere.
    """
    started = time.perf_counter()
    check_constraints(constraints, job.cluster.num_devices)
    memory = min(group.device.memory_bytes for group in job.cluster.groups) - constraints.memory_reserve_bytes
    if memory <= 0:
        raise InfeasibleError(f"the memory reserve of {constraints.memory_reserve_bytes} bytes leaves no device memory")
    limits = Limits(time_s=time_limit_s, memory_bytes=memory, certify=certify)
    meshes = candidate_meshes(job, constraints)
    found: list[Candidate] = []
    failures: list[InfeasibleError | SolverLimitError] = []
    for mesh in meshes:
        for count in _microbatch_counts(job, constraints, mesh):
            named = "x".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.shape, strict=True))
            progress(f"mesh {named}, {count} microbatch{'es' if count > 1 else ''}")
            try:
                found.append(solve_mesh(job, mesh, count, constraints, limits))
                break
            except (InfeasibleError, SolverLimitError) as fault:
                failures.append(fault)
    if not found:
        raise next((fault for fault in failures if isinstance(fault, SolverLimitError)), failures[-1])
    best = min(found, key=lambda candidate: candidate.simulation.step_s)
    plan = certified(best, min(candidate.bound_s for candidate in found), len(meshes))
    return Found(plan, sum(candidate.solve_s for candidate in found), time.perf_counter() - started)


def certified(best: Candidate, bound_s: float, num_meshes: int) -> Plan:
    """The plan with its prediction and certificate."""
    step_s = best.simulation.step_s
    assert bound_s <= step_s * (1 + 1e-6), f"bound {bound_s} above the simulated step {step_s}"
    bound_s = min(bound_s, step_s)
    scope = SCOPE if num_meshes == 1 else f"{SCOPE}; best of {num_meshes} meshes"
    certificate = Certificate(
        status=best.status,
        objective_s=best.objective_s,
        bound_s=bound_s,
        bound_scope=scope,
        gap=(step_s - bound_s) / step_s,
    )
    prediction = predict(best.plan, lower(best.plan), best.simulation)
    return msgspec.structs.replace(best.plan, prediction=prediction, certificate=certificate)


def _microbatch_counts(job: Job, constraints: Constraints, mesh: Mesh) -> tuple[int, ...]:
    if constraints.microbatches is not None:
        return (constraints.microbatches,)
    batch = job.program.batch_size
    dp = mesh.shape[mesh.axes.index("dp")] if "dp" in mesh.axes else 1
    return tuple(m for m in (1, 2, 4, 8, 16) if batch % (m * dp) == 0 and splittable(job.program, m)) or (1,)
