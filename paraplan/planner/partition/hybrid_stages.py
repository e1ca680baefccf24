"""Stages with data and tensor degrees, whose slowest takes least (Piper's problem, `hybrid_problem.py`).

By bisection on the slowest stage's time T, each T decided by a dynamic program over ideals (`hybrid_search.py`): first
over the beginnings of a few topological orders, which gives an answer, then over all ideals, which makes it exact to
1e-9. The lower bound is what all devices' time together must do, then the largest T refused over all ideals. Limits:
where a graph has more ideals than asked for, or time runs out, the answer is the best found and the bound says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from paraplan.planner.partition.hybrid_problem import HybridProblem, HybridStage, microbatches_in_flight
from paraplan.planner.partition.hybrid_search import HybridSearch, OutOfTime
from paraplan.planner.partition.ideals import Ideals, all_ideals, ideals_of_orders, some_orders

_EXACT = 1e-9
_REFUSALS = 2
"""After as many T refused in a row, what is known is probably best: just below it is tried next."""
_GALLOP = (1e-6, 1e-3, 0.01, 0.05, 0.1, 0.1, 0.1, 0.1, 0.2, 0.3, 0.5, 1.0)
"""How far above what is refused a first answer is looked for next, before any limit at all is lifted."""


@dataclass(frozen=True)
class HybridPartition:
    """The best stages found (None: there are none) and a proved lower bound, infinite where none can exist."""

    stages: tuple[HybridStage, ...] | None
    time_s: float
    bound_s: float

    @property
    def proved(self) -> bool:
        """Optimal, or infeasible."""
        return self.time_s <= self.bound_s * (1 + 2 * _EXACT) or self.time_s == self.bound_s


def partition_hybrid(
    problem: HybridProblem, time_limit_s: float = np.inf, most_ideals: int = 40_000
) -> HybridPartition:
    """The stages whose slowest takes least.

    Args:
        problem: what to cut.
        time_limit_s: of the search.
        most_ideals: above as many, ideals of a few orders are all that is searched.
    Raises:
        ValueError: the graph has a cycle.
    """
    deadline = time.perf_counter() + time_limit_s
    bound = max(float(problem.device_seconds.sum()) / problem.devices, 1e-30)
    best = HybridPartition(None, np.inf, bound)
    if np.isinf(bound):
        return HybridPartition(None, np.inf, np.inf)
    whole = all_ideals(problem.num_nodes, problem.edges, most_ideals)
    orders = ideals_of_orders(problem.num_nodes, some_orders(problem.num_nodes, problem.edges))
    families = [orders] if whole is None else [whole] if len(whole) <= 4 * len(orders) else [orders, whole]
    for ideals in families:
        best = _improved(problem, ideals, best, deadline)
        if best.proved:
            break
    return best


def _improved(problem: HybridProblem, ideals: Ideals, best: HybridPartition, deadline: float) -> HybridPartition:
    """The best over some ideals, and where they are complete the bound they prove."""
    search = HybridSearch(problem, ideals, deadline)
    stages, time_s, low = best.stages, best.time_s, best.bound_s
    try:
        if stages is None:
            for more in (*_GALLOP, np.inf):
                limit = low * (1 + more) if np.isfinite(more) else 1e30
                found = search.run(limit)
                if found is not None:
                    stages, time_s = tuple(found), slowest_s(problem, found)
                    break
                low = limit
            else:
                return HybridPartition(None, np.inf, np.inf if ideals.complete else best.bound_s)
        refused = 0
        while time_s > low * (1 + _EXACT):
            middle = max((low + time_s) / 2, low * (1 + _EXACT / 2))
            limit = min(middle if refused < _REFUSALS else np.inf, time_s * (1 - _EXACT / 2))
            found = search.run(limit)
            if found is None:
                low, refused = limit, refused + 1
            else:
                shorter_s = slowest_s(problem, found)
                assert shorter_s < time_s, f"stages said to take at most {limit} take {shorter_s}"
                stages, time_s, refused = tuple(found), shorter_s, 0
    except OutOfTime:
        pass
    return HybridPartition(stages, time_s, min(low, time_s) if ideals.complete else best.bound_s)


def slowest_s(problem: HybridProblem, stages: list[HybridStage]) -> float:
    """The time of the slowest stage; `inf` where a stage does not fit."""
    slowest, later = 0.0, 0
    for stage in reversed(stages):
        inside = np.zeros(problem.num_nodes, bool)
        inside[list(stage.nodes)] = True
        degree = next(degree for degree in problem.degrees if degree.degree == stage.tensor_degree)
        nodes, chosen = np.flatnonzero(inside), np.array(stage.variants)
        in_flight = microbatches_in_flight(stage.data_degree, later)
        held = degree.per_microbatch_bytes[nodes, chosen] * in_flight + degree.always_bytes[nodes, chosen]
        if held.sum() > problem.memory_bytes:
            return np.inf
        costs = problem.stage_costs(inside, degree, stage.data_degree)
        slowest = max(slowest, float(costs[np.arange(len(nodes)), chosen].sum()))
        later += stage.data_degree
    return slowest
