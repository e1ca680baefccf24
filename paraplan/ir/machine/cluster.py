"""What the machine is: devices, memories and links, by level.

A cluster is groups of equal nodes; groups may differ in device, memory and links. Three levels join devices: within
a node, between nodes of a group, and between groups (one level for streams, "between_nodes", since all of it goes
through the same port).
"""

from __future__ import annotations

from paraplan.ir.errors import ClusterError
from paraplan.ir.machine.device import USUAL_CAPABILITY, Device, Link, check_device, check_link
from paraplan.ir.machine.mesh import MOST_DEVICES
from paraplan.ir.machine.reserves import Reserve, cpu_reserves
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.quantities import check_not_negative, check_positive
from paraplan.ir.struct import Value


class NodeGroup(Value, frozen=True, kw_only=True):
    """Equal nodes.

    Attributes:
        nodes: how many.
        devices_per_node: devices in each.
        device: what they are.
        in_node: link between devices of one node.
        between_nodes: link between nodes of this group, per device; the cluster's where it is not given.
        host: link between a device and its host's memory, per device.
        disk: link between a device's host share and local disk, per device; None where there is none.
        host_memory_bytes: host memory per node usable for offload.
        disk_bytes: disk per node usable for offload.
        host_memory_bytes_per_s: peak bandwidth of a node's host memory, which its devices share; 0 where it is not
            known, and then no parameter is updated there.
        host_memory_source: what it is, and where that number comes from.
    """

    nodes: int
    devices_per_node: int
    device: Device
    in_node: Link
    host: Link
    disk: Link | None = None
    between_nodes: Link | None = None
    host_memory_bytes: int = 0
    disk_bytes: int = 0
    host_memory_bytes_per_s: float = 0.0
    host_memory_source: str = ""

    def room_bytes(self, tier: str) -> int:
        """Bytes of a tier that a node may fill."""
        found: int = getattr(self, TIERS[tier].room)
        return found

    def update_bytes_per_s(self, tier: str) -> float:
        """Peak bandwidth at which a node updates parameters in a tier; 0 where it does not, or it is not known."""
        found: float = getattr(self, TIERS[tier].rate) if TIERS[tier].rate else 0.0
        return found


