"""Random graphs for the partition tests."""

import itertools

import numpy as np


def random_edges(random: np.random.Generator, num_nodes: int, share: float) -> list[tuple[int, int]]:
    """Edges without cycles, between nodes in an order of their own."""
    names = random.permutation(num_nodes)
    pairs = itertools.combinations(range(num_nodes), 2)
    return [(int(names[a]), int(names[b])) for a, b in pairs if random.random() < share]
