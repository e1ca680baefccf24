"""Passes over candidates of one stage, and candidates that fit only by what passes move off their device."""

from __future__ import annotations

from dataclasses import replace

from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.errors import NoPlanError
from paraplan.ir.machine.mesh import Mesh
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline, SolveLimits
from paraplan.planner.options.placements import ON_DEVICE
from paraplan.planner.passes.pass_context import PassContext
from paraplan.planner.passes.quickened import Pass, quickened
from paraplan.planner.passes.update_placement import placed
from paraplan.planner.schedules.full_rounds import programs_of
from paraplan.planner.sharding.solve import Candidate, Skipped, solve_mesh


def passed(
    candidate: Candidate,
    limits: SolveLimits,
    constraints: Constraints,
    by: Pass = quickened,
    deadline: Deadline | None = None,
) -> Candidate:
    """The candidate after a pass.

    Args:
        candidate: any.
        limits: of the solver.
        constraints: what is pinned stays.
        by: the pass; all of them if not given.
        deadline: after which nothing is tried.
    """
    made = Realised(candidate.plan, programs_of(candidate.plan), candidate.simulation)
    made = by(made, PassContext(int(limits.memory_bytes), constraints, deadline=deadline))
    return replace(candidate, plan=made.plan, simulation=made.simulation)


def by_places(job: Job, mesh: Mesh, count: int, constraints: Constraints, limits: SolveLimits) -> list[Candidate]:
    """The plan of least work with memory for anything, within its limits by what leaves the device alone, if any is.

    Args:
        job, mesh: what is planned, and where.
        count: of microbatches.
        constraints, limits: as of `solve_mesh`.
    """
    roomy, deadline = replace(limits, memory_bytes=float(1 << 60)), Deadline(limits.time_s)
    try:
        free = solve_mesh(job, mesh, count, constraints.placed(ON_DEVICE), roomy)
    except NoPlanError:
        return []
    if isinstance(free, Skipped):
        return []
    there = replace(passed(free, limits, constraints, placed, deadline), status="feasible", memory_binds=True)
    made = Realised(there.plan, (), there.simulation)
    return [] if made.peak_bytes > limits.memory_bytes or made.over_bytes else [there]
