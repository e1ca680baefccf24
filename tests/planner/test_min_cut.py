"""Minimum cuts against every one there is."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from paraplan.planner.solvers.min_cut import sink_side


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_costs_less_and_none_so_cheap_has_fewer_nodes(seed: int) -> None:
    rng = random.Random(seed)
    nodes = 6
    arcs = [(a, b) for a in range(nodes) for b in range(nodes) if a != b and rng.random() < 0.5]
    costs = [rng.choice((0.0, 1e-6, 1.0, 2.5, float("inf") if (a, b) != (0, 1) else 3.0)) for a, b in arcs]
    arcs.append((0, 2)), costs.append(1.0)

    def cost(sinks: set[int]) -> float:
        return sum(c for (a, b), c in zip(arcs, costs, strict=True) if a not in sinks and b in sinks)

    every = [{1, *more} for n in range(nodes - 1) for more in itertools.combinations(range(2, nodes), n)]
    least = min(map(cost, every))
    if least == float("inf"):
        return
    ends = np.array(arcs, np.int64)
    found = sink_side(ends[:, 0], ends[:, 1], np.array(costs), 0, 1)
    assert cost(found) == pytest.approx(least, abs=1e-12)
    assert len(found) == min(len(each) for each in every if cost(each) <= least + 1e-12)
