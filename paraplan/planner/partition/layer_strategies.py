"""One strategy for each layer of a chain, so that time is least and memory stays within a limit.

    minimise   Σ_i intra[i][s_i] + Σ_(i≥1) inter[i][s_(i−1)][s_i]
    subject to Σ_i memory[i][s_i] ≤ limit

Exact: a dynamic program over layers that keeps, for each strategy of the last layer, the Pareto front of (memory, time)
of all choices up to it. One run answers every limit. A choice is dropped where even the least memory of the remaining
layers takes it above the largest limit. Limits: fronts hold at most as many points as there are distinct sums of
memory, which is few where memory is counted in whole units.
Source: the layer-wise search of Galvatron (Miao et al. 2022, section 3.3), whose table over memory units the fronts
replace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy for each layer, what it costs and what it holds."""

    strategies: tuple[int, ...]
    time: float
    memory: float


@dataclass(frozen=True)
class _Front:
    """Choices up to one layer that end in one strategy, more memory and less time from one to the next.

    Attributes:
        before: per point, the strategy of the layer before it.
        point: per point, where in that strategy's front it comes from.
    """

    memory: Floats
    time: Floats
    before: Ints
    point: Ints


def choose_strategies(
    memory: Floats, intra: Floats, inter: Floats, limits: Sequence[float]
) -> list[StrategyChoice | None]:
    """The fastest choice under each limit.

    Args:
        memory: [layer, strategy], ≥ 0.
        intra: [layer, strategy]; infinite where a layer cannot take a strategy.
        inter: [layer, strategy before, strategy]; the first layer's are not read.
        limits: of the sum of memory.
    Returns:
        Per limit, a choice; None where, proved, there is none.
    Raises:
        ValueError: the shapes do not fit each other, or memory is negative.
    """
    num_layers, num_strategies = memory.shape
    if intra.shape != memory.shape or inter.shape != (num_layers, num_strategies, num_strategies) or not memory.size:
        raise ValueError(f"memory {memory.shape}, intra {intra.shape} and inter {inter.shape} do not fit each other")
    if (memory < 0).any():
        raise ValueError("a strategy's memory is negative")
    least_after = np.append(np.cumsum(memory.min(axis=1)[::-1])[::-1], 0.0)
    room = max(limits, default=-np.inf) - least_after
    layers = [
        [
            _pruned(memory[0, s : s + 1], intra[0, s : s + 1], np.array([-1]), np.array([0]), room[1])
            for s in range(num_strategies)
        ]
    ]
    for layer in range(1, num_layers):
        fronts = layers[-1]
        held = np.concatenate([front.memory for front in fronts])
        before = np.repeat(np.arange(num_strategies), [len(front.memory) for front in fronts])
        point = np.concatenate([np.arange(len(front.memory)) for front in fronts])
        taken = np.concatenate([front.time for front in fronts])
        order = np.argsort(held, kind="stable")
        held, before, point, taken = held[order], before[order], point[order], taken[order]
        layers.append(
            [
                _pruned(
                    held + memory[layer, s],
                    taken + inter[layer, before, s] + intra[layer, s],
                    before,
                    point,
                    room[layer + 1],
                )
                for s in range(num_strategies)
            ]
        )
    return [_best_within(layers, limit) for limit in limits]


def _pruned(memory: Floats, time: Floats, before: Ints, point: Ints, room: float) -> _Front:
    """Of points in the order of memory, those that no other takes less memory and no more time than."""
    order = np.lexsort((time, memory)) if (memory[1:] == memory[:-1]).any() else np.arange(len(memory))
    memory, time = memory[order], time[order]
    fastest_before = np.minimum.accumulate(np.append(np.inf, time))[:-1]
    kept = (time < fastest_before) & (memory <= room)
    return _Front(memory[kept], time[kept], before[order][kept], point[order][kept])


def _best_within(layers: list[list[_Front]], limit: float) -> StrategyChoice | None:
    last = [int(np.searchsorted(front.memory, limit, side="right")) - 1 for front in layers[-1]]
    times = [front.time[at] if at >= 0 else np.inf for front, at in zip(layers[-1], last, strict=True)]
    strategy = int(np.argmin(times))
    if not np.isfinite(times[strategy]):
        return None
    at, found = last[strategy], []
    end = layers[-1][strategy]
    time, memory = float(end.time[at]), float(end.memory[at])
    for fronts in reversed(layers):
        found.append(strategy)
        front = fronts[strategy]
        strategy, at = int(front.before[at]), int(front.point[at])
    return StrategyChoice(tuple(reversed(found)), time, memory)
