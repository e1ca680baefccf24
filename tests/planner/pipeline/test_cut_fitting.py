"""The shortest cut that fits, against all cuts."""

from __future__ import annotations

import itertools
import random

import pytest

from paraplan.planner.pipeline.cuts.cut_fitting import cut_fitting


@pytest.mark.parametrize("seed", range(200))
def test_no_cut_that_fits_has_a_shorter_longest_stage(seed: int) -> None:
    draw = random.Random(seed)
    count, positions = draw.randint(1, 8), draw.randint(1, 4)
    seconds = [float(draw.randint(0, 5)) for _ in range(count)]
    held = [draw.randint(0, 5) for _ in range(count)]
    room = [draw.randint(2, 14) for _ in range(positions)]
    tail = draw.choice([None, draw.randint(0, count - 1)])

    def fits(position: int, first: int, stop: int) -> bool:
        return sum(held[first:stop]) <= room[position]

    best: float | None = None
    for inner in itertools.combinations(range(1, count), positions - 1):
        cut = list(itertools.pairwise((0, *inner, count)))
        if (tail is None or cut[-1][0] <= tail) and all(fits(at, *bound) for at, bound in enumerate(cut)):
            longest = max(sum(seconds[slice(*bound)]) for bound in cut)
            best = longest if best is None else min(best, longest)
    found = cut_fitting(seconds, positions, fits, tail)
    assert (found is None) == (best is None)
    if found is not None:
        assert [first for first, _ in found] == [0, *(stop for _, stop in found[:-1])] and found[-1][1] == count
        assert all(fits(at, *bound) for at, bound in enumerate(found)) and (tail is None or found[-1][0] <= tail)
        assert max(sum(seconds[slice(*bound)]) for bound in found) == best
