"""Lower bounds on the largest load of any placement, ordered or not (see `device_loads.py`).

*Average*: accelerators and CPUs together do all the work, each at most the load, a CPU at its best pace.

*One group*: the device that has group g is loaded with at least the least load of any set of groups with g in it. The
load of an accelerator is submodular in its set (Σ times + Σ costs of nets that the set touches and does not hold), so
the least is a minimum cut (Lawler 1973). The bound is the largest over groups, by the linear program of the cut:

    minimise Σ_v time_v x_v + Σ_n cost_n (y_n − z_n)   with x_g = 1, y_n ≥ x_v ≥ z_n for v of n, all in [0, 1]

which has integral optima.
"""

from __future__ import annotations

import numpy as np

from paraplan.planner.partition.device_loads import LoadProblem
from paraplan.planner.solvers.milp import MilpBuilder, Status, solve

_MARGIN = 1e-9


def load_bound(problem: LoadProblem) -> float:
    """A lower bound on the largest load; infinite where a group can be nowhere."""
    nowhere = np.isinf(problem.accelerator_time) | (problem.size > problem.max_size) | (problem.accelerators == 0)
    if problem.cpus == 0 and nowhere.any():
        return np.inf
    bound = average_bound(problem)
    alone = [_alone(problem, group) for group in range(problem.num_groups)]
    for group in np.argsort(alone)[::-1]:
        if alone[group] <= bound:
            break
        bound = max(bound, _around(problem, int(group), bool(nowhere[group])))
    return bound


def average_bound(problem: LoadProblem) -> float:
    """What all devices do together, shared evenly."""
    on_accelerators = np.isfinite(problem.accelerator_time)
    times = np.where(on_accelerators, problem.accelerator_time, 0.0)
    if not problem.cpus:
        return float(times.sum() / max(problem.accelerators, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        pace = np.where(problem.cpu_time > 0, times / problem.cpu_time, np.inf)
    free = on_accelerators & ~np.isfinite(pace)  # no work for a CPU
    best_pace = pace[np.isfinite(pace)].max(initial=0.0)
    work = times[~free].sum()
    return float(work / (problem.accelerators + problem.cpus * best_pace)) if work > 0 else 0.0


def _alone(problem: LoadProblem, group: int) -> float:
    """The load of the device that has one group and nothing else, whichever device is best."""
    nets = sum(net.cost for net in problem.nets if group in net.groups)
    on_cpu = problem.cpu_time[group] if problem.cpus else np.inf
    on_accelerator = problem.accelerator_time[group] + nets if problem.accelerators else np.inf
    return float(min(on_accelerator, on_cpu))


def _around(problem: LoadProblem, group: int, only_cpu: bool) -> float:
    """The least load of the device that has a group."""
    on_cpu = float(problem.cpu_time[group]) if problem.cpus else np.inf
    if only_cpu:
        return on_cpu
    n = problem.num_groups
    builder = MilpBuilder()
    lower = np.zeros(n)
    lower[group] = 1.0
    upper = np.where(np.isfinite(problem.accelerator_time), 1.0, 0.0)
    times = np.where(upper > 0, problem.accelerator_time, 0.0)
    x = builder.add_columns(n, objective=times, lower=lower, upper=upper)
    costs = np.array([net.cost for net in problem.nets])
    y = builder.add_columns(len(costs), objective=costs, upper=1.0)
    z = builder.add_columns(len(costs), objective=-costs, upper=1.0)
    pins = np.array([(v, index) for index, net in enumerate(problem.nets) for v in net.groups]).reshape(-1, 2)
    rows = np.arange(len(pins)).repeat(2)
    for columns in (np.stack([x + pins[:, 0], y + pins[:, 1]], 1), np.stack([z + pins[:, 1], x + pins[:, 0]], 1)):
        builder.add_rows(len(pins), rows, columns.ravel(), np.tile([1.0, -1.0], len(pins)), upper=0.0)
    cut = solve(builder.build(), relax=True)
    least = cut.bound if cut.status is Status.OPTIMAL else 0.0
    return min(on_cpu, least - _MARGIN * abs(least))
