"""Reader of Piper's instances (github.com/msr-fiddle/piper), one JSON file a model.

    maxDevices, maxMemoryPerDevice [bytes], bandwidth [bytes/s], mbsInBatch
    nodes[]: id, TMPCs {tensor degree: variants [{id, timePerSample, parameterSize, memoryUsageA, memoryUsageB,
             syncTimeFw {source: bytes}, syncTimeBw {target: bytes}}]}
    edges[]: sourceId, destId, communicationCost [bytes]

The problem is that of `planner/partition/hybrid_problem.py`; `rescored` is written from the format alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paraplan.planner.partition.hybrid_problem import Floats, HybridProblem, HybridStage, TensorDegree
from paraplan.planner.partition.ideals import topological_order


@dataclass(frozen=True)
class PiperInstance:
    """A file, and the limits it is solved under.

    Attributes:
        nodes: of the file, by id.
        edges: (source, target, bytes) of the file.
    """

    name: str
    nodes: dict[int, dict[str, Any]]
    edges: tuple[tuple[int, int, float], ...]
    devices: int
    memory_bytes: float
    bytes_per_s: float
    microbatches: int

    def limited(self, devices: int, memory_bytes: float, bytes_per_s: float) -> PiperInstance:
        """The same model on another machine."""
        return replace(self, devices=devices, memory_bytes=memory_bytes, bytes_per_s=bytes_per_s)


def read_folder(folder: Path) -> list[PiperInstance]:
    """Every instance of a folder, by name.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file is no such instance.
    """
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        raise FileNotFoundError(f"{folder} holds no *.json instances of Piper's")
    return [read(path) for path in paths]


def read(path: Path) -> PiperInstance:
    """One instance.

    Raises:
        ValueError: the file is no such instance.
    """
    try:
        data = json.loads(path.read_text())
        nodes = {int(node["id"]): node for node in data["nodes"]}
        edges: dict[tuple[int, int], float] = {}
        for edge in data["edges"]:
            ends = int(edge["sourceId"]), int(edge["destId"])
            edges[ends] = edges.get(ends, 0.0) + float(edge["communicationCost"])
        instance = PiperInstance(
            path.stem,
            nodes,
            tuple((*ends, cost) for ends, cost in edges.items()),
            int(data["maxDevices"]),
            float(data["maxMemoryPerDevice"]),
            float(data["bandwidth"]),
            int(data["mbsInBatch"]),
        )
        if len(nodes) < len(data["nodes"]):
            raise ValueError("two nodes have one id")
        problem_of(instance)
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise ValueError(f"{path} is no instance of Piper's: {type(fault).__name__}: {fault}") from fault
    return instance


def problem_of(instance: PiperInstance) -> HybridProblem:
    """The problem for the partition into stages; nodes are numbered in the file's order.

    Raises:
        ValueError: there is no node, an edge names one that is not there, or there is a cycle.
    """
    number = {node: place for place, node in enumerate(instance.nodes)}
    for source, target, _ in instance.edges:
        if source not in number or target not in number:
            raise ValueError(f"edge {source} → {target} names a node that is not there")
    edges = tuple((number[source], number[target]) for source, target, _ in instance.edges)
    topological_order(len(number), edges)
    degrees = sorted({int(degree) for node in instance.nodes.values() for degree in node["TMPCs"]})
    if not degrees:
        raise ValueError("no node has a variant")
    return HybridProblem(
        len(number),
        edges,
        tuple(_degree(instance, edges, degree) for degree in degrees),
        instance.devices,
        instance.memory_bytes,
        instance.bytes_per_s,
        instance.microbatches,
    )


def _degree(instance: PiperInstance, edges: Sequence[tuple[int, int]], degree: int) -> TensorDegree:
    variants = [node["TMPCs"].get(str(degree), []) for node in instance.nodes.values()]
    most = max(map(len, variants))

    def table(key: str, missing: float) -> Floats:
        rows = [[float(each[key]) for each in options] + [missing] * (most - len(options)) for options in variants]
        return np.array(rows)

    def moved(sync: str, end: int) -> Floats:
        found = np.zeros((len(edges), most))
        for place, (ends, (source, target, cost)) in enumerate(zip(edges, instance.edges, strict=True)):
            other = str(target if end == 0 else source)
            for index, each in enumerate(variants[ends[end]]):
                found[place, index] = cost + float(each.get(sync, {}).get(other, 0.0))
        return found

    return TensorDegree(
        degree,
        table("timePerSample", math.inf),
        table("parameterSize", 0.0),
        table("memoryUsageA", 0.0),
        table("memoryUsageB", 0.0),
        moved("syncTimeFw", 1),
        moved("syncTimeBw", 0),
    )


def rescored(instance: PiperInstance, stages: Sequence[HybridStage]) -> float:
    """The time of the slowest stage, by the formula of the format alone.

    Args:
        stages: in order; nodes by number, that is by their place in the file.
    Raises:
        ValueError: the answer is illegal.
    """
    names = list(instance.nodes)
    where = {names[node]: index for index, stage in enumerate(stages) for node in stage.nodes}
    if sorted(where) != sorted(names) or sum(len(stage.nodes) for stage in stages) != len(names):
        raise ValueError("the stages are no partition of the nodes")
    if any(where[source] > where[target] for source, target, _ in instance.edges):
        raise ValueError("an edge goes from a later stage to an earlier one")
    if sum(stage.data_degree * stage.tensor_degree for stage in stages) > instance.devices:
        raise ValueError(f"the stages take more than {instance.devices} devices")
    if sum(stage.data_degree for stage in stages) > instance.microbatches:
        raise ValueError(f"the data degrees sum up to more than {instance.microbatches}")
    return max(_stage_s(instance, stages, index, where) for index in range(len(stages)))


def _stage_s(instance: PiperInstance, stages: Sequence[HybridStage], index: int, where: dict[int, int]) -> float:
    stage, names = stages[index], list(instance.nodes)
    d = stage.data_degree
    if instance.microbatches % d:
        raise ValueError(f"stage {index}: {d} does not divide {instance.microbatches} microbatches")
    in_flight = math.ceil(sum(each.data_degree for each in stages[index:]) / d)
    seconds = memory = moved = synced = 0.0
    chosen = {}
    for node, variant in zip(stage.nodes, stage.variants, strict=True):
        each = instance.nodes[names[node]]["TMPCs"][str(stage.tensor_degree)][variant]
        chosen[names[node]] = each
        seconds += each["timePerSample"] / d
        memory += each["memoryUsageA"] * in_flight + each["memoryUsageB"]
        synced += 4 * (d - 1) / d * each["parameterSize"] / instance.microbatches
    for source, target, cost in instance.edges:
        if where[source] == index and where[target] != index:
            moved += cost + chosen[source].get("syncTimeBw", {}).get(str(target), 0.0)
        if where[target] == index and where[source] != index:
            moved += cost + chosen[target].get("syncTimeFw", {}).get(str(source), 0.0)
    if memory > instance.memory_bytes:
        raise ValueError(f"stage {index} holds {memory:.0f} bytes, more than {instance.memory_bytes:.0f}")
    return float(seconds + (2 * moved / d + synced) / instance.bytes_per_s)
