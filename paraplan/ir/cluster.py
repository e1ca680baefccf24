"""What the machine is: devices, memories and links, by level.

A cluster is groups of equal nodes; groups may differ. Every rate is a peak from a data sheet or a
measurement, with its source; what share of it an op reaches is the cost model's business.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import yaml

from paraplan.ir.errors import ClusterError
from paraplan.ir.struct import Value, from_json, read_bytes


class Link(Value, frozen=True, kw_only=True):
    """A way bytes travel: per-device, per-direction peak bandwidth and the latency of one message."""

    bytes_per_s: float
    latency_s: float


class Device(Value, frozen=True, kw_only=True):
    """One accelerator (or CPU process).

    Attributes:
        kind: catalog name, e.g. "H100" or "cpu".
        memory_bytes: what a process may use in all.
        memory_bytes_per_s: bandwidth of the device's memory.
        flops_per_s: peak rate of matrix work per dtype; a dtype not named here is not supported.
        launch_s: time to start one kernel.
        backend: torch device type the plan runs on, "cuda" or "cpu".
        source: where the rates come from.
    """

    kind: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: dict[str, float]
    launch_s: float = 3e-6
    backend: str = "cuda"
    source: str = ""


class NodeGroup(Value, frozen=True, kw_only=True):
    """Equal nodes.

    Attributes:
        nodes: how many.
        devices_per_node: devices in each.
        device: what they are.
        in_node: link between devices of one node.
        host: link between a device and its host's memory, per device.
        disk: link between a device's host share and local disk, per device; None where there is none.
        host_memory_bytes: host memory per node usable for offload.
        disk_bytes: disk per node usable for offload.
    """

    nodes: int
    devices_per_node: int
    device: Device
    in_node: Link
    host: Link
    disk: Link | None = None
    host_memory_bytes: int = 0
    disk_bytes: int = 0


class ClusterSpec(Value, frozen=True, kw_only=True):
    """The cluster a plan is for.

    Attributes:
        name: what people call it.
        groups: groups of equal nodes; global device numbers run through them in order.
        between_nodes: link between nodes, per device; None for a single node.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    between_nodes: Link | None = None

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return sum(group.nodes * group.devices_per_node for group in self.groups)

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
        """The link of a level ("in_node", "between_nodes", "host", "disk") as a device sees it."""
        group = self.group_of(device)
        found = {"in_node": group.in_node, "between_nodes": self.between_nodes, "host": group.host, "disk": group.disk}[
            level
        ]
        if found is None:
            raise ClusterError(f"{self.name}: no {level} link is described, yet one is needed")
        return found

    @classmethod
    def local(cls, num_devices: int, memory_bytes: int = 4 << 30) -> ClusterSpec:
        """CPU processes on this machine, as many as devices.

        The rates are those of one thread of a server CPU talking over loopback; a profile replaces them.

        Raises:
            ClusterError: num_devices is below 1.
        """
        device = Device(
            kind="cpu", memory_bytes=memory_bytes, memory_bytes_per_s=8e9, launch_s=4e-6, backend="cpu",
            flops_per_s={"float64": 2.5e10, "float32": 5e10, "bfloat16": 1e10},
            source="one thread of a 2024 server CPU, measured with torch matmul and copy",
        )  # fmt: skip
        group = NodeGroup(
            nodes=1, devices_per_node=num_devices, device=device, in_node=Link(bytes_per_s=1e9, latency_s=1.5e-4),
            host=Link(bytes_per_s=4e9, latency_s=1e-5), disk=Link(bytes_per_s=5e8, latency_s=1e-4),
            host_memory_bytes=16 << 30, disk_bytes=64 << 30,
        )  # fmt: skip
        return check_cluster(cls(name=f"local:{num_devices}", groups=(group,)))


class _Yaml(yaml.SafeLoader):
    """YAML with the floats of its version 1.2: PyYAML alone reads 25e9 and 1e-5 as text."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def check_cluster(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster itself, when it describes a machine.

    Raises:
        ClusterError: a count below 1, a rate that is not positive, several nodes without a link.
    """

    def positive(value: float, where: str) -> None:
        if not value > 0 or value == float("inf"):
            raise ClusterError(f"cluster {cluster.name!r}: {where} must be a positive number, not {value}")

    if not cluster.groups:
        raise ClusterError(f"cluster {cluster.name!r}: groups is empty; describe at least one group of nodes")
    for index, group in enumerate(cluster.groups):
        at = f"groups[{index}]"
        positive(group.nodes, f"{at}.nodes")
        positive(group.devices_per_node, f"{at}.devices_per_node")
        positive(group.device.memory_bytes, f"{at}.device.memory_bytes")
        positive(group.device.memory_bytes_per_s, f"{at}.device.memory_bytes_per_s")
        if not group.device.flops_per_s:
            raise ClusterError(f"cluster {cluster.name!r}: {at}.device.flops_per_s names no dtype")
        for dtype, rate in group.device.flops_per_s.items():
            positive(rate, f"{at}.device.flops_per_s.{dtype}")
        if group.device.launch_s < 0 or group.host_memory_bytes < 0 or group.disk_bytes < 0:
            raise ClusterError(
                f"cluster {cluster.name!r}: {at} has a negative launch_s, host_memory_bytes or disk_bytes"
            )
        for name, link in (("in_node", group.in_node), ("host", group.host), ("disk", group.disk)):
            if link is not None:
                positive(link.bytes_per_s, f"{at}.{name}.bytes_per_s")
                if link.latency_s < 0:
                    raise ClusterError(
                        f"cluster {cluster.name!r}: {at}.{name}.latency_s is negative ({link.latency_s})"
                    )
    if cluster.between_nodes is not None:
        positive(cluster.between_nodes.bytes_per_s, "between_nodes.bytes_per_s")
    if sum(group.nodes for group in cluster.groups) > 1 and cluster.between_nodes is None:
        raise ClusterError(
            f"cluster {cluster.name!r}: several nodes but no between_nodes link; add its bytes_per_s and latency_s"
        )
    return cluster


def read_cluster(path: str | Path) -> ClusterSpec:
    """A cluster from a YAML or JSON file, decoded strictly.

    Raises:
        ClusterError: unreadable, malformed, an unknown key or a wrong value, with its place.
    """
    data = read_bytes(path, "cluster file", ClusterError)
    if str(path).endswith(".json"):
        return check_cluster(from_json(data, ClusterSpec, str(path), ClusterError))
    try:
        return check_cluster(msgspec.convert(yaml.load(data, Loader=_Yaml), ClusterSpec))
    except (yaml.YAMLError, msgspec.ValidationError, UnicodeDecodeError) as fault:
        raise ClusterError(f"{path}: {fault}") from None
