"""One device's plan with its memory planned op by op: a candidate beside the one that recomputes by kinds.

Layouts on one device leave little to choose, so they are chosen as if memory were free; the step is then put in an
order that fits (`memory.whole`). What is proved of the layouts (work no plan can do without) bounds these plans too;
what is proved of the order is said in a note.
"""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec

from paraplan.ir.errors import SolverLimitError
from paraplan.ir.machine.mesh import Mesh
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.memory.plan_memory import MemoryLimits
from paraplan.planner.memory.single_device import memory_tiers, schedule_memory
from paraplan.planner.sharding.solve import Candidate, Skipped, solve_mesh

ROOM = float(1 << 60)
MOST_S = 30.0
"""For the order of ops; of the limit given where that is less."""


def solve_op_by_op(
    job: Job, mesh: Mesh, num_microbatches: int, constraints: Constraints, limits: SolveLimits
) -> Candidate:
    """The best plan found on one device in whose step any op may be executed again, and any tensor wait on the host
    where that is allowed.

    Args:
        job, mesh, num_microbatches, constraints, limits: as of `solve_mesh`.
    Raises:
        InfeasibleError: proved of the order of ops the layouts give.
        SolverLimitError: nothing was found.
    """
    roomy = solve_mesh(job, mesh, num_microbatches, constraints, replace(limits, memory_bytes=ROOM), float("inf"))
    if isinstance(roomy, Skipped):
        raise SolverLimitError(f"mesh {mesh.shape} was not solved")
    started = time.perf_counter()
    tiers = memory_tiers(job.cluster, constraints.tiers)
    made = schedule_memory(roomy.plan, int(limits.memory_bytes), MemoryLimits(time_s=min(limits.time_s, MOST_S)), tiers)
    note = (
        "memory planned op by op: at most "
        f"{100 * (made.answer.gap or 0.0):.2f} % slower than any schedule that fits in this order of ops"
    )
    return Candidate(
        msgspec.structs.replace(made.plan, notes=(*made.plan.notes, note)),
        made.simulation,
        roomy.objective_s + made.answer.evaluation.recomputed_s,
        roomy.bound_s,
        "feasible",
        roomy.solve_s + time.perf_counter() - started,
        True,
    )
