"""The cut of a chain into one stage a position whose longest stage is shortest, of those whose stages all fit.

A stage that fits does so with fewer segments as well, and one that is short enough stays so. Whether there is a cut
whose stages fit and take no longer than a limit is seen by filling positions from the first on, each with as many
segments as it takes; with fewer only where the next would be left without one. The least limit is one of the chain's
own sums, found by bisection: exact.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence

from paraplan.planner.pipeline.cuts.stage_cuts import Bounds

MOST = 500
"""Positions up to which it is looked for."""
ROUNDING = 1e-12
"""Of a sum, how far it may be from itself summed otherwise."""


def cut_fitting(
    seconds: Sequence[float], positions: int, fits: Callable[[int, int, int], bool], tail: int | None = None
) -> Bounds | None:
    """The cut.

    Args:
        seconds: of every segment.
        positions: how many.
        fits: of a position, and a stage's first segment and that after its last one, whether it fits.
        tail: from this segment on all are in the last stage; None for the last one.
    Returns:
        [first, stop) of every stage; None where no cut fits, and of more than `MOST` positions.
    """
    count = len(seconds)
    tail = count - 1 if tail is None else min(tail, count - 1)
    sums = [0.0, *itertools.accumulate(seconds)]

    def filled(limit: float) -> Bounds | None:
        vain: set[tuple[int, int]] = set()

        def holds(position: int, first: int, stop: int) -> bool:
            return sums[stop] - sums[first] <= limit * (1 + ROUNDING) and fits(position, first, stop)

        def from_on(position: int, first: int) -> list[tuple[int, int]] | None:
            if position == positions - 1:
                return [(first, count)] if first < count and holds(position, first, count) else None
            most, stop = tail - (positions - 2 - position), first
            while stop < most and holds(position, first, stop + 1):
                stop += 1
            for each in range(stop, first, -1):  # nearly always the first
                if (position + 1, each) not in vain and (rest := from_on(position + 1, each)) is not None:
                    return [(first, each), *rest]
            vain.add((position, first))
            return None

        found = from_on(0, 0)
        return None if found is None else tuple(found)

    if positions > MOST or filled(sums[-1]) is None:
        return None
    limits = sorted({sums[stop] - sums[first] for first in range(count) for stop in range(first + 1, count + 1)})
    return filled(limits[bisect_left(limits, True, key=lambda limit: filled(limit) is not None)])
