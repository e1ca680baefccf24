"""The plan of one stage in which every device does all of the work, as one alone would.

Where links are slow against a step that is mostly issued, no way to divide it pays; work, by which shardings are
chosen, leaves out what several small messages wait for together, so that does not show there. The sharding of least
work on links a thousand times as slow divides nothing that need not be divided.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from paraplan.ir.errors import NoPlanError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Link
from paraplan.ir.machine.mesh import Mesh
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.evaluate_plan import realise
from paraplan.planner.recompute.split import work_s
from paraplan.planner.sharding.solve import Candidate, choose

SLOWER = 1000.0
"""How much slower links are than they are."""
WAITS = 0.3
"""Of a step, what is waited for links at least where this is looked for."""


def all_alike(job: Job, mesh: Mesh, constraints: Constraints, limits: SolveLimits, best: Candidate) -> list[Candidate]:
    """That plan, where nobody says how to divide, if it fits, is faster than the best and that waits for links.

    Args:
        job, mesh, constraints, limits: of the best.
        best: found for them.
    """
    simulation, c = best.simulation, constraints
    divided = any(each is not None for each in (c.dp, c.tp, c.cp, c.ep, c.zero)) or c.sp or bool(c.params)
    if mesh.size == 1 or divided or simulation.exposed_comm_s < WAITS * simulation.step_s:
        return []
    try:
        slow = replace(job, cluster=_slowed(job.cluster))
        decisions = choose(slow, mesh, best.plan.num_microbatches, constraints, limits)
    except NoPlanError:
        return []
    made = realise(job, decisions, limits.memory_bytes)
    if made.peak_bytes > limits.memory_bytes or made.over_bytes or made.simulation.step_s >= simulation.step_s:
        return []
    objective_s = work_s(made.simulation)
    return [replace(best, plan=made.plan, simulation=made.simulation, objective_s=objective_s, status="feasible")]


def _slowed(cluster: ClusterSpec) -> ClusterSpec:
    def slow(link: Link | None) -> Link | None:
        if link is None:
            return None
        latency_s = SLOWER * link.latency_s
        return msgspec.structs.replace(link, bytes_per_s=link.bytes_per_s / SLOWER, latency_s=latency_s)

    groups = tuple(
        msgspec.structs.replace(group, in_node=slow(group.in_node), between_nodes=slow(group.between_nodes))
        for group in cluster.groups
    )
    return msgspec.structs.replace(cluster, groups=groups, between_nodes=slow(cluster.between_nodes))
