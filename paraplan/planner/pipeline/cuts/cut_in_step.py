"""Where a chain is cut so that what positions do side by side takes as long at each.

Positions that hold several stages do a round of microbatches in one after another: while one is at its v-th stage, so
are most. A microbatch takes about the sum over v of the longest v-th stage then, however loads even out over a step
(`balanced_cuts`). Where the v-th stages of all positions are a part of the chain, the least such sum is found: for
each length that a stage may have, as far as that many stages of no more reach from any segment; and a dynamic program
over v (exact, but for lengths alike to a hundredth, which count as the longest of them). Then segments move as long as
loads get evener, within these lengths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paraplan.planner.pipeline.cuts.balanced_cuts import moved
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds, cut_evenly

ALIKE = 0.01
"""By how much lengths differ that count as one."""
FEW = 3
"""Segments a stage up to which it is looked for: stages of more are even enough to be balanced."""
LONGER = 2
"""Segments in a stage beyond what it has on the average, at most."""

Floats = npt.NDArray[np.float64]


def cut_in_step(seconds: Sequence[float], positions: Sequence[Sequence[int]], tail: int) -> Bounds | None:
    """The cut whose v-th stages are shortest in sum.

    Args:
        seconds: of every segment.
        positions: per position, its stages, numbered along the chain.
        tail: from this segment on all are in the last stage.
    Returns:
        [first, stop) of every stage; None where positions hold one stage each, a stage is at two, the v-th ones of all
        are no part of the chain, or there are too few segments, or more than `FEW` a stage.
    """
    count, rounds = len(positions), len(positions[0])
    if rounds == 1 or len(seconds) > FEW * count * rounds:
        return None
    if any(
        sorted(mine[v] for mine in map(sorted, positions)) != list(range(v * count, (v + 1) * count))
        for v in range(rounds)
    ):
        return None
    last = min(tail, len(seconds) - 1)
    units = [*seconds[:last], sum(seconds[last:])]
    parts = _parts(np.array(units), count, rounds)
    if parts is None:
        return None
    bounds: list[tuple[int, int]] = []
    for first, stop in parts:
        part = cut_evenly(units[first:stop], count, stop - first)
        assert part is not None
        bounds += [(first + a, first + b) for a, b in part]
    bounds[-1] = bounds[-1][0], len(seconds)
    stages = [sum(seconds[slice(*bound)]) for bound in bounds]
    limits = [max(stages[stage - stage % count :][:count]) for stage in range(len(stages))]
    return moved(seconds, positions, tuple(bounds), tail, limits)


def _parts(units: Floats, count: int, rounds: int) -> Bounds | None:
    """Parts of a chain, in each of which so many stages are, whose longest ones are shortest in sum; None where there
    are too few segments."""
    size, before = len(units), np.concatenate(([0.0], np.cumsum(units)))
    if size < count * rounds:
        return None
    lengths, every = _lengths(before, math.ceil(size / (count * rounds)) + LONGER), np.arange(size + 1)
    reach = np.array([_reached(before, length, count) for length in lengths])
    least = np.where(every == size, 0.0, np.inf)
    chosen = []
    for left in range(rounds):
        stop = np.minimum(reach, size - count * left)
        sums = np.where(stop - every >= count, lengths[:, None] + least[stop], np.inf)
        chosen.append((sums.argmin(0), stop))
        least = sums.min(0)
    if not np.isfinite(least[0]):
        return None
    ends = [0]
    for at, stop in reversed(chosen):
        ends.append(int(stop[at[ends[-1]], ends[-1]]))
    return tuple(itertools.pairwise(ends))


def _lengths(before: Floats, most: int) -> Floats:
    """What up to so many segments take, and the longest alone; of those alike the longest."""
    found = [before[n:] - before[:-n] for n in range(1, min(most, len(before) - 1) + 1)]
    kept: list[float] = []
    for length in np.unique(np.concatenate(found)):
        if kept and length <= kept[-1] * (1 + ALIKE):
            kept[-1] = length
        else:
            kept.append(length)
    return np.array(kept)


def _reached(before: Floats, length: float, count: int) -> npt.NDArray[np.int64]:
    """Per segment, where so many stages end that begin there and are filled up to a length."""
    filled = np.searchsorted(before, before + length * (1 + 1e-9), side="right") - 1
    at = np.arange(len(before))
    for _ in range(count):
        at = filled[at]
    return at
