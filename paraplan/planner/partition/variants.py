"""One variant for each node, so that cost is least and memory stays within a limit (multiple-choice knapsack).

    minimise Σ_v cost[v][l_v]  subject to  Σ_v memory[v][l_v] ≤ limit

Bounded first: the linear relaxation (of two variants by cost per byte saved, of more by the Lagrangian one) gives a
lower bound and a choice near it that fits. Where that does not decide, exact: the Pareto front of (memory, cost) of all
choices node by node, points dropped that cannot fit or cannot be better than the choice known.
Source: Nemhauser and Ullmann 1969.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_HALVINGS = 40


@dataclass(frozen=True)
class VariantChoice:
    """A choice that fits, and a lower bound on every one's cost."""

    variants: tuple[int, ...]
    cost: float
    bound: float


def choose_variants(cost: Floats, memory: Floats, limit: float, enough: float | None = None) -> VariantChoice | None:
    """The cheapest choice that fits.

    Args:
        cost: [node, variant]; infinite where a node has no such variant.
        memory: [node, variant], finite.
        limit: of the sum of memory.
        enough: where given, the search ends once the cost is known to be above it, or not above it.
    Returns:
        The choice, its bound its cost unless `enough` ended the search before; None where, proved, nothing fits.
    """
    memory = np.where(np.isinf(cost), np.inf, memory)
    if not memory.min(axis=1).sum() <= limit:
        return None
    nodes = np.arange(len(cost))
    fastest = np.lexsort((memory, cost), axis=1)[:, 0] if cost.size else np.empty(0, int)
    if memory[nodes, fastest].sum() <= limit:
        total = float(cost[nodes, fastest].sum())
        return VariantChoice(tuple(fastest.tolist()), total, total)
    found = _fractional(cost, memory, limit, fastest) if cost.shape[1] == 2 else _relaxed(cost, memory, limit)
    if found.bound >= found.cost or (enough is not None and not found.bound <= enough < found.cost):
        return found
    return _exact(cost, memory, limit, found)


def _fractional(cost: Floats, memory: Floats, limit: float, fastest: Ints) -> VariantChoice:
    """Of two variants: the linear relaxation, by cost per byte saved, and the nearest choice that fits."""
    nodes = np.arange(len(cost))
    saved = memory[nodes, fastest] - memory[nodes, 1 - fastest]
    added = cost[nodes, 1 - fastest] - cost[nodes, fastest]
    at = np.flatnonzero((saved > 0) & np.isfinite(added))
    at = at[np.argsort(added[at] / saved[at], kind="stable")]
    excess = memory[nodes, fastest].sum() - limit
    total = np.cumsum(saved[at])
    last = int(np.searchsorted(total, excess))
    if last == len(at):  # the sum that fitted was rounded otherwise
        last -= 1
    left = excess - (total[last] - saved[at[last]])
    bound = cost[nodes, fastest].sum() + added[at[:last]].sum() + added[at[last]] * min(left / saved[at[last]], 1.0)
    enough = at[last:][saved[at[last:]] >= left]
    chosen = fastest.copy()
    swapped = [*at[:last], enough[np.argmin(added[enough])] if len(enough) else at[last]]
    chosen[swapped] = 1 - fastest[swapped]
    total_cost = float(cost[nodes, chosen].sum())
    return VariantChoice(tuple(chosen.tolist()), total_cost, min(float(bound) * (1 - 1e-13), total_cost))


def _relaxed(cost: Floats, memory: Floats, limit: float) -> VariantChoice:
    """The best multiplier on memory by bisection, and the choice at the side of it that fits."""
    nodes = np.arange(len(cost))
    held = np.where(np.isinf(memory), 0.0, memory)
    low, high = 0.0, (cost[np.isfinite(cost)].max() + 1e-30) / max(limit, 1e-30)
    chosen = memory.argmin(axis=1)
    bound = float(cost.min(axis=1).sum())
    for _ in range(200):
        at = (cost + high * held).argmin(axis=1)
        if memory[nodes, at].sum() <= limit:
            chosen = at
            break
        low, high = high, 4 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        priced = cost + middle * held
        at = priced.argmin(axis=1)
        bound = max(bound, float(priced[nodes, at].sum()) - middle * limit)
        if memory[nodes, at].sum() <= limit:
            high = middle
            if cost[nodes, at].sum() < cost[nodes, chosen].sum():
                chosen = at
        else:
            low = middle
    total = float(cost[nodes, chosen].sum())
    return VariantChoice(tuple(chosen.tolist()), total, min(bound * (1 - 1e-13), total))


def _exact(cost: Floats, memory: Floats, limit: float, known: VariantChoice) -> VariantChoice:
    """By fronts; the nodes with most to win first, so that what remains is bounded well."""
    order = np.argsort(-(memory.max(axis=1, where=np.isfinite(memory), initial=0) - memory.min(axis=1)), kind="stable")
    least_memory = np.append(np.cumsum(memory[order].min(axis=1)[::-1])[::-1], 0.0)
    least_cost = np.append(np.cumsum(cost[order].min(axis=1)[::-1])[::-1], 0.0)
    held, paid = np.zeros(1), np.zeros(1)
    steps: list[tuple[Ints, Ints]] = []
    for place, node in enumerate(order):
        options = np.flatnonzero(np.isfinite(cost[node]))
        all_held = (held + memory[node, options][:, None]).ravel()
        all_paid = (paid + cost[node, options][:, None]).ravel()
        fits = (all_held + least_memory[place + 1] <= limit) & (all_paid + least_cost[place + 1] < known.cost)
        at = np.flatnonzero(fits)
        at = at[np.lexsort((all_paid[at], all_held[at]))]
        best_before = np.minimum.accumulate(np.append(np.inf, all_paid[at]))[:-1]
        at = at[all_paid[at] < best_before]
        if not len(at):
            return VariantChoice(known.variants, known.cost, known.cost)
        steps.append((options[at // len(held)], at % len(held)))
        held, paid = all_held[at], all_paid[at]
    point = int(np.argmin(paid))
    total = float(paid[point])
    chosen = [0] * len(order)
    for node, (options, before) in zip(reversed(order.tolist()), reversed(steps), strict=True):
        chosen[node] = int(options[point])
        point = int(before[point])
    return VariantChoice(tuple(chosen), total, total)
