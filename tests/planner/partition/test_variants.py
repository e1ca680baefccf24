"""Variants of nodes against all choices there are."""

import itertools

import numpy as np
import pytest

from paraplan.planner.partition.variants import choose_variants


@pytest.mark.parametrize("seed", range(120))
def test_equals_the_best_of_all_choices(seed: int) -> None:
    random = np.random.default_rng(seed)
    nodes, variants = int(random.integers(1, 7)), int(random.integers(1, 4))
    cost, memory = (
        random.integers(1, 20, (nodes, variants)) / 7,
        random.integers(0, 20, (nodes, variants)).astype(float),
    )
    if seed % 3 == 0:  # equal nodes, as layers are
        cost[:], memory[:] = cost[0], memory[0]
    cost[random.random(cost.shape) < 0.1] = np.inf
    limit = float(random.integers(0, 12 * nodes))
    best = np.inf
    for choice in itertools.product(range(variants), repeat=nodes):
        if sum(memory[i, v] for i, v in enumerate(choice)) <= limit:
            best = min(best, sum(cost[i, v] for i, v in enumerate(choice)))
    found = choose_variants(cost, memory, limit)
    assert (found is None) == np.isinf(best)
    if found is not None:
        assert found.cost == pytest.approx(best, rel=1e-12) and found.bound == found.cost
        assert sum(memory[i, v] for i, v in enumerate(found.variants)) <= limit
        for enough in (0.9 * best, best * (1 + 1e-9), 1.2 * best):
            decided = choose_variants(cost, memory, limit, enough)
            assert decided is not None and decided.bound <= best * (1 + 1e-12) <= decided.cost * (1 + 2e-12)
            assert (decided.cost <= enough) == (best <= enough)
