"""The space of pipelines over all groups of a cluster: orders of the groups, positions and meshes of each, microbatches
and schedules.

Inside a group a position has equal parts of its devices, along nodes. Every order of up to `FEW` groups is looked
at, of more the order of the cluster, by memory and by speed, and their reverses. Schedules whose stages lie on several
positions (GEMS, Chimera) are left out: their copies would have to be sharded alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.joint.combinations import EACH, inner_meshes, microbatch_counts, replica_counts
from paraplan.planner.mixed.group_sets import FEW, cluster_of
from paraplan.planner.mixed.positions import MixedPipeline, PositionSpan
from paraplan.planner.pipeline.first_devices import first_devices
from paraplan.planner.schedules.named import NAMED
from paraplan.rules.time_axis import program_micro

Division = tuple[tuple[PositionSpan, ...], tuple[int, ...]]
"""The positions of every group, and the microbatches that all of them can take."""
COARSE = 4
"""How many times fewer microbatches are looked at next, first."""
MOST_SPANS = 4096
"""Ways to divide the groups beyond which positions of a group are as few or as many as they can be."""


def group_orders(job: Job) -> tuple[tuple[int, ...], ...]:
    """In which orders a pipeline may go through the groups."""
    groups = job.cluster.groups
    everything = tuple(range(len(groups)))
    if len(groups) <= FEW:
        return tuple(itertools.permutations(everything))
    by_memory = tuple(sorted(everything, key=lambda g: -groups[g].device.memory_bytes))
    by_speed = tuple(sorted(everything, key=lambda g: -max(groups[g].device.flops_per_s.values())))
    orders = (everything, by_memory, by_speed)
    return tuple(dict.fromkeys((*orders, *(order[::-1] for order in orders))))


def inner_constraints(constraints: Constraints) -> Constraints:
    """What is pinned inside positions."""
    return msgspec.structs.replace(constraints, pp=None, schedule=None, stages=None)


def check_on_cluster(constraints: Constraints, cluster: ClusterSpec) -> None:
    """Refuse what makes no sense on all devices alike, nor in as many positions as groups that differ may have.

    Raises:
        ConstraintError: why not on all devices alike.
    """
    try:
        check_constraints(constraints, cluster.num_devices)
    except ConstraintError:
        sums, inner = {0}, inner_constraints(constraints)
        for group in range(len(cluster.groups)):
            parts = position_parts(cluster_of(cluster, (group,)), inner)
            sums = {found + count for found in sums for count in parts}
        if len(cluster.groups) == 1 or constraints.pp not in sums:
            raise


def position_parts(cluster: ClusterSpec, inner: Constraints) -> dict[int, ClusterSpec]:
    """Into how many equal positions a group's devices may be divided, and what each has of them.

    Args:
        cluster: of the group alone.
        inner: what is pinned inside positions.
    """
    n, found = cluster.num_devices, {}
    for count in (d for d in range(1, n + 1) if n % d == 0):
        with suppress(ConstraintError):
            check_constraints(msgspec.structs.replace(inner, pp=count), n)
            found[count] = first_devices(cluster, count)
    return found


def span_options(job: Job, constraints: Constraints, group: int) -> dict[PositionSpan, frozenset[int]]:
    """How a group's devices may be divided into positions, each with the microbatches that it can take.

    Args:
        job: what is planned.
        constraints: pinned.
        group: number of the group.
    """
    cluster, inner, found = cluster_of(job.cluster, (group,)), inner_constraints(constraints), {}
    for count, part in position_parts(cluster, inner).items():
        per_node = part.groups[0].devices_per_node
        for mesh in inner_meshes(part.num_devices, per_node, inner):
            replicas = replica_counts(inner, mesh, part.num_devices, per_node)
            found[PositionSpan(group, count, mesh)] = frozenset(microbatch_counts(job, inner, replicas))
    return found


def divisions(job: Job, constraints: Constraints) -> Iterator[Division]:
    """Ways to divide all groups into positions, in the order of the cluster, and the microbatches each can take, the
    most first."""
    options = [span_options(job, constraints, group) for group in range(len(job.cluster.groups))]
    ways = 1
    for each in options:
        ways *= len(each)
    if ways > MOST_SPANS:
        options = [_fewest_and_most(each) for each in options]
    for spans in itertools.product(*options):
        if constraints.pp is not None and sum(span.count for span in spans) != constraints.pp:
            continue
        shared = frozenset.intersection(*(options[at][span] for at, span in enumerate(spans)))
        if shared:
            yield spans, tuple(sorted(shared, reverse=True))


def coarse_counts(ways: Sequence[Division]) -> list[int]:
    """Of their numbers of microbatches a few: the most, and each time `COARSE` times fewer."""
    every = sorted({count for _, counts in ways for count in counts}, reverse=True)
    few = every[:1]
    for count in every:
        if COARSE * count <= few[-1]:
            few.append(count)
    return few


def near_counts(ways: Sequence[Division], near: int) -> list[int]:
    """Their numbers of microbatches between two of those few, the nearest first."""
    every = {count for _, counts in ways for count in counts if near < COARSE * count and count < COARSE * near}
    return sorted(every, key=lambda count: (abs(math.log(count / near)), count))


def _fewest_and_most(options: dict[PositionSpan, frozenset[int]]) -> dict[PositionSpan, frozenset[int]]:
    counts = sorted({span.count for span in options})
    kept = {*counts[:2], *counts[-2:]}
    return {span: micros for span, micros in options.items() if span.count in kept}


def scheduled(
    job: Job, constraints: Constraints, spans: tuple[PositionSpan, ...], microbatches: int
) -> Iterator[MixedPipeline]:
    """The pipelines of some spans in this order: every schedule that takes them, with every number of stages a
    position.

    Args:
        job: what is planned.
        constraints: pinned.
        spans: of devices, in the order of stages.
        microbatches: of the step.
    """
    segments, micro = len(job.program.segments), program_micro(job.program, microbatches)
    pp = sum(span.count for span in spans)
    asked = len(constraints.stages) if constraints.stages else None
    for name in tuple(NAMED) if constraints.schedule is None else (constraints.schedule,):
        kind = NAMED.get(name)
        if kind is None or kind.num_replicas > 1 or (micro.has_tail and name != "gpipe" and microbatches > 1):
            continue
        for each in EACH if kind.counts(pp, microbatches) else ():
            if pp * each <= segments and kind.takes(each) and asked in (None, pp * each):
                yield MixedPipeline(spans, microbatches, name, each)