class ClusterSpec(Value, frozen=True, kw_only=True):
    """The cluster a plan is for.

    Attributes:
        name: what people call it.
        groups: groups of equal nodes; global device numbers run through them in order.
        between_nodes: link between nodes of different groups, and of groups that name none, per device; None for a
            single node.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    between_nodes: Link | None = None

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return sum(group.nodes * group.devices_per_node for group in self.groups)

    @property
    def backend(self) -> str:
        """Torch device type of all devices, "cuda" or "cpu"."""
        return self.groups[0].device.backend

    @property
    def capability(self) -> int:
        """Least compute capability of its devices; of one that does not say, `USUAL_CAPABILITY`."""
        return min(group.device.capability or USUAL_CAPABILITY for group in self.groups)

    def group_of(self, device: int) -> NodeGroup:
        """The group a global device number belongs to."""
        first = 0
        for group in self.groups:
            first += group.nodes * group.devices_per_node
            if device < first:
                return group
        raise ClusterError(f"{self.name}: device {device} is beyond the last ({self.num_devices} devices)")

    def node_of(self, device: int) -> int:
        """The global number of the node a device sits in."""
        first_node = first = 0
        for group in self.groups:
            count = group.nodes * group.devices_per_node
            if device < first + count:
                return first_node + (device - first) // group.devices_per_node
            first, first_node = first + count, first_node + group.nodes
        raise ClusterError(f"{self.name}: device {device} is beyond the last ({self.num_devices} devices)")

    def span(self, devices: tuple[int, ...]) -> str:
        """Which level joins these devices: "in_node" or "between_nodes"."""
        return "in_node" if len({self.node_of(device) for device in devices}) == 1 else "between_nodes"

    def link(self, level: str, device: int = 0) -> Link:
        """The link of a level ("in_node", "between_nodes", or a tier's name) as a device sees it."""
        group = self.group_of(device)
        found: Link | None = getattr(group, level)
        if found is None and level == "between_nodes":
            found = self.between_nodes
        if found is None:
            raise ClusterError(f"{self.name}: no {level} link is described, yet one is needed; add it")
        return found

    def network(self, devices: tuple[int, ...]) -> Link:
        """What nodes of these devices reach each other over: the slowest link on the way, in each of its numbers.

        Between groups that is the cluster's own link and those of both groups; within one group the group's.

        Raises:
            ClusterError: no such link is described.
        """
        first_of = {id(self.group_of(device)): device for device in devices}
        links = [self.link("between_nodes", device) for device in first_of.values()]
        if len(links) > 1 and self.between_nodes is not None:
            links.append(self.between_nodes)
        slowest = min(links, key=lambda link: link.bytes_per_s)
        return Link(
            bytes_per_s=slowest.bytes_per_s,
            latency_s=max(link.latency_s for link in links),
            source=slowest.source,
            device_share=max(link.device_share for link in links),
        )

    def reserves_of(self, device: Device) -> tuple[Reserve, ...]:
        """What of a device's memory is kept from a plan's tensors here."""
        return tuple(each for each in device.reserves if self.num_devices > 1 or not each.joined)

    def plan_bytes(self, reserve_bytes: int | None = None, of: int | None = None) -> int:
        """Bytes that allocators may reserve for a plan on any of the devices.

        Args:
            reserve_bytes: what every device keeps from it; None: its `reserves`.
            of: the number of the group whose devices are meant; None for all.
        """
        devices = [group.device for group in (self.groups if of is None else self.groups[of : of + 1])]
        if reserve_bytes is not None:
            return min(device.memory_bytes for device in devices) - reserve_bytes
        return min(each.memory_bytes - sum(kept.nbytes for kept in self.reserves_of(each)) for each in devices)

    def memory_bytes(self, devices: tuple[int, ...]) -> int:
        """Bytes the smallest of these devices has."""
        return min(self.group_of(device).device.memory_bytes for device in devices)

    def copy_s(self, tier: str, device: int, nbytes: int, from_host: bool = False) -> float:
        """Seconds of one copy between a device and a tier.

        Args:
            tier, device: where to and from, either way.
            nbytes: of the copy.
            from_host: between the tier and the memory on the way.
        Raises:
            ClusterError: no such link is described.
        """
        way = (tier,) if from_host else TIERS[tier].way
        return sum(link.latency_s + nbytes / link.bytes_per_s for link in (self.link(level, device) for level in way))

    def update_bytes_per_s(self, tier: str, device: int) -> float:
        """A device's share of the bandwidth at which parameters on a tier are updated.

        Raises:
            ClusterError: it is not described, or the tier is no memory.
        """
        group = self.group_of(device)
        rate = group.update_bytes_per_s(tier)
        if not rate:
            raise ClusterError(
                f"{self.name}: how fast the {tier} updates parameters is not described; give its groups "
                f"{TIERS[TIERS[tier].updated_in].rate}"
            )
        return rate / group.devices_per_node

    def room_bytes(self, tier: str, devices: tuple[int, ...]) -> int:
        """Bytes of a tier that each of these devices may fill: the least share of their nodes'."""
        groups = [self.group_of(device) for device in devices]
        return min(group.room_bytes(tier) // group.devices_per_node for group in groups)

    def has_room(self, tier: str, devices: tuple[int, ...]) -> bool:
        """Whether each of these devices has a link to a tier and some room there."""
        linked = all(getattr(self.group_of(device), tier) is not None for device in devices)
        return linked and self.room_bytes(tier, devices) > 0

    def device_kinds(self) -> tuple[int, ...]:
        """Per device, the first group with an equal device: ranks of one number do equal work in equal time."""
        devices = [group.device for group in self.groups]
        kinds = [(devices.index(each.device),) * (each.nodes * each.devices_per_node) for each in self.groups]
        return sum(kinds, ())

    @classmethod
    def local(cls, num_devices: int, memory_bytes: int = 4 << 30, cores: int | None = None) -> ClusterSpec:
        """CPU processes on this machine, as many as devices.

        The rates are those of one thread of a server CPU talking over loopback; a profile replaces them. Where there
        are fewer cores than processes, all that a process does, its messages too, takes as many times longer.

        Args:
            num_devices: how many.
            memory_bytes: what a plan may hold on each; the process has its reserves besides.
            cores: that they share; None: one for each.
        Raises:
            ClusterError: num_devices is below 1, or more than `MOST_DEVICES`.
        """
        if num_devices > MOST_DEVICES:
            raise ClusterError(f"local:{num_devices}: {num_devices} processes; there may be {MOST_DEVICES}")
        reserves = cpu_reserves(memory_bytes)
        share = min(1.0, cores / num_devices) if cores and num_devices > 0 else 1.0
        shared = f"; {cores} cores shared by {num_devices} processes" if share < 1 else ""
        half, eight = ("bfloat16", "float16"), ("float8_e4m3fn", "float8_e5m2")
        rates = {"float64": 2.5e10, "float32": 5e10, **dict.fromkeys(half, 1e10), **dict.fromkeys(eight, 4e10)}
        device = Device(
            kind="cpu",
            memory_bytes=memory_bytes + sum(each.nbytes for each in reserves),
            reserves=reserves,
            memory_bytes_per_s=8e9 * share,
            launch_s=4e-6 / share,
            backend="cpu",
            flops_per_s={dtype: rate * share for dtype, rate in rates.items()},
            source=f"one thread of a 2024 server CPU, measured with torch matmul and copy{shared}",
            sources={
                **dict.fromkeys(("float64", "float32", *half), "torch matmul"),
                **dict.fromkeys(eight, "torch._scaled_mm, which multiplies in float32"),
                "memory_bytes": "assumed",
                "memory_bytes_per_s": "torch copy",
            },
        )
        group = NodeGroup(
            nodes=1,
            devices_per_node=num_devices,
            device=device,
            in_node=Link(
                bytes_per_s=1e9 * share,
                latency_s=1.5e-4 / share,
                source=f"Gloo over loopback, measured on such a CPU{shared}",
            ),
            host=Link(bytes_per_s=4e9 * share, latency_s=1e-5 / share, source="a copy in memory"),
            disk=Link(bytes_per_s=5e8, latency_s=1e-4, source="a SATA drive: assumed"),
            host_memory_bytes=16 << 30,
            disk_bytes=64 << 30,
            host_memory_bytes_per_s=8e9 * num_devices * share,
            host_memory_source="torch copy, a thread per process",
        )
        return check_cluster(cls(name=f"local:{num_devices}", groups=(group,)))


def check_cluster(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster itself, when it describes a machine.

    Raises:
        ClusterError: a count below 1, a rate that is not positive, a number no machine has, an unknown dtype or
            backend, groups of several backends, or several nodes without a link between them; with the path of the
            fault.
    """
    if not cluster.groups:
        raise ClusterError(f"cluster {cluster.name!r}: groups is empty; describe at least one group of nodes")
    if cluster.num_devices > MOST_DEVICES:
        raise ClusterError(f"cluster {cluster.name!r}: {cluster.num_devices} devices; there may be {MOST_DEVICES}")
    for index, group in enumerate(cluster.groups):
        at = f"groups[{index}]"
        check_positive(cluster.name, group.nodes, f"{at}.nodes")
        check_positive(cluster.name, group.devices_per_node, f"{at}.devices_per_node")
        check_device(cluster.name, group.device, f"{at}.device")
        for kind in TIERS.values():
            for field in filter(None, (kind.room, kind.rate)):
                check_not_negative(cluster.name, getattr(group, field), f"{at}.{field}")
        for name in ("in_node", "between_nodes", *TIERS):
            check_link(cluster.name, getattr(group, name), f"{at}.{name}")
    check_link(cluster.name, cluster.between_nodes, "between_nodes")
    backends = sorted({group.device.backend for group in cluster.groups})
    if len(backends) > 1:
        raise ClusterError(
            f"cluster {cluster.name!r}: groups run on {' and '.join(backends)}; one job runs on one backend: describe "
            "the devices of each backend as a cluster of its own"
        )
    for index, group in enumerate(cluster.groups):
        joined = len(cluster.groups) > 1 or (group.nodes > 1 and group.between_nodes is None)
        if joined and cluster.between_nodes is None:
            raise ClusterError(
                f"cluster {cluster.name!r}: several nodes (groups[{index}]) but no between_nodes link; add its "
                "bytes_per_s and latency_s"
            )
    return cluster
