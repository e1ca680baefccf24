"""Checkmate's training graphs and random layered graphs, as networkx node-link JSON.

A node is an op with one result: what it costs to execute ("cost_cpu" or "duration") and the bytes of its result
("cost_ram" or "out_cost"). Nodes come in the order of execution; the published order of a random graph is in its head.
Source: Jain et al. 2020; the files are those of Moccasin (Bartan et al. 2023).
"""

from __future__ import annotations

import json
from pathlib import Path

from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor, verify_problem


def read_graph(path: Path) -> MemoryProblem:
    """One file.

    Raises:
        FileNotFoundError: there is none.
    """
    data = json.loads(path.read_text())
    nodes = {node.get("id", node["name"]): node for node in data["nodes"]}
    names = data["graph"].get("order", list(nodes))
    place = {name: index for index, name in enumerate(names)}
    reads: list[list[int]] = [[] for _ in names]
    for link in data.get("links") or data["edges"]:
        source, target = (link["source"], link["target"]) if "source" in link else (link["0"], link["1"])
        reads[place[target]].append(place[source])
    ops, tensors = [], []
    for index, node in enumerate(nodes[name] for name in names):
        cost = float(node["cost_cpu"] if "cost_cpu" in node else node["duration"])
        size = int(node["cost_ram"] if "cost_ram" in node else node["out_cost"])
        ops.append(MemOp(str(node["name"]), cost, tuple(sorted(set(reads[index]))), (index,),
                         backward=bool(node.get("backward", False))))  # fmt: skip
        tensors.append(MemTensor(size, index))
    problem = MemoryProblem(tuple(ops), tuple(tensors))
    verify_problem(problem)
    return problem


def read_folder(folder: Path) -> dict[str, MemoryProblem]:
    """Every graph of a folder, by file name.

    Raises:
        FileNotFoundError: the folder has none.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no *.json: expected Checkmate graphs in node-link form")
    return {path.stem: read_graph(path) for path in paths}
