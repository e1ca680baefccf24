"""Reader of dnn-partitioning's instances (github.com/msr-fiddle/dnn-partitioning), one JSON file a graph.

    maxFPGAs (accelerators), maxCPUs, maxSizePerFPGA [bytes]
    nodes[]: id, supportedOnFpga, cpuLatency and fpgaLatency [ms], isBackwardNode, colorClass (optional), size [bytes]
    edges[]: sourceId, destId, cost [ms to send or receive the source's result]

Nodes of a colour class are on one device. A CPU's load is Σ cpuLatency, an accelerator's Σ fpgaLatency plus, for each
distinct node with an edge into or out of it, that node's cost. *Contiguous*: devices are in an order along which the
edges between forward nodes go; backward nodes follow by colour class, and classes without a forward node are in the
order opposite to their edges with other backward nodes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import numpy as np

from paraplan.planner.partition.device_loads import LoadProblem, Net


@dataclass(frozen=True)
class GraphNode:
    """A node of a file."""

    accelerated: bool
    cpu_ms: float
    accelerator_ms: float
    backward: bool
    group: int
    size_bytes: float


@dataclass(frozen=True)
class DeviceInstance:
    """A file; groups number the colour classes, nodes without one being classes of their own."""

    name: str
    nodes: dict[int, GraphNode]
    edges: tuple[tuple[int, int], ...]
    send_ms: dict[int, float]
    accelerators: int
    cpus: int
    max_size_bytes: float


def read_folder(folder: Path) -> list[DeviceInstance]:
    """Every instance of a folder and the folders in it, by path.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file is no such instance.
    """
    paths = sorted(folder.rglob("*.json")) if folder.is_dir() else []
    if not paths:
        raise FileNotFoundError(f"{folder} holds no *.json instances of dnn-partitioning's")
    return [read(path, path.relative_to(folder).with_suffix("").as_posix()) for path in paths]


def read(path: Path, name: str | None = None) -> DeviceInstance:
    """One instance.

    Raises:
        ValueError: the file is no such instance.
    """
    try:
        data = json.loads(path.read_text())
        classes: dict[object, int] = {}
        nodes = {}
        for node in data["nodes"]:
            colour = node.get("colorClass")
            key = ("own", node["id"]) if colour is None else ("class", colour)
            group = classes.setdefault(key, len(classes))
            nodes[int(node["id"])] = GraphNode(
                bool(node["supportedOnFpga"]),
                float(node["cpuLatency"]),
                float(node["fpgaLatency"]),
                bool(node.get("isBackwardNode", False)),
                group,
                float(node.get("size", 0.0)),
            )
        send_ms: dict[int, float] = {}
        edges = {}
        for edge in data["edges"]:
            ends = int(edge["sourceId"]), int(edge["destId"])
            if not (ends[0] in nodes and ends[1] in nodes):
                raise ValueError(f"edge {ends[0]} → {ends[1]} names a node that is not there")
            edges[ends] = None
            send_ms[ends[0]] = max(send_ms.get(ends[0], 0.0), float(edge["cost"]))
        limits = int(data["maxFPGAs"]), int(data["maxCPUs"]), float(data["maxSizePerFPGA"])
        if len(nodes) < len(data["nodes"]) or not nodes:
            raise ValueError("two nodes have one id" if nodes else "there is no node")
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise ValueError(f"{path} is no dnn-partitioning instance: {type(fault).__name__}: {fault}") from fault
    return DeviceInstance(name or path.stem, nodes, tuple(edges), send_ms, *limits)


def problem_of(instance: DeviceInstance) -> LoadProblem:
    """The problem of placing colour classes."""
    count = 1 + max(node.group for node in instance.nodes.values())
    times, cpu, sizes = np.zeros(count), np.zeros(count), np.zeros(count)
    for node in instance.nodes.values():
        times[node.group] += node.accelerator_ms if node.accelerated else np.inf
        cpu[node.group] += node.cpu_ms
        sizes[node.group] += node.size_bytes
    touched: dict[int, set[int]] = defaultdict(set)
    for source, target in instance.edges:
        touched[source] |= {instance.nodes[source].group, instance.nodes[target].group}
    nets = tuple(Net(tuple(sorted(groups)), instance.send_ms[source]) for source, groups in touched.items())
    return LoadProblem(
        times,
        cpu,
        sizes,
        nets,
        tuple(forward_edges(instance)),
        instance.accelerators,
        instance.cpus,
        instance.max_size_bytes,
    )


def forward_edges(instance: DeviceInstance) -> list[tuple[int, int]]:
    """What contiguous placements keep to, between groups: see the module's head."""
    nodes = instance.nodes
    forward = {node.group for node in nodes.values() if not node.backward}
    found: dict[tuple[int, int], None] = {}
    for source, target in instance.edges:
        a, b = nodes[source], nodes[target]
        if not a.backward and not b.backward:
            found[a.group, b.group] = None
        elif a.backward and b.backward and not (a.group in forward and b.group in forward):
            found[b.group, a.group] = None
    return [(a, b) for a, b in found if a != b]


def rescored(instance: DeviceInstance, device_of: Mapping[int, int], contiguous: bool) -> float:
    """The largest load in ms, by the formula of the format alone.

    Args:
        device_of: of every node by id; accelerators are numbered before CPUs.
        contiguous: whether the placement has to be.
    Raises:
        ValueError: the placement is illegal.
    """
    accelerators, devices = instance.accelerators, instance.accelerators + instance.cpus
    loads, sizes, colours = [0.0] * devices, [0.0] * devices, {}
    for name, node in instance.nodes.items():
        device = device_of.get(name, -1)
        if not 0 <= device < devices:
            raise ValueError(f"node {name} is on no device there is")
        if colours.setdefault(node.group, device) != device:
            raise ValueError(f"node {name} is apart from others of its colour class")
        if device < accelerators and not node.accelerated:
            raise ValueError(f"node {name} cannot be on an accelerator")
        loads[device] += node.accelerator_ms if device < accelerators else node.cpu_ms
        sizes[device] += node.size_bytes
    if max(sizes[:accelerators], default=0.0) > instance.max_size_bytes:
        raise ValueError(f"an accelerator holds {max(sizes[:accelerators])} bytes")
    crossing: list[set[int]] = [set() for _ in range(devices)]
    for source, target in instance.edges:
        if device_of[source] != device_of[target]:
            crossing[device_of[source]].add(source)
            crossing[device_of[target]].add(source)
    if contiguous:
        order = nx.DiGraph((colours[a], colours[b]) for a, b in forward_edges(instance) if colours[a] != colours[b])
        if not nx.is_directed_acyclic_graph(order):
            raise ValueError("the devices are in no order along which forward edges go")
    for device in range(accelerators):
        loads[device] += sum(instance.send_ms[source] for source in crossing[device])
    return max(loads)
