"""Sets of a cluster's groups that a plan may use, each as a cluster of its own.

All devices of a plan's cluster hold a stage, so a plan that leaves groups idle is one for the cluster of the others. A
set is left out where another set takes its place: where it has a group than which another group, not in it, is no
slower, no smaller and no worse connected. Of many groups, single ones, pairs and all but one are looked at.
"""

from __future__ import annotations

import itertools

import msgspec

from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Device, Link

FEW = 3
"""Groups of which every set is looked at."""
MOST_SETS = 12
"""Sets beside that of all groups, the fastest first."""

GroupSet = tuple[int, ...]
"""Numbers of groups, ascending."""


def group_sets(cluster: ClusterSpec) -> tuple[GroupSet, ...]:
    """All groups, then the sets that a plan may do better with, the fastest first."""
    everything = tuple(range(len(cluster.groups)))
    count = len(everything)
    sizes = range(1, count) if count <= FEW else (1, 2, count - 1)
    sets = {each for size in sizes for each in itertools.combinations(everything, size)}
    own = sorted(
        (each for each in sets if not _is_beaten(cluster, each)), key=lambda each: (-_speed(cluster, each), each)
    )
    return everything, *own[:MOST_SETS]


def cluster_of(cluster: ClusterSpec, chosen: GroupSet) -> ClusterSpec:
    """The cluster of some groups: itself where they are all."""
    if len(chosen) == len(cluster.groups):
        return cluster
    groups = tuple(cluster.groups[index] for index in chosen)
    return msgspec.structs.replace(cluster, name=said(cluster, chosen), groups=groups)


def said(cluster: ClusterSpec, chosen: GroupSet) -> str:
    """Some groups as cluster names are written: devices of a node, device, nodes."""
    return "+".join(
        f"{group.devices_per_node}x{group.device.kind}{f':{group.nodes}' if group.nodes > 1 else ''}"
        for group in (cluster.groups[index] for index in chosen)
    )


def _speed(cluster: ClusterSpec, chosen: GroupSet) -> float:
    """Of their devices, by the fastest rate each has."""
    groups = [cluster.groups[index] for index in chosen]
    return sum(each.nodes * each.devices_per_node * max(each.device.flops_per_s.values()) for each in groups)


def _is_beaten(cluster: ClusterSpec, chosen: GroupSet) -> bool:
    """Whether a group that is not chosen can take the place of one that is, and no plan be the slower."""
    others = [index for index in range(len(cluster.groups)) if index not in chosen]
    return any(
        _replaces(cluster, other, mine) and (other < mine or not _replaces(cluster, mine, other))
        for mine, other in itertools.product(chosen, others)
    )


def _replaces(cluster: ClusterSpec, other: int, mine: int) -> bool:
    """Whether a group is another's equal or better in everything."""
    a, b = cluster.groups[other], cluster.groups[mine]
    if (a.nodes, a.devices_per_node) != (b.nodes, b.devices_per_node):
        return False
    networks = (a.between_nodes or cluster.between_nodes, b.between_nodes or cluster.between_nodes)
    links = ((a.in_node, b.in_node), networks, (a.host, b.host), (a.disk, b.disk))
    rooms = ("host_memory_bytes", "disk_bytes", "host_memory_bytes_per_s")
    return (
        _device_replaces(a.device, b.device)
        and all(_link_replaces(*pair) for pair in links)
        and all(getattr(a, room) >= getattr(b, room) for room in rooms)
    )


def _device_replaces(a: Device, b: Device) -> bool:
    return (
        a.memory_bytes - _reserved(a) >= b.memory_bytes - _reserved(b)
        and a.memory_bytes_per_s >= b.memory_bytes_per_s
        and a.launch_s <= b.launch_s
        and a.issue_s <= b.issue_s
        and a.power_share >= b.power_share
        and (a.multiprocessors, a.capability) == (b.multiprocessors, b.capability)
        and all(a.flops_per_s.get(dtype, 0.0) >= rate for dtype, rate in b.flops_per_s.items())
    )


def _reserved(device: Device) -> int:
    return sum(each.nbytes for each in device.reserves)


def _link_replaces(a: Link | None, b: Link | None) -> bool:
    if a is None or b is None:
        return b is None
    return a.bytes_per_s >= b.bytes_per_s and a.latency_s <= b.latency_s and a.device_share <= b.device_share
