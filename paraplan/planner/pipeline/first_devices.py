"""The devices of one position of a pipeline: as many as any has, along nodes."""

from __future__ import annotations

import msgspec

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.cluster import ClusterSpec, NodeGroup
from paraplan.ir.option_words import OptionValue

UNLIMITED = 1 << 60


def first_devices(cluster: ClusterSpec, positions: int) -> ClusterSpec:
    """The devices of a pipeline's first position, as a cluster of unlimited memory.

    Raises:
        ConstraintError: the devices do not divide, or not along nodes.
    """
    n = cluster.num_devices
    if positions < 1 or n % positions:
        raise ConstraintError("{} does not divide the cluster's {} devices", OptionValue("pp", positions), n)
    if positions == 1:
        return msgspec.structs.replace(cluster, groups=tuple(map(_roomy, cluster.groups)))
    size, group = n // positions, cluster.groups[0]
    per_node = min(size, group.devices_per_node)
    if size % per_node or group.devices_per_node % per_node or size > group.nodes * group.devices_per_node:
        raise ConstraintError(
            "{}: {} devices a stage do not lie along nodes of {}; use a pp that makes stages of whole nodes, or of "
            "equal parts of one",
            *(OptionValue("pp", positions), size, group.devices_per_node),
        )
    part = msgspec.structs.replace(_roomy(group), nodes=size // per_node, devices_per_node=per_node)
    return msgspec.structs.replace(cluster, groups=(part,))


def _roomy(group: NodeGroup) -> NodeGroup:
    return msgspec.structs.replace(group, device=msgspec.structs.replace(group.device, memory_bytes=UNLIMITED))
