"""Some groups of a placement anew, the rest held, by a mixed-integer program (see `device_loads.py`).

    minimise L   with x[g, d] ∈ {0, 1}, Σ_d x[g, d] = 1 for free groups, and for each device d
    Σ_g time[d, g] x[g, d] + Σ_n cost_n (y[n, d] − z[n, d]) ≤ L,    y[n, d] ≥ x[g, d] ≥ z[n, d] for g of net n
    Σ_g size_g x[g, d] ≤ the limit of an accelerator

where y says that a device touches a net, z that it holds all of it. Nets without free groups are constants. With all
groups free it is the whole problem, and its bound one on every placement.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paraplan.planner.partition.device_loads import LoadProblem, device_loads
from paraplan.planner.solvers.milp import MilpBuilder, Solution, solve


def reassign(
    problem: LoadProblem, devices: Sequence[int] | None, free: Sequence[int], to: Sequence[int], time_limit_s: float
) -> tuple[list[int] | None, Solution]:
    """The best placement of some groups on some devices.

    Args:
        problem: what is placed.
        devices: where groups are now; None where all are free and nothing is known.
        free: groups that may move.
        to: devices they may move to (those they are on now among them).
        time_limit_s: of the solver.
    Returns:
        Every group's device (None: none was found), and the program's solution.
    """
    program = _Program(problem, devices, free, to)
    start = None if devices is None else program.point(devices)
    solution = solve(program.builder.build(), time_limit_s=time_limit_s, relative_gap=1e-6, warm_start=start)
    if solution.values is None:
        return None, solution
    placed = list(devices) if devices is not None else [0] * problem.num_groups
    for index, group in enumerate(free):
        chosen = [solution.values[program.x + index * len(to) + place] for place in range(len(to))]
        placed[group] = to[int(np.argmax(chosen))]
    return placed, solution


class _Program:
    """The columns and rows; x[g, d] at `x + place of g · number of devices + place of d`."""

    def __init__(
        self, problem: LoadProblem, devices: Sequence[int] | None, free: Sequence[int], to: Sequence[int]
    ) -> None:
        self.problem, self.free, self.to = problem, list(free), list(to)
        self.where = {group: place for place, group in enumerate(self.free)}
        self.held = {} if devices is None else {g: d for g, d in enumerate(devices) if g not in self.where}
        self.nets = [net for net in problem.nets if any(group in self.where for group in net.groups)]
        self.builder = MilpBuilder()
        count = len(self.to)
        accelerated = np.array([device < problem.accelerators for device in self.to])
        barred = np.isinf(problem.accelerator_time[self.free])[:, None] & accelerated
        self.most = self.builder.add_columns(1, objective=1.0)
        self.x = self.builder.add_columns(len(self.free) * count, upper=1.0 - barred.ravel(), integer=True)
        self.y = self.builder.add_columns(len(self.nets) * count, upper=1.0)
        self.z = self.builder.add_columns(len(self.nets) * count, upper=1.0)
        groups = np.arange(len(self.free))
        self.builder.add_rows(
            len(self.free),
            groups.repeat(count),
            self.x + np.arange(len(self.free) * count),
            np.ones(len(self.free) * count),
            lower=1.0,
            upper=1.0,
        )
        self._link_nets()
        for place, device in enumerate(self.to):
            self._limit(place, device)

    def _link_nets(self) -> None:
        """y ≥ x ≥ z, groups that are held counted as they are."""
        count = len(self.to)
        for place, device in enumerate(self.to):
            if device >= self.problem.accelerators:
                continue
            for index, net in enumerate(self.nets):
                y, z = self.y + index * count + place, self.z + index * count + place
                for group in net.groups:
                    if group in self.where:
                        x = self.x + self.where[group] * count + place
                        self.builder.add_row([y, x], [1.0, -1.0], lower=0.0)
                        self.builder.add_row([x, z], [1.0, -1.0], lower=0.0)
                    elif self.held[group] == device:
                        self.builder.add_row([y], [1.0], lower=1.0)
                    else:
                        self.builder.add_row([z], [1.0], upper=0.0)

    def _limit(self, place: int, device: int) -> None:
        problem, count = self.problem, len(self.to)
        x = self.x + np.arange(len(self.free)) * count + place
        held = [group for group, at in self.held.items() if at == device]
        if device >= problem.accelerators:
            self.builder.add_row(
                [*x, self.most], [*problem.cpu_time[self.free], -1.0], upper=-problem.cpu_time[held].sum()
            )
            return
        times = np.where(np.isinf(problem.accelerator_time[self.free]), 0.0, problem.accelerator_time[self.free])
        nets = np.arange(len(self.nets)) * count + place
        cost = np.array([net.cost for net in self.nets])
        fixed = float(problem.accelerator_time[held].sum()) + self._constant(device)
        self.builder.add_row(
            [*x, *(self.y + nets), *(self.z + nets), self.most], [*times, *cost, *-cost, -1.0], upper=-fixed
        )
        if problem.size.sum() > problem.max_size:
            room = problem.max_size - problem.size[held].sum()
            self.builder.add_row(x, problem.size[self.free], upper=room)

    def _constant(self, device: int) -> float:
        """What nets without free groups cost a device."""
        total = 0.0
        for net in self.problem.nets:
            if not any(group in self.where for group in net.groups):
                touched = {self.held[group] for group in net.groups}
                total += net.cost if device in touched and len(touched) > 1 else 0.0
        return total

    def point(self, devices: Sequence[int]) -> np.ndarray:
        """A placement as values of the columns."""
        values, count = np.zeros(self.builder.num_columns), len(self.to)
        for place, device in enumerate(self.to):
            for index, group in enumerate(self.free):
                values[self.x + index * count + place] = devices[group] == device
            if device < self.problem.accelerators:
                for index, net in enumerate(self.nets):
                    here = [devices[group] == device for group in net.groups]
                    values[self.y + index * count + place] = any(here)
                    values[self.z + index * count + place] = all(here)
        values[self.most] = device_loads(self.problem, devices)[self.to].max()
        return values
