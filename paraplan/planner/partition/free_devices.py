"""Placements on devices in no order, with a small largest load (see `device_loads.py`).

Rounds of annealing (`annealing.py`), at several temperatures and from the best known or an ordered placement, each
followed by a descent over neighbourhoods: the groups of two, three, then four devices, the fullest among them, are
placed anew by a mixed-integer program (`reassign.py`), until none of them is better. What another device pays does not
change by that, so each step is exact for its devices. Small problems go to the whole program at the end.

The answer is a heuristic's with a proved lower bound (`load_bounds.py`, the whole program's): optimal where both meet.
Where nothing fits at all the program says so, which is a proof. Equal input gives equal output unless time runs out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np

from paraplan.planner.partition.annealing import Annealer, CoolingSchedule
from paraplan.planner.partition.device_loads import DevicePlacement, LoadProblem, contracted, device_loads
from paraplan.planner.partition.load_bounds import load_bound
from paraplan.planner.partition.reassign import reassign
from paraplan.planner.solvers.milp import Status

_SCHEDULES = (
    CoolingSchedule(0.02, 3e-4, 20.0, 60.0),
    CoolingSchedule(0.003, 5e-5, 12.0, 100.0),
    CoolingSchedule(0.0015, 3e-5, 12.0, 100.0),
    CoolingSchedule(0.03, 5e-4, 30.0, 100.0),
)
_CHAINS, _STEPS = 256, 16_000
_PROGRAM_S = 5.0
_SMALL = 64
"""Groups times devices up to which the whole program is solved first."""
_SAME = 1e-9


def place_freely(
    problem: LoadProblem, start: DevicePlacement | None = None, time_limit_s: float = 60.0, rounds: int = 8
) -> DevicePlacement:
    """A placement with a small largest load.

    Args:
        problem: what to place.
        start: a placement to begin from, as of `place_in_order`; its bound is not used.
        time_limit_s: of the search.
        rounds: of annealing at most.
    """
    deadline = time.perf_counter() + time_limit_s
    smaller, merged = contracted(problem, ordered=False)
    bound = load_bound(smaller)
    known = None if start is None or start.devices is None else _restricted(smaller, merged, start.devices)
    if known is None:
        known, infeasible = _first(smaller, time_limit_s)
        if known is None:
            return DevicePlacement(None, np.inf, np.inf if infeasible or np.isinf(bound) else bound)
    best, bound = _search(smaller, known, bound, deadline, rounds)
    load = float(device_loads(smaller, best).max())
    return DevicePlacement(tuple(best[group] for group in merged), load, min(bound, load))


def _restricted(problem: LoadProblem, merged: Sequence[int], devices: Sequence[int]) -> list[int] | None:
    """A placement of the groups before they were merged, of those after; None where they do not fit so."""
    found = [0] * problem.num_groups
    for group, into in enumerate(merged):
        found[into] = devices[group]
    return found if np.isfinite(device_loads(problem, found)).all() else None


def _first(problem: LoadProblem, time_limit_s: float) -> tuple[list[int] | None, bool]:
    """Any placement that fits, and whether there is, proved, none."""
    count = problem.accelerators + problem.cpus
    if count == 0:
        return None, True
    devices, sizes = [0] * problem.num_groups, np.zeros(count)
    for group in np.argsort(-problem.size, kind="stable").tolist():
        fits = [
            device
            for device in range(count)
            if device >= problem.accelerators
            or (
                np.isfinite(problem.accelerator_time[group]) and sizes[device] + problem.size[group] <= problem.max_size
            )
        ]
        if not fits:
            everything = range(problem.num_groups)
            placed, solution = reassign(problem, None, everything, range(count), time_limit_s)
            return placed, solution.status is Status.INFEASIBLE
        devices[group] = min(fits, key=lambda device: sizes[device])
        sizes[devices[group]] += problem.size[group]
    return devices, False


def _search(
    problem: LoadProblem, known: list[int], bound: float, deadline: float, rounds: int
) -> tuple[list[int], float]:
    if problem.num_groups * (problem.accelerators + problem.cpus) <= _SMALL:
        return _proved(problem, known, bound, deadline)
    best = _descended(problem, known, bound, deadline)
    for number in range(rounds):
        load = float(device_loads(problem, best).max())
        if load <= bound * (1 + _SAME) or time.perf_counter() > deadline:
            break
        starts = [known] if number % 2 == 0 else [best]
        annealer = Annealer(problem, starts, _CHAINS, seed=number)
        annealer.run(_STEPS, _SCHEDULES[number % len(_SCHEDULES)], bound * (1 + _SAME), deadline)
        candidate = _descended(problem, annealer.best, bound, deadline)
        if device_loads(problem, candidate).max() < load:
            best = candidate
    return _proved(problem, best, bound, deadline)


def _descended(problem: LoadProblem, devices: Sequence[int], bound: float, deadline: float) -> list[int]:
    """The placement after the last improvement by placing the groups of a few devices anew."""
    best = list(devices)
    count = problem.accelerators + problem.cpus
    size = 2
    while size <= min(count, 4) and time.perf_counter() < deadline:
        better = _better(problem, best, size, bound, deadline)
        size = size + 1 if better is None else 2
        best = best if better is None else better
    return best


def _better(problem: LoadProblem, devices: list[int], size: int, bound: float, deadline: float) -> list[int] | None:
    """The first better placement with the groups of so many devices placed anew, those that have room first."""
    loads = device_loads(problem, devices)
    if loads.max() <= bound * (1 + _SAME):
        return None
    fullest = int(loads.argmax())
    others = sorted((device for device in range(len(loads)) if device != fullest), key=lambda device: loads[device])
    for chosen in itertools.combinations(others, size - 1):
        left = deadline - time.perf_counter()
        if left <= 0:
            return None
        to = [fullest, *chosen]
        free = [group for group in range(problem.num_groups) if devices[group] in to]
        placed, _ = reassign(problem, devices, free, to, min(_PROGRAM_S, left))
        if placed is not None and device_loads(problem, placed)[to].max() < loads[fullest] * (1 - _SAME):
            return placed
    return None


def _proved(problem: LoadProblem, best: list[int], bound: float, deadline: float) -> tuple[list[int], float]:
    """By the whole program, as long as there is time: a better placement or a better bound."""
    load, left = float(device_loads(problem, best).max()), deadline - time.perf_counter()
    if load <= bound * (1 + _SAME) or left <= 0:
        return best, bound
    everything = range(problem.num_groups)
    placed, solution = reassign(problem, best, everything, range(problem.accelerators + problem.cpus), left)
    if placed is not None and device_loads(problem, placed).max() < load:
        best = placed
    return best, max(bound, solution.bound)
