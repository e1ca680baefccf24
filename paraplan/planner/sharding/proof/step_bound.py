"""A lower bound on the simulated step of every plan in scope.

No plan's step is shorter than the work of any one stream, hence than any convex combination of them; rows that every
plan must keep may be added with multipliers:

    step >= max_i work_i(x) >= sum_i w_i work_i(x) >= min_x sum_i w_i work_i(x) + m . (activity(x) - limit)

for w >= 0 with sum 1 and m >= 0. The right side is maximised over w and m by cutting planes (`lagrangian.py`); whatever
the time allows, the largest value found is a bound.
"""

from __future__ import annotations

import time

import numpy as np

from paraplan.planner.sharding.consistent import consistent
from paraplan.planner.sharding.network.cost_network import Floats, Network
from paraplan.planner.sharding.network.lagrangian import Ascent, Point
from paraplan.planner.sharding.network.message_passing import MessagePassing

GAP = 3e-3
"""How near the best bound is near enough: plans overlap work better or worse by far more."""


def step_bound(network: Network, work: Floats, multipliers: Floats, time_limit_s: float) -> float:
    """The best bound the time allows.

    Args:
        network: the problem.
        work: [stream] seconds of a known plan: its busiest stream is where weights start.
        multipliers: [row] of the objective's bound.
        time_limit_s: for all of it.
    Returns:
        Seconds; 0.0 where nothing was proved.
    """
    useful = np.flatnonzero(multipliers > 0.0)
    rows = tuple(network.rows[index] for index in useful)
    share = 0.05 * work / work.sum()
    share[int(np.argmax(work))] += 0.95
    small = Network(network.prices, network.factors, rows)
    point = best_point(small, share, multipliers[useful] / len(work), time_limit_s)
    return 0.0 if point is None else max(0.0, point.bound)


def best_point(
    network: Network, weights: Floats, multipliers: Floats, time_limit_s: float, warm: MessagePassing | None = None
) -> Point | None:
    """Where the bound is best, of what the time allows.

    Args:
        network: the problem.
        weights: [stream] where they start, with sum 1.
        multipliers: [row] where they start.
        time_limit_s: for all of it.
        warm: messages of a network that differs in prices alone, none of them infinite in one only.
    Returns:
        The point; None where some variable has no option left.
    """
    kept = consistent(network)
    if kept is None:
        return None
    ascent = Ascent(network.restricted(kept), None, time.perf_counter() + time_limit_s, gap=GAP)
    ascent.start(weights, multipliers, warm)
    for _ in range(12):
        _, ceiling = ascent.step()
        if ceiling <= ascent.best.bound * (1 + 3 * GAP) or time.perf_counter() > ascent.stop:
            break
    return ascent.best
