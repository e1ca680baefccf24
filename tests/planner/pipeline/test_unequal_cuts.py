"""Cuts of a chain over unequal devices, against every cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from paraplan.planner.pipeline.cuts.stage_cuts import Bounds
from paraplan.planner.pipeline.cuts.unequal_cuts import cut_unequal, stage_costs


def every_cut(segments: int, stages: int, tail: int) -> Iterator[Bounds]:
    for points in itertools.combinations(range(1, segments), stages - 1):
        if stages == 1 or points[-1] <= tail:
            yield tuple(itertools.pairwise((0, *points, segments)))


def slowest_s(seconds: list[list[float]], cut: Bounds) -> float:
    return max(sum(each[slice(*bound)]) for each, bound in zip(seconds, cut, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_the_slowest_stage_takes_least_of_all_cuts_that_fit(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        n = draw.randint(1, 8)
        stages, tail = draw.randint(1, n), draw.randint(0, n)
        speeds = [draw.choice([1.0, 2.0, 5.0]) for _ in range(stages)]
        chain = [draw.choice([0.0, 1.0, draw.random()]) for _ in range(n)]
        seconds = [[each * speed for each in chain] for speed in speeds]
        held = [[draw.random() for _ in range(n)] for _ in range(stages)]
        room = [draw.choice([float(n), draw.random() * n / 2]) for _ in range(stages)]
        costs = [
            stage_costs(each) + np.where(stage_costs(own) <= most, 0, np.inf)
            for each, own, most in zip(seconds, held, room, strict=True)
        ]
        cuts = [
            cut
            for cut in every_cut(n, stages, tail)
            if all(sum(held[stage][slice(*bound)]) <= room[stage] for stage, bound in enumerate(cut))
        ]
        found = cut_unequal(costs, tail)
        assert (found is None) == (not cuts)
        if found is not None:
            assert found in cuts
            least = min(slowest_s(seconds, cut) for cut in cuts)
            assert slowest_s(seconds, found) == pytest.approx(least, rel=1e-8, abs=1e-12)
