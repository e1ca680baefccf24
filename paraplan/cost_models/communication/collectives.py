"""Collectives over one mesh axis: latency plus bandwidth, in ring, tree and hierarchical form.

Byte convention, everywhere: `input_bytes` is the size of the tensor *one rank puts in*:
all_reduce: the whole tensor; all_gather: the rank's shard; reduce_scatter: the whole (unreduced) tensor;
all_to_all: the whole local tensor, of which 1/n stays; permute: the tensor; p2p: the message. A
route is priced as the all_to_all of the rows it sends where every expert is chosen alike.

An axis whose groups span k nodes with m members in each has two links. A ring through it crosses a node
boundary k times per turn; the m members' network ports carry m such rings at once, so its bandwidth is
min(in-node, m · between). An all-reduce has alternatives (tree, hierarchical), of which the fastest is taken,
as NCCL's tuner does; gathers and scatters are rings, whose latency grows with their ranks. Every form is affine
in bytes, hence times are monotone.

Limits: no contention between axes (streams of one level are serialised by the simulator instead), no SHARP
or NVLink multicast, the reduction's arithmetic is hidden behind the wire.
Sources: Thakur, Rabenseifner, Gropp 2005 (ring, pairwise exchange); Sanders, Speck, Traeff 2009 (two trees);
NCCL src/graph/tuning.cc (ring and tree latency, 2.18).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from paraplan.cost_models.constants import efficiency_of
from paraplan.ir.errors import CostModelError
from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    PERMUTE,
    REDUCE_SCATTER,
    ROUTE,
)
from paraplan.ir.machine.device import Link
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.model.graph import Arg
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.struct import Value


class AxisLink(Value, frozen=True, kw_only=True):
    """A mesh axis as a collective sees it; bandwidths are what collectives reach, not data-sheet peaks.

    Attributes:
        size: ranks in a group (n).
        latency_s, bytes_per_s: one message, per device and direction, at the axis' level: within the node,
            or between nodes where groups span several.
        level: "in_node" or "between_nodes".
        local_size: members of a group within one node (m); n for an axis inside a node.
        local_latency_s, local_bytes_per_s: the in-node link, used where m > 1 and the axis spans nodes.
        start_s: time before the first byte moves.
        device_share: of a device's compute, while a collective is under way.
    """

    size: int
    latency_s: float
    bytes_per_s: float
    level: str = "in_node"
    local_size: int = 1
    local_latency_s: float = 0.0
    local_bytes_per_s: float = math.inf
    start_s: float = 0.0
    device_share: float = 0.0

    @property
    def nodes(self) -> int:
        """Nodes a group spans (k)."""
        return 1 if self.level == "in_node" else max(1, self.size // self.local_size)

    @property
    def is_two_level(self) -> bool:
        """Whether groups span nodes with several members in each."""
        return self.level == "between_nodes" and self.local_size > 1

    @property
    def ring_bytes_per_s(self) -> float:
        """Bandwidth per rank of a ring through every member: min(in-node, m · between)."""
        ports = self.local_size * self.bytes_per_s
        return min(self.local_bytes_per_s, ports) if self.is_two_level else self.bytes_per_s

    def ring_latency_s(self, turns: int) -> float:
        """Latency of `turns` turns of n - 1 steps, k - 1 of which cross nodes (NCCL tuning.cc)."""
        if not self.is_two_level:
            return turns * (self.size - 1) * self.latency_s
        crossing = self.nodes - 1
        return turns * (crossing * self.latency_s + (self.size - 1 - crossing) * self.local_latency_s)


def axis_link(cluster: ClusterSpec, mesh: Mesh, axis: int) -> AxisLink:
    """The link of a mesh axis, from the nodes its devices sit in.

    Where groups of the axis differ, the slowest of their links counts, in each of its numbers. Where nodes hold unequal
    numbers of a group's members, a ring crosses into the one that holds fewest through its ports alone: it is priced
    as if every node held as few (and latency as if there were as many nodes as that takes).

    Args:
        cluster: where the mesh lies.
        mesh: the mesh.
        axis: index of the axis.
    Raises:
        ClusterError: groups span nodes but no between_nodes link is described, or a device is beyond the cluster.
    """
    size = mesh.shape[axis]
    members = _members(mesh, axis)
    fewest = min(count for group in members for count in Counter(map(cluster.node_of, group)).values())
    kinds = {id(group): group for group in map(cluster.group_of, mesh.devices)}.values()
    share = efficiency_of(next(iter(kinds)).device.backend)
    local = _slowest([kind.in_node for kind in kinds], share.in_node)
    if fewest == size:
        return AxisLink(
            size=size,
            latency_s=local.latency_s,
            bytes_per_s=local.bytes_per_s,
            local_size=size,
            local_latency_s=local.latency_s,
            local_bytes_per_s=local.bytes_per_s,
            start_s=share.collective_start_s,
            device_share=local.device_share,
        )
    networks = [cluster.network(group) for group in members if cluster.span(group) == "between_nodes"]
    between = _slowest(networks, share.between_nodes)
    ports = fewest if next(iter(kinds)).device.backend == "cuda" else 1  # a ring through all of a node's ports
    return AxisLink(
        size=size,
        latency_s=between.latency_s,
        bytes_per_s=between.bytes_per_s,
        level="between_nodes",
        local_size=fewest,
        local_latency_s=local.latency_s,
        local_bytes_per_s=local.bytes_per_s,
        start_s=share.collective_start_s,
        device_share=min(1.0, ports * between.device_share),
    )


def _members(mesh: Mesh, axis: int) -> list[tuple[int, ...]]:
    """The devices of every group along an axis."""
    stride = math.prod(mesh.shape[axis + 1 :])
    span = stride * mesh.shape[axis]
    return [
        mesh.devices[start : outer + span : stride]
        for outer in range(0, len(mesh.devices), span)
        for start in range(outer, outer + stride)
    ]


def _slowest(links: list[Link], share: float) -> Link:
    return Link(
        bytes_per_s=min(link.bytes_per_s for link in links) * share,
        latency_s=max(link.latency_s for link in links),
        device_share=max(link.device_share for link in links),
    )


def _levels(axis: AxisLink) -> tuple[AxisLink, AxisLink]:
    """The in-node part and the between-nodes part of a two-level axis, each a plain axis."""
    inner = AxisLink(size=axis.local_size, latency_s=axis.local_latency_s, bytes_per_s=axis.local_bytes_per_s)
    outer = AxisLink(size=axis.nodes, latency_s=axis.latency_s, bytes_per_s=axis.bytes_per_s)
    return inner, outer


def _nothing(input_bytes: int, axis: AxisLink) -> bool:
    if input_bytes < 0:
        raise CostModelError(f"a collective of {input_bytes} bytes: bytes cannot be negative")
    if axis.size < 1:
        raise CostModelError(f"a collective over {axis.size} ranks: an axis has at least one")
    return axis.size == 1


def ring_all_reduce_s(input_bytes: int, axis: AxisLink) -> float:
    """t = start + 2·latency(ring) + 2 · (n − 1)/n · B / bandwidth(ring). Source: Thakur et al. 2005, section 4.5."""
    if _nothing(input_bytes, axis):
        return 0.0
    share = 2 * (axis.size - 1) / axis.size
    return axis.start_s + axis.ring_latency_s(2) + share * input_bytes / axis.ring_bytes_per_s


def tree_all_reduce_s(input_bytes: int, axis: AxisLink) -> float:
    """t = start + 2 · ((m − 1) · latency_local + ⌈log2 k⌉ · latency) + 2 · B / bandwidth(ring).

    A chain inside each node, two binary trees between nodes (one tree of all ranks on a one-level axis).
    Source: NCCL tuning.cc; Sanders et al. 2009.
    """
    if _nothing(input_bytes, axis):
        return 0.0
    if axis.is_two_level:
        latency = (axis.local_size - 1) * axis.local_latency_s + _log2(axis.nodes) * axis.latency_s
    else:
        latency = _log2(axis.size) * axis.latency_s
    return axis.start_s + 2 * latency + 2 * input_bytes / axis.ring_bytes_per_s


def hierarchical_all_reduce_s(input_bytes: int, axis: AxisLink) -> float:
    """Reduce-scatter in the node, all-reduce of B/m between nodes, all-gather in the node.

    Source: Jia et al. 2018 (arXiv 1807.11205), section 3.3. On a one-level axis it is the ring.
    """
    if _nothing(input_bytes, axis) or not axis.is_two_level:
        return ring_all_reduce_s(input_bytes, axis)
    inner, outer = _levels(axis)
    part = -(-input_bytes // axis.local_size)
    across = min(ring_all_reduce_s(part, outer), tree_all_reduce_s(part, outer))
    return axis.start_s + reduce_scatter_s(input_bytes, inner) + across + all_gather_s(part, inner)


def all_reduce_s(input_bytes: int, axis: AxisLink) -> float:
    """Time of an all-reduce: the fastest of ring, tree and hierarchical, as NCCL would choose.

    Args:
        input_bytes: bytes of the tensor each rank holds.
        axis: the axis' link.
    Returns:
        Seconds; 0.0 for an axis of size 1.
    Raises:
        CostModelError: input_bytes is negative.
    """
    return min(form(input_bytes, axis) for form in (ring_all_reduce_s, tree_all_reduce_s, hierarchical_all_reduce_s))


def all_gather_s(input_bytes: int, axis: AxisLink) -> float:
    """Time of an all-gather.

    t = start + latency(ring) + (n − 1) · B / bandwidth(ring)

    The ring alone: NCCL has no tree for it, and its logarithmic form (PAT, 2.23) is for one rank a node.

    Args:
        input_bytes: bytes of the shard one rank puts in (B).
        axis: the axis' link.
    Returns:
        Seconds; 0.0 for an axis of size 1.
    Raises:
        CostModelError: input_bytes is negative.
    Source: Thakur et al. 2005, section 4.1.
    """
    if _nothing(input_bytes, axis):
        return 0.0
    return axis.start_s + axis.ring_latency_s(1) + (axis.size - 1) * input_bytes / axis.ring_bytes_per_s


def reduce_scatter_s(input_bytes: int, axis: AxisLink) -> float:
    """Time of a reduce-scatter: an all-gather run backwards over shards of B/n.

    Args:
        input_bytes: bytes of the whole tensor one rank puts in (B).
        axis: the axis' link.
    Returns:
        Seconds; 0.0 for an axis of size 1.
    Raises:
        CostModelError: input_bytes is negative.
    Source: Thakur et al. 2005, section 4.2.
    """
    if _nothing(input_bytes, axis):
        return 0.0
    return all_gather_s(-(-input_bytes // axis.size), axis)


def all_to_all_s(input_bytes: int, axis: AxisLink) -> float:
    """Time of an all-to-all by pairwise exchange; local and remote partners are served at once.

    t = start + max((m − 1) · (latency_local + B/n / bandwidth_local), (n − m) · (latency + B/n / bandwidth))

    Args:
        input_bytes: bytes of the tensor one rank puts in (B), 1/n of it for each member.
        axis: the axis' link.
    Returns:
        Seconds; 0.0 for an axis of size 1.
    Raises:
        CostModelError: input_bytes is negative.
    Source: Thakur et al. 2005, section 4.3 (pairwise exchange).
    """
    if _nothing(input_bytes, axis):
        return 0.0
    part = input_bytes / axis.size
    if not axis.is_two_level:
        return axis.start_s + (axis.size - 1) * (axis.latency_s + part / axis.bytes_per_s)
    local = (axis.local_size - 1) * (axis.local_latency_s + part / axis.local_bytes_per_s)
    remote = (axis.size - axis.local_size) * (axis.latency_s + part / axis.bytes_per_s)
    return axis.start_s + max(local, remote)


def permute_s(input_bytes: int, axis: AxisLink) -> float:
    """Time of one turn of a ring: every rank sends to the next and receives from the previous at once.

    t = start + max(latency_local + B / bandwidth_local, latency + B / bandwidth)

    Where groups span nodes the one message that leaves a node has that member's port to itself.

    Args:
        input_bytes: bytes of the tensor one rank puts in (B).
        axis: the axis' link.
    Returns:
        Seconds; 0.0 for an axis of size 1.
    Raises:
        CostModelError: input_bytes is negative.
    Source: Liu et al. 2023 (arXiv 2310.01889), section 3.
    """
    if _nothing(input_bytes, axis):
        return 0.0
    across = axis.latency_s + input_bytes / axis.bytes_per_s
    if not axis.is_two_level:
        return axis.start_s + across
    return axis.start_s + max(across, axis.local_latency_s + input_bytes / axis.local_bytes_per_s)


def p2p_s(input_bytes: int, link: Link, backend: str = "cuda", level: str = "between_nodes") -> float:
    """Time of one message: t = start + latency + B / (bandwidth · share of the level).

    Args:
        input_bytes: bytes of the message (B).
        link: the link it takes, with its data-sheet bandwidth.
        backend: the devices' backend.
        level: "in_node" or "between_nodes".
    Raises:
        CostModelError: input_bytes is negative.
    """
    if input_bytes < 0:
        raise CostModelError(f"a message of {input_bytes} bytes: bytes cannot be negative")
    share = efficiency_of(backend)
    of_level = share.in_node if level == "in_node" else share.between_nodes
    return share.collective_start_s + link.latency_s + input_bytes / (link.bytes_per_s * of_level)


def _log2(count: int) -> int:
    return max(0, math.ceil(math.log2(count))) if count > 0 else 0


TIMES_S: dict[str, Callable[[int, AxisLink], float]] = {
    ALL_REDUCE.name: all_reduce_s,
    ALL_GATHER.name: all_gather_s,
    REDUCE_SCATTER.name: reduce_scatter_s,
    ALL_TO_ALL.name: all_to_all_s,
    PERMUTE.name: permute_s,
    ROUTE.name: all_to_all_s,
}
"""By the name of the collective, of `input_bytes` over an axis."""


def input_bytes_of(target: str, args: tuple[Arg, ...], sent: TensorSpec | LocalValue) -> int:
    """What one rank puts into a collective: its tensor; of an uneven one the rows that are priced.

    Args:
        target, args: of the instruction, or of an expansion's step.
        sent: the tensor.
    """
    if not COLLECTIVES[target].uneven:
        return sent.nbytes
    return sent.nbytes // max((*sent.shape, 1)[0], 1) * int(args[-1])


def collective_time_s(target: str, input_bytes: int, axis: AxisLink) -> float:
    """The time of a collective by its name in `Instr.target`.

    Args:
        target: the collective's name.
        input_bytes: what one rank puts in.
        axis: the link of the mesh axis it goes over.
    Raises:
        CostModelError: no such collective, or negative bytes.
    """
    if target not in TIMES_S:
        raise CostModelError(f"no such collective: {target!r} ({', '.join(TIMES_S)})")
    return TIMES_S[target](input_bytes, axis)
