"""Reader of Checkmate's training graphs (networkx node-link JSON, one file a graph).

Nodes carry `cost_cpu` (time, in a unit of the graph's own) and `cost_ram` (bytes of the result), or `duration` and
`out_cost`; `backward` marks the backward. Links are source → target by node id, `source`/`target` or "0"/"1". Every
node is an op with one result; results that nobody reads are kept. Ops come in the order the graph's head names (random
graphs do), else in the file's where that runs, else in the nearest that does.
"""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor, verify_problem


def read_folder(folder: Path) -> dict[str, MemoryProblem]:
    """The graphs of a folder, by name.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file is no such graph.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"no Checkmate graphs (*.json) in {folder}")
    return {file.stem: read_graph(file) for file in files}


def read_graph(file: Path) -> MemoryProblem:
    """One graph; seconds are its own unit.

    Raises:
        ValueError: it is no such graph.
    """
    try:
        data = json.loads(file.read_text())
        nodes = data["nodes"]
        names = [node.get("id", node["name"]) for node in nodes]
        index = {name: place for place, name in enumerate(names)}
        links = [(index[_end(link, "source", "0")], index[_end(link, "target", "1")]) for link in data["links"]]
        costs = [_costs(node) for node in nodes]
    except (KeyError, json.JSONDecodeError) as fault:
        raise ValueError(f"{file}: not a Checkmate graph ({fault})") from None
    named = data.get("graph", {}).get("order")
    order = [index[name] for name in named] if named else _order(len(nodes), links)
    place = {node: position for position, node in enumerate(order)}
    reads: list[set[int]] = [set() for _ in nodes]
    for source, target in links:
        reads[place[target]].add(place[source])
    read = {tensor for inputs in reads for tensor in inputs}
    ops, tensors = [], []
    for position, node in enumerate(order):
        time_s, nbytes = costs[node]
        inputs = tuple(sorted(reads[position]))
        backward = bool(nodes[node].get("backward", False))
        ops.append(MemOp(str(nodes[node]["name"]), time_s, inputs, (position,), backward=backward))
        tensors.append(MemTensor(nbytes, position, kept=position not in read))
    problem = MemoryProblem(tuple(ops), tuple(tensors))
    verify_problem(problem)
    return problem


def _end(link: dict[str, Any], *names: str) -> Any:
    return next(link[name] for name in names if name in link)


def _costs(node: dict[str, Any]) -> tuple[float, int]:
    if "cost_cpu" in node:
        return float(node["cost_cpu"]), int(node["cost_ram"])
    return float(node["duration"]), int(node["out_cost"])


def _order(count: int, links: list[tuple[int, int]]) -> list[int]:
    """Of nodes whose sources are there, the first in the file comes first."""
    waiting, after = [0] * count, [[] for _ in range(count)]
    for source, target in links:
        waiting[target] += 1
        after[source].append(target)
    ready = [node for node in range(count) if not waiting[node]]
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for target in after[node]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, target)
    if len(order) < count:
        raise ValueError(f"the graph has a cycle among {count - len(order)} nodes")
    return order
