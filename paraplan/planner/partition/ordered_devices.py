"""The ordered placement with the least load: a dynamic program over ideals (see `device_loads.py`).

    best[c, a, J] = least largest load of the ideal J on c CPUs and a accelerators
                  = min over ideals I ⊂ J of max(best[c, a − 1, I], accelerator load of J − I),
                                             max(best[c − 1, a, I], CPU load of J − I)

run first over the beginnings of a few topological orders; the load found prunes the run over all ideals. There an ideal
is dropped where what is left is more than the devices left can do below that load. A net with n groups, of which I has
i and J has j, loads the device of J − I unless i = j, or i = 0 and j = n. Exact where all ideals are searched, to
1e-12; where there are more than asked for, or time runs out, the bound is that of free placements.
Source: Tarnawski et al. 2020, section 5.1.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from paraplan.planner.partition.device_loads import DevicePlacement, Floats, LoadProblem, contracted, device_loads
from paraplan.planner.partition.ideals import Ideals, all_ideals, ideals_of_orders, some_orders

Ints = NDArray[np.int64]


def place_in_order(
    problem: LoadProblem, bound: float = 0.0, time_limit_s: float = np.inf, most_ideals: int = 60_000
) -> DevicePlacement:
    """The ordered placement with the least load.

    Args:
        problem: what to place.
        bound: a proved one, where one is known.
        time_limit_s: of the search.
        most_ideals: above as many, ideals of a few orders are all that is searched.
    """
    deadline = time.perf_counter() + time_limit_s
    smaller, merged = contracted(problem, ordered=True)
    whole = all_ideals(smaller.num_groups, smaller.edges, most_ideals)
    orders = ideals_of_orders(smaller.num_groups, some_orders(smaller.num_groups, smaller.edges))
    best = _Search(smaller, orders).run(np.inf, deadline)
    proved = False
    if whole is not None and (best is None or device_loads(smaller, best).max() > bound):
        load = np.inf if best is None else float(device_loads(smaller, best).max())
        try:
            better = _Search(smaller, whole).run(load, deadline)
            best, proved = best if better is None else better, True
        except TimeoutError:
            pass
    if best is None:
        return DevicePlacement(None, np.inf, np.inf if proved else bound)
    load = float(device_loads(smaller, best).max())
    return DevicePlacement(tuple(best[group] for group in merged), load, load if proved else min(bound, load))


class _Search:
    """The dynamic program over some ideals."""

    def __init__(self, problem: LoadProblem, ideals: Ideals) -> None:
        self.problem, self.ideals = problem, ideals
        member = ideals.member.astype(float)
        on_accelerators = np.isfinite(problem.accelerator_time)
        self.time = member @ np.where(on_accelerators, problem.accelerator_time, 0.0)
        self.barred = member @ (~on_accelerators).astype(float)
        self.cpu = member @ problem.cpu_time
        self.size = member @ problem.size
        pins = np.zeros((problem.num_groups, len(problem.nets)))
        for index, net in enumerate(problem.nets):
            pins[list(net.groups), index] = 1
        self.held = (member @ pins).astype(np.uint8 if problem.num_groups < 256 else np.int32)
        self.full = pins.sum(axis=0).astype(self.held.dtype)
        self.cost = np.array([net.cost for net in problem.nets])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(problem.cpu_time > 0, problem.accelerator_time / problem.cpu_time, np.inf)
        ratio = ratio[on_accelerators & (problem.accelerator_time > 0)]
        self.cpu_pace = float(ratio.max(initial=0.0)) if problem.cpus else 0.0

    def run(self, below: float, deadline: float) -> list[int] | None:
        """A device for each group with a load below a limit, the least; None where, proved, there is none.

        Raises:
            TimeoutError: the deadline passed.
        """
        count, cpus, accelerators = len(self.ideals), self.problem.cpus, self.problem.accelerators
        best = np.full((cpus + 1, accelerators + 1, count), np.inf)
        best[:, :, 0] = 0.0
        origin = np.full((cpus + 1, accelerators + 1, count, 2), -1)
        fewest = np.full((cpus + 1, count), accelerators + 1)  # accelerators an ideal takes beside so many CPUs
        fewest[:, 0] = 0
        for ideal in range(1, count):
            if ideal % 64 == 0 and time.perf_counter() > deadline:
                raise TimeoutError
            most = self._most_taken(ideal, below)
            at = self._from(ideal, fewest, most, below)
            if len(at):
                self._extend(ideal, at, best, origin, below)
                best[:, :, ideal][np.arange(accelerators + 1) > most[:, None]] = np.inf
                reached = np.isfinite(best[:, :, ideal])
                fewest[:, ideal] = np.where(reached.any(axis=1), reached.argmax(axis=1), accelerators + 1)
        if not best[-1, -1, -1] < below:
            return None
        return self._traced(origin)

    def _most_taken(self, ideal: int, below: float) -> Ints:
        """[CPUs taken] how many accelerators an ideal may take so that the devices left can do the rest; −1: none."""
        problem, cpus = self.problem, np.arange(self.problem.cpus, -1, -1)
        if not np.isfinite(below):
            return np.full(len(cpus), problem.accelerators)
        left = (self.time[-1] - self.time[ideal]) / (below * (1 + 1e-12)) - cpus * self.cpu_pace
        return np.maximum(problem.accelerators - np.ceil(np.maximum(left, 0.0) - 1e-9), -1).astype(np.int64)

    def _from(self, ideal: int, fewest: Ints, most: Ints, below: float) -> Ints:
        """Ideals from which a stage to this one might be below a limit."""
        worth = (fewest[:, :ideal] < most[:, None]).any(axis=0) & (self.time[ideal] - self.time[:ideal] < below)
        by_cpu = (fewest[:-1, :ideal] <= most[1:, None]).any(axis=0) & (self.cpu[ideal] - self.cpu[:ideal] < below)
        at = np.flatnonzero(worth | by_cpu)
        outside = self.ideals.words[at] & ~self.ideals.words[ideal]
        return at[~outside.any(axis=1)]

    def _extend(self, ideal: int, at: Ints, best: Floats, origin: Ints, below: float) -> None:
        problem = self.problem
        on_accelerator = np.where(self.barred[ideal] > self.barred[at], np.inf, self.time[ideal] - self.time[at])
        on_accelerator[self.size[ideal] - self.size[at] > problem.max_size] = np.inf
        possible = np.flatnonzero(on_accelerator < below)
        held = self.held[at[possible]]
        loaded = held != self.held[ideal]
        loaded &= (held != 0) | (self.held[ideal] != self.full)
        on_accelerator[possible] += loaded @ self.cost
        on_cpu = self.cpu[ideal] - self.cpu[at]
        reached = best[:, :, at]
        for kind, load in enumerate((on_accelerator, on_cpu)):
            whole = np.maximum(reached[:, :-1] if kind == 0 else reached[:-1], load)
            if not whole.size:
                continue
            where = whole.argmin(axis=-1)
            value = np.take_along_axis(whole, where[..., None], axis=-1)[..., 0]
            into = (slice(None), slice(1, None)) if kind == 0 else (slice(1, None), slice(None))
            better = (value < best[(*into, ideal)]) & (value < below)
            best[(*into, ideal)] = np.where(better, value, best[(*into, ideal)])
            origin[(*into, ideal)] = np.where(
                better[..., None], np.stack([at[where], np.full(where.shape, kind)], axis=-1), origin[(*into, ideal)]
            )

    def _traced(self, origin: Ints) -> list[int]:
        """The device of each group, from the last stage to the first."""
        devices = [-1] * self.problem.num_groups
        cpus, accelerators, ideal = self.problem.cpus, self.problem.accelerators, len(self.ideals) - 1
        while ideal:
            before, kind = (int(x) for x in origin[cpus, accelerators, ideal])
            accelerators, cpus = accelerators - (kind == 0), cpus - (kind == 1)
            device = accelerators if kind == 0 else self.problem.accelerators + cpus
            for group in np.flatnonzero(self.ideals.member[ideal] & ~self.ideals.member[before]):
                devices[group] = device
            ideal = before
        return devices
