"""Recomputing and copying together: never worse than either alone, true bounds, and better where both help."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from paraplan.ir.errors import SolverLimitError
from paraplan.planner.memory.copy_times import Copies, actions_of, fit
from paraplan.planner.memory.memory_schedule import evaluate
from paraplan.planner.memory.plan_memory import MemoryLimits, plan_memory
from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor, Tier
from paraplan.planner.memory.relaxations.relaxation import build_relaxation
from paraplan.planner.memory.reruns import Arrays, profile_of, with_first
from paraplan.planner.solvers.milp import solve
from tests.planner.memory.graphs import chain, random_step

LIMITS = MemoryLimits(time_s=6.0, rounds=3)


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_beats_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    speed = draw.choice((0.5, 2.0, 10.0))
    tier = Tier("host", 10**6, speed, 1.5 * speed, latency_s=draw.choice((0.0, 0.1)))
    problem = replace(chain(8, nbytes=2) if seed % 2 else random_step(seed, 12), tiers=(tier,))
    arrays, n = Arrays(problem), len(problem.ops)
    pairs = [t * n + j for t in range(n) for j in range(t) if draw.random() < draw.choice((0.0, 0.05))]
    keys = with_first(arrays, np.array(pairs, np.int64))
    stays = tuple((t, int(k)) for k in keys for t in problem.ops[int(k) % n].reads if draw.random() < 0.4)
    away = profile_of(arrays, keys, Copies(tier, stays))
    budget = next(b for b in range(int(arrays.working.max()), 10**6) if fit(away, b) is not None)
    placed = fit(away, budget)
    assert placed is not None
    found = evaluate(problem, actions_of(away, placed))
    instants = tuple(sorted(draw.sample(range(n), draw.randint(1, 4))))
    budget = max(budget, found.peak_bytes)
    relaxed = solve(build_relaxation(arrays, instants, budget, problem.tiers).milp, time_limit_s=20)
    assert relaxed.bound * problem.compute_s <= found.step_s * (1 + 1e-6)


@pytest.mark.parametrize(("layers", "speed"), [(6, 0.2), (6, 1.0), (8, 0.2), (8, 5.0), (8, 100.0)])
def test_together_is_never_worse_than_either(layers: int, speed: float) -> None:
    plain = chain(layers, nbytes=4)
    both = replace(plain, tiers=(Tier("host", 1000, speed, speed),))
    once = replace(both, ops=tuple(replace(op, repeatable=False) for op in both.ops))
    for budget in (20, 24):
        steps = []
        for problem in (plain, once):
            try:
                steps.append(plan_memory(problem, budget, LIMITS).evaluation.step_s)
            except SolverLimitError:
                steps.append(np.inf)
        found = plan_memory(both, budget, LIMITS)
        assert found.evaluation.peak_bytes <= budget
        assert found.bound_s <= found.evaluation.step_s <= min(steps) * (1 + 1e-9)
        if speed == 100.0:
            assert found.evaluation.step_s == pytest.approx(plain.compute_s)


def test_together_is_better_where_one_tensor_is_dear_and_one_slow_to_move() -> None:
    """a is dear to make again and small; b is cheap to make again and too large to move in time."""
    ops = (
        MemOp("a", 10.0, (), (0,)),
        MemOp("b", 1.0, (), (1,)),
        MemOp("large", 6.0, (), (2,)),
        MemOp("end", 1.0, (2,), (3,)),
        MemOp("c", 6.0, (3,), (4,)),
        MemOp("use", 1.0, (0, 1, 4), (5,)),
    )
    tensors = (
        MemTensor(4, 0),
        MemTensor(40, 1),
        MemTensor(50, 2),
        MemTensor(1, 3),
        MemTensor(1, 4),
        MemTensor(1, 5, True),
    )
    plain = MemoryProblem(ops, tensors)
    both = replace(plain, tiers=(Tier("host", 1000, 8.0, 8.0),))
    once = replace(both, ops=tuple(replace(op, repeatable=False) for op in ops))
    assert plan_memory(plain, 51, LIMITS).evaluation.step_s == 36.0
    assert plan_memory(once, 51, LIMITS).evaluation.step_s > 26.0
    found = plan_memory(both, 51, LIMITS)
    assert found.evaluation.step_s == 26.0
    assert found.evaluation.tier_bytes == (4,) and found.bound_s <= 26.0 * (1 + 1e-9)


def test_a_full_tier_takes_no_more() -> None:
    problem = replace(chain(6, nbytes=4), tiers=(Tier("host", 4, 100.0, 100.0),))
    found = plan_memory(problem, 24, LIMITS)
    assert found.evaluation.tier_bytes[0] <= 4
    assert found.evaluation.step_s >= found.bound_s
