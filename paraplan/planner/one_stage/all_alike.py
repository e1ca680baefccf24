"""The plan of one stage in which every device, or every node, does all of the work, as one alone would.

Where links are slow against a step that is mostly issued, no way to divide it pays; work, by which shardings are
chosen, leaves out what several small messages wait for together, so that does not show there. The sharding of least
work on links a thousand times as slow divides nothing over them that need not be divided: on any mesh over all links,
on that of nodes and their devices over those between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Link
from paraplan.ir.machine.mesh import Mesh, R, parse_layout
from paraplan.ir.plan import Stage
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.evaluate_plan import realise
from paraplan.planner.pipeline.meshes import candidate_meshes, dividing_data
from paraplan.planner.recompute.split import work_s
from paraplan.planner.sharding.solve import Candidate, choose

SLOWER = 1000.0
"""How much slower links are than they are."""
WAITS = 0.3
"""Of a step, what goes to links and to launches, whoever divides the work, at least where this is looked for."""
LEVELS = (1, 2, 0)
"""ZeRO levels of nodes that divide their own data."""
BACKWARD = 2
"""Times the launches of a forward, those of both."""


def all_alike(
    job: Job,
    mesh: Mesh,
    constraints: Constraints,
    limits: SolveLimits,
    here: Sequence[Candidate],
    in_node: bool = True,
) -> list[Candidate]:
    """That plan, where nobody says how to divide, if it fits and is faster than what is known, much of which does not
    shrink as work is divided.

    Args:
        job, mesh, constraints, limits: what was solved for.
        here: plans found for them; none where all are slower than one known.
        in_node: whether devices of a node are alike too.
    """
    c, best = constraints, min(here, key=lambda each: each.simulation.step_s, default=None)
    divided = any(each is not None for each in (c.dp, c.tp, c.cp, c.ep, c.zero)) or c.sp or bool(c.params)
    count = (c.microbatches or 1) if best is None else best.plan.num_microbatches
    known_s = limits.known_s if best is None else best.simulation.step_s
    fixed_s = BACKWARD * count * job.launched_s + (best.simulation.exposed_comm_s if best else 0.0)
    if mesh.size == 1 or divided or math.isinf(known_s) or fixed_s < WAITS * known_s:
        return []
    try:
        slow = replace(job, cluster=_slowed(job.cluster, in_node))
        decisions = choose(slow, mesh, count, constraints, limits)
    except NoPlanError:
        return []
    made = realise(job, decisions, limits.memory_bytes)
    if made.peak_bytes > limits.memory_bytes or made.over_bytes or made.simulation.step_s >= known_s:
        return []
    objective_s, bound_s = work_s(made.simulation), best.bound_s if best else 0.0
    return [Candidate(made.plan, made.simulation, objective_s, bound_s, "feasible", 0.0)]


def nodes_alike(
    job: Job, mesh: Mesh, constraints: Constraints, limits: SolveLimits, here: Sequence[Candidate]
) -> list[Candidate]:
    """Data parallelism of one node on every node, where the best plan known divides nothing over nodes; the fastest of
    all ZeRO levels, if it fits and is faster.

    Args:
        job, constraints, limits: what was solved for.
        mesh: of nodes and their devices.
        here: plans found for them.
    """
    best = min(here, key=lambda each: each.simulation.step_s, default=None)
    node = mesh.shape[-1]
    divided = dividing_data(msgspec.structs.replace(constraints, mesh=None), node)
    if best is None or divided is None or len(job.cluster.groups) > 1 or 0 not in axes_alike(best.plan.stages[0]):
        return []
    count, found = best.plan.num_microbatches, list[Candidate]()
    if job.program.batch_size % (node * count):
        return []
    (group,) = job.cluster.groups
    alone = msgspec.structs.replace(group, nodes=1, between_nodes=None)
    part = replace(job, cluster=msgspec.structs.replace(job.cluster, groups=(alone,), between_nodes=None))
    for zero in LEVELS:
        pins = msgspec.structs.replace(divided, dp=node, zero=zero, microbatches=count)
        try:
            decisions = choose(part, candidate_meshes(part, pins)[0], count, pins, limits)
        except (ConstraintError, NoPlanError):
            continue
        made = realise(job, _on_every_node(decisions, mesh), limits.memory_bytes)
        if made.peak_bytes <= limits.memory_bytes and not made.over_bytes:
            work = work_s(made.simulation)
            found.append(Candidate(made.plan, made.simulation, work, best.bound_s, "feasible", 0.0))
    fastest = min(found, key=lambda each: each.simulation.step_s, default=best)
    return [fastest] if fastest.simulation.step_s < best.simulation.step_s else []


def axes_alike(stage: Stage) -> list[int]:
    """The axes over which a stage divides neither samples nor parameters, of more than one device."""
    texts = [*stage.batch.values(), *(text for p in stage.params.values() for text in (p.stored, p.grad, p.state))]
    layouts = list(map(parse_layout, texts))
    return [axis for axis, n in enumerate(stage.mesh.shape) if n > 1 and all(each[axis] == R for each in layouts)]


def _on_every_node(decisions: Decisions, mesh: Mesh) -> Decisions:
    """Decisions for the devices of a node, for those of every one."""
    params = tuple(
        msgspec.structs.replace(p, stored=f"R,{p.stored}", grad=f"R,{p.grad}", state=f"R,{p.state}")
        for p in decisions.params
    )
    return replace(
        decisions,
        mesh=mesh,
        ops=tuple(tuple(f"-|{key}" for key in keys) for keys in decisions.ops),
        input_grads=tuple(
            tuple(None if text is None else f"R,{text}" for text in texts) for texts in decisions.input_grads
        ),
        params=params,
        batch={name: f"R,{text}" for name, text in decisions.batch.items()},
    )


def _slowed(cluster: ClusterSpec, in_node: bool) -> ClusterSpec:
    """The cluster with slow links, those in nodes where these are to be too."""

    def slow(link: Link | None) -> Link | None:
        if link is None:
            return None
        latency_s = SLOWER * link.latency_s
        return msgspec.structs.replace(link, bytes_per_s=link.bytes_per_s / SLOWER, latency_s=latency_s)

    groups = tuple(
        msgspec.structs.replace(
            group,
            in_node=slow(group.in_node) if in_node else group.in_node,
            between_nodes=slow(group.between_nodes),
        )
        for group in cluster.groups
    )
    return msgspec.structs.replace(cluster, groups=groups, between_nodes=slow(cluster.between_nodes))
