"""Ideals against all subsets, and topological orders."""

import itertools

import numpy as np
import pytest

from paraplan.planner.partition.ideals import all_ideals, ideals_of_orders, some_orders, topological_order
from tests.planner.partition.graphs import random_edges


@pytest.mark.parametrize("seed", range(20))
def test_all_ideals_are_the_closed_subsets(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_nodes = int(random.integers(1, 8))
    edges = random_edges(random, num_nodes, 0.3)
    closed = {
        bits
        for bits in itertools.product((False, True), repeat=num_nodes)
        if all(bits[a] or not bits[b] for a, b in edges)
    }
    found = all_ideals(num_nodes, edges, 1 << num_nodes)
    assert found is not None and found.complete
    assert {tuple(row) for row in found.member.tolist()} == closed and len(found) == len(closed)
    sizes = found.member.sum(axis=1)
    assert (np.diff(sizes) >= 0).all() and sizes[0] == 0 and sizes[-1] == num_nodes
    subset = ~(found.words[:, None] & ~found.words[None]).any(axis=-1)
    expected = (found.member[:, None] <= found.member[None]).all(axis=-1)
    assert (subset == expected).all()
    assert all_ideals(num_nodes, edges, len(closed) - 1) is None


@pytest.mark.parametrize("seed", range(10))
def test_orders_go_along_edges(seed: int) -> None:
    random = np.random.default_rng(seed)
    edges = random_edges(random, 9, 0.3)
    orders = some_orders(9, edges)
    for order in orders:
        place = {node: index for index, node in enumerate(order)}
        assert sorted(order) == list(range(9)) and all(place[a] < place[b] for a, b in edges)
    beginnings = ideals_of_orders(9, orders)
    assert not beginnings.complete and beginnings.member[0].sum() == 0 and beginnings.member[-1].all()
    assert all(member[a] >= member[b] for member in beginnings.member for a, b in edges)


def test_a_cycle_is_refused() -> None:
    with pytest.raises(ValueError, match="cycle"):
        topological_order(3, [(0, 1), (1, 2), (2, 1)])
