"""A lower bound on the simulated step of every plan in scope.

No plan's step is shorter than the work of any one stream, hence than any convex combination of them:

    step >= max_i work_i(x) >= sum_i w_i work_i(x) >= min_x sum_i w_i work_i(x)      for w >= 0, sum_i w_i = 1

so the dual bound of the ILP under weights w is a bound, and the best w is a concave maximisation: Kelley's cutting
planes, where each solve adds the cut given by the work of its solution. Two streams need two or three solves; whatever
the time allows, the largest bound found is one. (The equivalent minimise-the-maximum program has the same value
and is far harder for simplex and interior point alike.)

Source: Kelley 1960; Lagrangian duality.
"""

from __future__ import annotations

import time

import numpy as np

from paraplan.planner.milp import MilpBuilder, Status, solve
from paraplan.planner.sharding.evaluate import work_of_choices
from paraplan.planner.sharding.ilp import ShardingIlp, weighted_problem
from paraplan.planner.sharding.space import Space


def step_bound(space: Space, ilp: ShardingIlp, work: tuple[float, ...], backend: str, time_limit_s: float) -> float:
    """The best bound the time allows.

    Args:
        space, ilp: the problem.
        work: seconds per stream of a known plan: the first cut.
        backend: who solves.
        time_limit_s: for all solves together.
    Returns:
        Seconds; 0.0 where nothing was proved.
    """
    stop = time.perf_counter() + time_limit_s
    cuts = [np.array(work)]
    best = 0.0
    weights = np.eye(len(work))[int(np.argmax(cuts[0]))]
    for _ in range(4):
        left = stop - time.perf_counter()
        if left <= 0:
            break
        found = solve(weighted_problem(ilp, weights.tolist()), backend=backend, time_limit_s=left, relative_gap=1e-3)
        best = max(best, found.bound)
        if found.values is None or found.status is not Status.OPTIMAL:
            break
        cuts.append(np.array(work_of_choices(space, ilp.choices(found.values, space))))
        weights, ceiling = _best_weights(cuts)
        if ceiling <= best * 1.005:
            break
    return best


def _best_weights(cuts: list[np.ndarray]) -> tuple[np.ndarray, float]:
    """Weights that maximise the least of the cuts, and that value: what no further solve can exceed."""
    builder = MilpBuilder()
    streams = len(cuts[0])
    first = builder.add_columns(streams, upper=1.0)
    level = builder.add_columns(1, objective=-1.0)
    builder.add_row(range(first, first + streams), np.ones(streams), 1.0, 1.0)
    for cut in cuts:
        builder.add_row([*range(first, first + streams), level], [*cut.tolist(), -1.0], 0.0, np.inf)
    found = solve(builder.build(), relax=True)
    assert found.values is not None
    return found.values[:streams], -found.objective
