"""Small random cost networks, and all their choices."""

from __future__ import annotations

import itertools

import numpy as np

from paraplan.planner.sharding.network.cost_network import Factor, Network, Row

STREAMS = 2


def random_network(seed: int, rows: int = 0, blocked: float = 0.1) -> Network:
    """Six variables of up to four options, factors of up to three readers, some moves impossible."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, 6)
    prices = tuple(rng.random((size, STREAMS)).round(2) for size in sizes)
    factors = []
    for _ in range(rng.integers(4, 8)):
        source, *readers = rng.choice(6, rng.integers(2, 5), replace=False).tolist()
        layouts = [rng.integers(0, 3, sizes[v]) for v in (source, *readers)]
        moved = (2 * rng.random((3, 3, STREAMS))).round(2)
        moved[range(3), range(3)] = 0.0
        moved[(rng.random((3, 3)) < blocked) & ~np.eye(3, dtype=bool)] = np.inf
        factors.append(Factor(source, tuple(readers), layouts[0], tuple(layouts[1:]), moved))
    found = []
    for row in range(rows):
        held = {v: rng.random(sizes[v]).round(2) for v in rng.choice(6, 4, replace=False).tolist()}
        carried = {0: rng.random((3, 3)).round(2)} if row else {}
        found.append(Row(f"row {row}", float(rng.uniform(0.4, 1.6)), held, carried))
    return Network(prices, tuple(factors), tuple(found))


def every_choice(network: Network) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """All choices that are possible and fit, with their work."""
    found = []
    for choices in itertools.product(*(range(len(price)) for price in network.prices)):
        work = network.work(choices)
        if np.isfinite(work).all() and network.fits(choices):
            found.append((choices, work))
    return found
