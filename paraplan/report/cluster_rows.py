"""A cluster and the catalog as rows of text: what a device can do, what joins devices, and who says so."""

from __future__ import annotations

from collections.abc import Iterator

from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.machine.device_catalog import CATALOG
from paraplan.ir.machine.cluster import ClusterSpec, NodeGroup
from paraplan.ir.machine.device import Link
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.tensor import INTEGERS
from paraplan.ir.struct import Value
from paraplan.report.units import show_bytes, show_seconds

__all__ = ["CatalogRow", "ClusterTables", "catalog_rows", "cluster_tables", "parse_cluster"]

Row = tuple[str, ...]


class CatalogRow(Value, frozen=True, kw_only=True):
    """A device of the catalog.

    Attributes:
        name: as clusters are named by.
        memory_bytes, memory_bytes_per_s, flops_per_s: as in `ir.machine.cluster.Device`.
        in_node_bytes_per_s, between_nodes_bytes_per_s: of the node it usually sits in, per device and direction.
        source: the data sheet.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: dict[str, float]
    in_node_bytes_per_s: float
    between_nodes_bytes_per_s: float
    source: str


class ClusterTables(Value, frozen=True, kw_only=True):
    """A cluster for people.

    Attributes:
        title: its name and size.
        groups: per group, its heading; (quantity, value, source) of its device; and of its links
            (level, bandwidth, latency, source).
        network: rows of the link between groups, like those of links; empty where there is one group.
        total: (quantity, value) of all devices together.
    """

    title: str
    groups: tuple[tuple[str, tuple[Row, ...], tuple[Row, ...]], ...]
    network: tuple[Row, ...]
    total: tuple[Row, ...]


def catalog_rows() -> tuple[CatalogRow, ...]:
    """Every device of the catalog, in its order."""
    return tuple(
        CatalogRow(
            name=name,
            memory_bytes=entry.device.memory_bytes,
            memory_bytes_per_s=entry.device.memory_bytes_per_s,
            flops_per_s=entry.device.flops_per_s,
            in_node_bytes_per_s=entry.in_node.bytes_per_s,
            between_nodes_bytes_per_s=entry.between_nodes.bytes_per_s,
            source=entry.device.source,
        )
        for name, entry in CATALOG.items()
    )


def cluster_tables(cluster: ClusterSpec) -> ClusterTables:
    """What `paraplan cluster show` prints."""
    nodes = sum(group.nodes for group in cluster.groups)
    several = len(cluster.groups) > 1
    shared = cluster.between_nodes if nodes > 1 else None
    return ClusterTables(
        title=f"{cluster.name}: {_count(cluster.num_devices, 'device')} on {_count(nodes, 'node')}",
        groups=tuple(
            (_heading(group), tuple(_device_rows(group)), tuple(_link_rows(group, None if several else shared)))
            for group in cluster.groups
        ),
        network=(_link_row("between groups", shared),) if several and shared is not None else (),
        total=tuple(_total(cluster)),
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _heading(group: NodeGroup) -> str:
    return f"{_count(group.nodes, 'node')} of {group.devices_per_node} x {group.device.kind}"


def _device_rows(group: NodeGroup) -> Iterator[Row]:
    device = group.device
    yield "source", "", device.source
    yield "memory", show_bytes(device.memory_bytes), device.sources.get("memory_bytes", "")
    for each in device.reserves:
        yield f"of it: {each.what}", show_bytes(each.nbytes), f"{'between devices; ' * each.joined}{each.source}"
    yield "memory bandwidth", show_rate(device.memory_bytes_per_s), device.sources.get("memory_bytes_per_s", "")
    for dtype, rate in device.flops_per_s.items():
        yield dtype, show_flops(rate, dtype), device.sources.get(dtype, "")
    yield "kernel start", show_seconds(device.launch_s), ""
    if device.issue_s:
        yield "kernel issue", show_seconds(device.issue_s), "by the host"
    for name, kind in TIERS.items():
        if group.room_bytes(name):
            yield kind.label, show_bytes(group.room_bytes(name)), "per node, for offloading"
        if group.update_bytes_per_s(name):
            yield f"{kind.label} bandwidth", show_rate(group.update_bytes_per_s(name)), getattr(group, kind.source)


def _link_rows(group: NodeGroup, shared: Link | None) -> Iterator[Row]:
    between = group.between_nodes or shared
    levels = (("in node", group.in_node), ("between nodes", between), *((tier, getattr(group, tier)) for tier in TIERS))
    for level, link in levels:
        if link is not None:
            yield _link_row(level, link)


def _link_row(level: str, link: Link) -> Row:
    return level, show_rate(link.bytes_per_s), show_seconds(link.latency_s), link.source


def _total(cluster: ClusterSpec) -> Iterator[Row]:
    sizes = [(group.nodes * group.devices_per_node, group.device) for group in cluster.groups]
    yield "devices", str(cluster.num_devices)
    yield "memory", show_bytes(sum(count * device.memory_bytes for count, device in sizes))
    for dtype in dict.fromkeys(dtype for _, device in sizes for dtype in device.flops_per_s):
        rates = [count * device.flops_per_s[dtype] for count, device in sizes if dtype in device.flops_per_s]
        some = "" if len(rates) == len(sizes) else " (where a device has it)"
        yield dtype, show_flops(sum(rates), dtype) + some


def show_rate(bytes_per_s: float) -> str:
    """`3.35e12` as "3350 GB/s"; data sheets count in powers of ten."""
    return f"{bytes_per_s / 1e9:.4g} GB/s"


def show_flops(per_s: float, dtype: str) -> str:
    """`989.4e12` as "989.4 TFLOP/s"; integers have TOP/s."""
    unit = "OP/s" if dtype in INTEGERS else "FLOP/s"
    prefix, size = ("P", 1e15) if per_s >= 1e16 else ("T", 1e12) if per_s >= 1e12 else ("G", 1e9)
    return f"{per_s / size:.4g} {prefix}{unit}"
