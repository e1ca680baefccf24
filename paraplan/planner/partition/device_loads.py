"""Groups of nodes on accelerators and CPUs, and what loads the devices (the max-load problem of dnn-partitioning).

    load of a CPU          Σ cpu_time of its groups
    load of an accelerator Σ accelerator_time of its groups + Σ cost of the nets it has some, not all, groups of

A net is a result with all groups that make or read it: a device that makes it pays to send it, one that reads it pays
to receive it, each once. Sizes of an accelerator's groups sum up to a limit at most. Minimise the largest load.
*Ordered* placements have devices in an order that no edge goes against, hence what a device has is convex.
Source: Tarnawski et al. 2020, sections 3 and 5.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Net:
    """A result: the groups that make or read it, and what it costs a device to send or to receive it."""

    groups: tuple[int, ...]
    cost: float


@dataclass(frozen=True)
class LoadProblem:
    """Groups are numbered.

    Attributes:
        accelerator_time: [group]; infinite where it runs on CPUs alone.
        cpu_time: [group].
        size: [group].
        nets: of two groups or more.
        edges: between groups, for ordered placements.
    """

    accelerator_time: Floats
    cpu_time: Floats
    size: Floats
    nets: tuple[Net, ...]
    edges: tuple[tuple[int, int], ...]
    accelerators: int
    cpus: int
    max_size: float

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return len(self.accelerator_time)


@dataclass(frozen=True)
class DevicePlacement:
    """A device for each group, accelerators numbered first; None where, proved, there is none.

    Attributes:
        load: the largest; infinite where there is none.
        bound: a proved lower bound on it.
    """

    devices: tuple[int, ...] | None
    load: float
    bound: float


def device_loads(problem: LoadProblem, devices: Sequence[int]) -> Floats:
    """[device] loads, infinite where groups do not fit."""
    placed = np.asarray(devices)
    loads = np.zeros(problem.accelerators + problem.cpus)
    for device in range(len(loads)):
        here = placed == device
        if device >= problem.accelerators:
            loads[device] = problem.cpu_time[here].sum()
            continue
        fits = problem.size[here].sum() <= problem.max_size
        loads[device] = problem.accelerator_time[here].sum() if fits else np.inf
    for net in problem.nets:
        touched = set(placed[list(net.groups)].tolist())
        if len(touched) > 1:
            for device in touched:
                if device < problem.accelerators:
                    loads[device] += net.cost
    return loads


def contracted(problem: LoadProblem, ordered: bool) -> tuple[LoadProblem, list[int]]:
    """The problem with groups merged that some best placement has together, and each group's new one.

    Where placements are ordered, groups on a cycle of edges are merged. A group that takes no time is merged with one
    that is in all of its nets (so that it loads no device that this one does not load anyway) and, where placements are
    ordered, the only one it has edges with, unless sizes might bind.
    """
    whole = nx.DiGraph()
    whole.add_nodes_from(range(problem.num_groups))
    merged = list(range(problem.num_groups))
    if ordered:
        whole.add_edges_from(problem.edges)
        for number, component in enumerate(nx.strongly_connected_components(whole)):
            for group in component:
                merged[group] = number
    smaller = _merged(problem, merged)
    while True:
        step = _idle_leaves(smaller, ordered)
        if step == list(range(smaller.num_groups)):
            return smaller, merged
        smaller = _merged(smaller, step)
        merged = [step[group] for group in merged]


def _idle_leaves(problem: LoadProblem, ordered: bool) -> list[int]:
    """Each group's new number once idle leaves are merged into their neighbours."""
    shared: list[set[int] | None] = [None] * problem.num_groups  # with what it shares each of its nets, or its one edge
    for net in problem.nets:
        for group in net.groups:
            before = shared[group]
            shared[group] = set(net.groups) if before is None else before & set(net.groups)
    beside: dict[int, set[int]] = defaultdict(set)
    for source, target in problem.edges if ordered else ():
        beside[source].add(target)
        beside[target].add(source)
    roomy = problem.size.sum() <= problem.max_size
    into = list(range(problem.num_groups))
    for group in range(problem.num_groups):
        idle = problem.accelerator_time[group] == 0 and problem.cpu_time[group] == 0
        if not idle or not (roomy or problem.size[group] == 0) or group in into[:group] or len(beside[group]) > 1:
            continue
        nets = shared[group]
        others = set(range(problem.num_groups)) if nets is None else nets
        others = (others & beside[group] if beside[group] else others) - {group}
        other = next((other for other in sorted(others) if into[other] == other), None)
        if other is not None:
            into[group] = other
    numbers = {group: number for number, group in enumerate(sorted(set(into)))}
    return [numbers[group] for group in into]


def _merged(problem: LoadProblem, group_of: Sequence[int]) -> LoadProblem:
    count = max(group_of, default=-1) + 1
    costs: dict[tuple[int, ...], float] = defaultdict(float)
    for net in problem.nets:
        groups = tuple(sorted({group_of[group] for group in net.groups}))
        if len(groups) > 1 and net.cost > 0:
            costs[groups] += net.cost
    edges = {(group_of[a], group_of[b]): None for a, b in problem.edges if group_of[a] != group_of[b]}

    def summed(values: Floats) -> Floats:
        total = np.zeros(count)
        np.add.at(total, np.asarray(group_of, dtype=np.int64), values)
        return total

    return LoadProblem(
        summed(problem.accelerator_time),
        summed(problem.cpu_time),
        summed(problem.size),
        tuple(Net(groups, cost) for groups, cost in costs.items()),
        tuple(edges),
        problem.accelerators,
        problem.cpus,
        problem.max_size,
    )
