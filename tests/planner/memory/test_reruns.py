"""Sets of reruns: whatever the set, it is a schedule that runs, and its bytes are the replay's."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor
from paraplan.planner.memory.reruns import Arrays, profile_of, with_first, without_dead
from tests.planner.memory.graphs import chain, random_step


@pytest.mark.parametrize("seed", range(40))
def test_any_set_is_a_schedule_with_these_bytes(seed: int) -> None:
    draw = random.Random(seed)
    problem = chain(draw.randint(1, 6)) if seed % 2 else random_step(seed, draw.randint(2, 12))
    arrays, n = Arrays(problem), len(problem.ops)
    pairs = [t * n + j for t in range(n) for j in range(t) if draw.random() < draw.choice((0.05, 0.3, 0.9))]
    found = profile_of(arrays, with_first(arrays, np.array(pairs, np.int64)))
    check = evaluate(problem, freeing(problem, tuple(found.ops.tolist())))
    assert found.peak == check.peak_bytes
    assert found.recomputed_s == pytest.approx(check.recomputed_s)
    leaner = without_dead(found)
    again = evaluate(problem, freeing(problem, tuple(leaner.ops.tolist())))
    assert again.peak_bytes == leaner.peak <= found.peak and leaner.recomputed_s <= found.recomputed_s


def test_a_kept_result_made_again_lasts_to_the_end() -> None:
    ops = (MemOp("a", 1.0, (), (0,)), MemOp("b", 1.0, (), (1,)), MemOp("c", 1.0, (1,), (2,)))
    problem = MemoryProblem(ops, (MemTensor(4, 0, kept=True), MemTensor(2, 1), MemTensor(1, 2, kept=True)))
    arrays = Arrays(problem)
    found = profile_of(arrays, with_first(arrays, np.array([2 * 3 + 0], np.int64)))
    assert found.live.tolist() == [4, 2, 6, 7]
    assert without_dead(found).recomputed_s == 1.0
