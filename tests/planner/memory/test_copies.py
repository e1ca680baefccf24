"""Copies placed: the schedule runs, its peak is what was reckoned, and with a fast enough tier nobody waits."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from paraplan.planner.memory.copy_times import Copies, actions_of, fit
from paraplan.planner.memory.memory_schedule import evaluate
from paraplan.planner.memory.problem import Tier
from paraplan.planner.memory.reruns import Arrays, profile_of, with_first
from tests.planner.memory.graphs import chain, random_step


@pytest.mark.parametrize("seed", range(30))
def test_stays_anywhere_run_within_the_peak(seed: int) -> None:
    draw = random.Random(seed)
    speed = draw.choice((0.5, 3.0, 1e6))
    tier = Tier("host", 10**6, speed, speed, latency_s=draw.choice((0.0, 0.1)))
    problem = chain(8, nbytes=2) if seed % 2 else random_step(seed, 12)
    arrays, n = Arrays(problem), len(problem.ops)
    pairs = [t * n + j for t in range(n) for j in range(t) if draw.random() < draw.choice((0.0, 0.1))]
    keys = with_first(arrays, np.array(pairs, np.int64))
    whole = profile_of(arrays, keys)
    stays = [(t, int(k)) for k in keys for t in problem.ops[int(k) % n].reads if draw.random() < 0.5]
    away = profile_of(arrays, keys, Copies(tier, tuple(stays)))
    problem = replace(problem, tiers=(tier,))
    assert away.peak <= whole.peak
    for budget in range(int(arrays.working.max()), whole.peak + 2):
        placed = fit(away, budget)
        if placed is None:
            assert budget < whole.peak
            continue
        found = evaluate(problem, actions_of(away, placed))
        assert found.peak_bytes <= max(budget, arrays.start_bytes)
        assert found.recomputed_s == pytest.approx(away.recomputed_s)
        if budget >= away.peak:
            assert found.waited_s <= 1e-9, (budget, away.peak)
