"""Free placements by simulated annealing, many chains at a time (see `device_loads.py`).

All chains propose to move the same groups, each chain to a device of its own choice, so that a step is a few array
operations over chains. What is moved is one group, or a connected few that a chain has on one device. Energy is the
p-norm of loads, p growing as the temperature falls, with sizes above the limit charged. A heuristic: what it finds is a
placement, never a proof.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from paraplan.planner.partition.device_loads import Floats, LoadProblem
from paraplan.planner.partition.ideals import some_orders

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class CoolingSchedule:
    """How the search cools.

    Attributes:
        hot, cold: first and last temperature, as shares of the average load.
        soft, hard: first and last p of the norm.
    """

    hot: float = 0.02
    cold: float = 2e-4
    soft: float = 12.0
    hard: float = 60.0


class Annealer:
    """Chains of placements of one problem."""

    def __init__(self, problem: LoadProblem, starts: Sequence[Sequence[int]], chains: int, seed: int = 0) -> None:
        self.problem, self.random = problem, np.random.default_rng(seed)
        self.devices = problem.accelerators + problem.cpus
        barred = np.isinf(problem.accelerator_time)
        most = float(problem.cpu_time.sum() + problem.accelerator_time[~barred].sum()) + 1.0
        accelerator = np.where(barred, 1e3 * most, problem.accelerator_time)
        self.time = np.concatenate(
            [np.tile(accelerator, (problem.accelerators, 1)), np.tile(problem.cpu_time, (problem.cpus, 1))]
        )
        self.pays = np.arange(self.devices) < problem.accelerators
        self.cost = np.array([net.cost for net in problem.nets])
        self.pins = np.array([len(net.groups) for net in problem.nets])
        nets_of: list[list[int]] = [[] for _ in range(problem.num_groups)]
        for index, net in enumerate(problem.nets):
            for group in net.groups:
                nets_of[group].append(index)
        self.nets_of = [np.array(nets, dtype=np.int64) for nets in nets_of]
        self.beside = [
            sorted({other for net in nets for other in problem.nets[net].groups} - {group})
            for group, nets in enumerate(nets_of)
        ]
        self.order = _runs(problem)
        self.place = {group: place for place, group in enumerate(self.order)}
        self.longest = max(len(self.order) // 12, 3)
        self.roomy = problem.size.sum() <= problem.max_size
        self.overfull = 10 * most / max(problem.max_size, 1e-30)
        self.placed = np.array([starts[chain % len(starts)] for chain in range(chains)], dtype=np.int64)
        self.rows = np.arange(chains)
        self._count()
        self.best, self.best_load = list(starts[0]), np.inf
        self._remember()

    def _count(self) -> None:
        """Net counts, loads and sizes afresh."""
        chains, problem = len(self.placed), self.problem
        self.counts = np.zeros((len(self.cost), self.devices, chains), dtype=np.int16)
        for group, nets in enumerate(self.nets_of):
            np.add.at(self.counts, (nets[:, None], self.placed[:, group], self.rows), 1)
        self.loads, self.sizes = np.zeros((self.devices, chains)), np.zeros((self.devices, chains))
        for group in range(problem.num_groups):
            device = self.placed[:, group]
            self.loads[device, self.rows] += self.time[device, group]
            self.sizes[device, self.rows] += problem.size[group]
        cut = (self.counts > 0) & (self.counts < self.pins[:, None, None])
        self.loads += self.pays[:, None] * np.einsum("n,ndc->dc", self.cost, cut)

    def run(self, steps: int, schedule: CoolingSchedule, target: float, deadline: float) -> float:
        """Cool once in so many steps, ending early at a target or a deadline; the best load of all chains so far.

        Args:
            steps: until it is cold.
            schedule: of heat and of the power that loads are compared in.
            target: load that is good enough.
            deadline: `time.perf_counter()` at which to stop.
        """
        average = max(float(self.loads[self.pays].mean()), 1e-30) if self.pays.any() else 1.0
        for step in range(steps):
            if step % 32 == 0:
                if self.best_load <= target or time.perf_counter() > deadline:
                    break
                done = step / steps
                heat = average * schedule.hot * (schedule.cold / schedule.hot) ** done
                self.power = schedule.soft * (schedule.hard / schedule.soft) ** done
                if step % 1024 == 0:
                    self._count()  # sums of differences drift
                self.energy = self._energies(self.loads, self.sizes)
                self._remember()
            self._step(heat)
        self._count()
        self._remember()
        return self.best_load

    def _overfull(self, sizes: Floats) -> Floats:
        if self.roomy:
            return np.zeros(sizes.shape[-1])
        over = np.maximum(sizes - self.problem.max_size, 0.0) * self.pays[:, None]
        return np.asarray(self.overfull * over.sum(axis=0))

    def _energies(self, loads: Floats, sizes: Floats) -> Floats:
        largest = loads.max(axis=0)
        norm = largest * ((np.maximum(loads, 0.0) / np.maximum(largest, 1e-300)) ** self.power).sum(axis=0) ** (
            1 / self.power
        )
        return np.asarray(norm + self._overfull(sizes))

    def _remember(self) -> None:
        worst = self.loads.max(axis=0)
        legal = np.ones(len(worst), bool) if self.roomy else (self._overfull(self.sizes) == 0)
        worst = np.where(legal, worst, np.inf)
        chain = int(worst.argmin())
        if worst[chain] < self.best_load * (1 - 1e-12):
            self.best_load, self.best = float(worst[chain]), self.placed[chain].tolist()

    def _proposed(self) -> list[int]:
        """One group, or a connected few."""
        group = int(self.random.integers(self.problem.num_groups))
        kind = self.random.random()
        if kind < 0.3 or not self.beside[group]:
            return [group]
        if kind < 0.6:
            place = self.place[group]
            return self.order[place : place + int(self.random.integers(2, 2 + self.longest))]
        chosen, wanted = [group], int(self.random.integers(2, 7))
        while len(chosen) < wanted:
            around = self.beside[chosen[int(self.random.integers(len(chosen)))]]
            chosen.append(around[int(self.random.integers(len(around)))])
        return list(dict.fromkeys(chosen))

    def _step(self, heat: float) -> None:
        groups = self._proposed()
        source = self.placed[:, groups[0]].copy()
        target = (source + self.random.integers(1, max(self.devices, 2), len(source))) % self.devices
        if self.random.random() < 0.5:  # to where something beside it is
            around = self.beside[groups[-1]] or groups
            other = self.placed[:, around[int(self.random.integers(len(around)))]]
            target = np.where(other == source, target, other)
        loads, sizes = self.loads.copy(), self.sizes.copy()
        undo = []
        for group in groups:
            moving = self.rows[self.placed[:, group] == source]
            undo.append((group, moving))
            self._move(group, moving, source[moving], target[moving], loads, sizes)
        energy = self._energies(loads, sizes)
        worse = (energy - self.energy) / heat
        refused = self.random.random(len(worse)) >= np.exp(-np.maximum(worse, 0.0))
        for group, moving in undo:
            back = moving[refused[moving]]
            self.placed[back, group] = source[back]
            nets = self.nets_of[group][:, None]
            self.counts[nets, source[back], back] += 1
            self.counts[nets, target[back], back] -= 1
        kept = ~refused
        self.loads[:, kept], self.sizes[:, kept] = loads[:, kept], sizes[:, kept]
        self.energy[kept] = energy[kept]

    def _move(self, group: int, chains: Ints, source: Ints, target: Ints, loads: Floats, sizes: Floats) -> None:
        """One group, in some chains; source and target differ."""
        nets = self.nets_of[group][:, None]
        left, joined = self.counts[nets, source, chains], self.counts[nets, target, chains]
        pins, cost = self.pins[nets], self.cost[nets]
        less = cost * ((left > 1).astype(float) - (left < pins))
        more = cost * ((joined + 1 < pins).astype(float) - (joined > 0))
        loads[source, chains] += self.pays[source] * less.sum(axis=0) - self.time[source, group]
        loads[target, chains] += self.pays[target] * more.sum(axis=0) + self.time[target, group]
        sizes[source, chains] -= self.problem.size[group]
        sizes[target, chains] += self.problem.size[group]
        self.counts[nets, source, chains] = left - 1
        self.counts[nets, target, chains] = joined + 1
        self.placed[chains, group] = target


def _runs(problem: LoadProblem) -> list[int]:
    """An order of groups whose runs are moved together: topological, cycles broken up as they come."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(problem.num_groups))
    graph.add_edges_from(problem.edges)
    parts = nx.condensation(graph)
    number = {part: place for place, part in enumerate(nx.topological_sort(parts))}
    edges = [(number[a], number[b]) for a, b in parts.edges]
    members = {place: sorted(parts.nodes[part]["members"]) for part, place in number.items()}
    return [group for part in some_orders(len(number), edges)[-1] for group in members[part]]
