"""Merging of reruns: the program's account of bytes is the schedule's, and over all places it is the optimum."""

from __future__ import annotations

import time

import numpy as np
import pytest

from paraplan.planner.memory.improvement.greedy_eviction import polish, squeeze
from paraplan.planner.memory.improvement.merge import improve_merging, merge
from paraplan.planner.memory.improvement.merge_program import MergeProgram
from paraplan.planner.memory.just_in_time import separating
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.problem import MemoryProblem
from paraplan.planner.memory.relaxations.relaxation import build_relaxation
from paraplan.planner.memory.reruns import Arrays, Ints, Residency, profile_of, with_first
from paraplan.planner.solvers.milp import SolverError, Status, solve
from tests.planner.memory.brute import least
from tests.planner.memory.graphs import chain, random_step


def step(seed: int, num_ops: int) -> MemoryProblem:
    return chain(num_ops // 2) if seed % 4 == 0 else random_step(seed, num_ops)


def all_places(arrays: Arrays) -> Ints:
    n = arrays.num_ops
    return np.array([t * n + j for t in range(n) for j in range(t) if arrays.repeats[j]], np.int64)


@pytest.mark.parametrize("seed", range(24))
def test_bytes_and_seconds_are_the_schedules(seed: int) -> None:
    arrays = Arrays(step(seed, 20))
    draw = np.random.default_rng(seed)
    places = all_places(arrays)
    for share in (0.02, 0.1, 0.4):
        chosen = with_first(arrays, places[draw.random(len(places)) < share])
        profile = profile_of(arrays, chosen)
        offered = places[draw.random(len(places)) < 0.5]
        fitting = MergeProgram(arrays, offered, chosen, profile.peak)
        assert fitting.milp.is_solution(fitting.hint)
        assert (fitting.keys(fitting.hint) == chosen).all()
        seconds = fitting.milp.evaluate(fitting.hint) * arrays.problem.compute_s
        assert seconds == pytest.approx(profile.recomputed_s)
        peak = int(profile.live.max())
        tight = MergeProgram(arrays, offered, chosen, peak - max(1, peak // 1000))
        assert not tight.milp.is_solution(tight.hint)


@pytest.mark.parametrize("seed", [6, 7, 11, 18, 19, 30, 31, 33, 34, 35])
def test_over_all_places_it_is_the_optimum(seed: int) -> None:
    arrays = Arrays(step(seed, 6))
    problem = arrays.problem
    whole = profile_of(arrays, arrays.diagonal())
    budget = max(int(0.7 * whole.peak), int(arrays.working.max()), arrays.start_bytes)
    program = MergeProgram(arrays, all_places(arrays), arrays.diagonal(), budget)
    solution = solve(program.milp, backend="mathopt-cpsat")
    best = least(problem, budget, in_order=True)
    assert best is not None, "a seed whose budget allows a schedule"
    assert solution.status is Status.OPTIMAL and solution.values is not None
    found = profile_of(arrays, program.keys(solution.values))
    assert whole.peak > budget >= found.peak
    assert found.recomputed_s == pytest.approx(best[0] - problem.compute_s)


@pytest.mark.parametrize("seed", [0, 3, 8, 10, 12, 13])
def test_what_has_no_schedule_has_no_solution(seed: int) -> None:
    arrays = Arrays(step(seed, 6))
    budget = int(0.7 * profile_of(arrays, arrays.diagonal()).peak)
    assert least(arrays.problem, budget, in_order=True) is None
    program = MergeProgram(arrays, all_places(arrays), arrays.diagonal(), budget)
    assert solve(program.milp, backend="mathopt-cpsat").status is Status.INFEASIBLE


def squeezed(seed: int, num_ops: int) -> tuple[Residency, int]:
    """A schedule and the budget it fits, of a step that does not without reruns."""
    problem = chain(num_ops // 2) if seed % 3 == 0 else random_step(seed, num_ops)
    arrays = Arrays(problem)
    whole = profile_of(arrays, arrays.diagonal())
    budget = max(int(0.7 * whole.peak), int(arrays.working.max()))
    found = squeeze(whole, budget, deadline=np.inf)
    assert found is not None and found.recomputed_s, "a seed whose budget needs reruns"
    return polish(found, budget), budget


def test_merging_finds_what_fits_and_is_better() -> None:
    better = 0
    for seed in (0, 2, 4, 8, 11):
        profile, budget = squeezed(seed, 16)
        found = improve_merging(profile, [], budget, time.perf_counter() + 0.5, seed=seed)
        problem = profile.arrays.problem
        check = evaluate(problem, freeing(problem, tuple(found.ops.tolist())))
        assert check.peak_bytes == found.peak <= budget
        assert check.recomputed_s == pytest.approx(found.recomputed_s)
        assert found.recomputed_s <= profile.recomputed_s
        better += found.recomputed_s < profile.recomputed_s
    assert better


def test_a_solver_that_answers_wrongly_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object, **__: object) -> None:
        raise SolverError("called a point optimal that breaks a row")

    monkeypatch.setattr("paraplan.planner.memory.improvement.merge.solve", wrong)
    profile, budget = squeezed(0, 16)
    assert merge(profile, np.empty(0, int), budget, time.perf_counter() + 1.0) == (profile, False)


def test_what_another_schedule_knows_is_taken_over() -> None:
    profile, budget = squeezed(2, 16)
    arrays = profile.arrays
    best, settled = merge(profile, all_places(arrays), budget, np.inf)
    assert settled and best.recomputed_s < profile.recomputed_s
    again, settled = merge(profile, best.keys, budget, np.inf)
    assert settled and again.recomputed_s == pytest.approx(best.recomputed_s)
    same, settled = merge(best, profile.keys, budget, np.inf)
    assert settled and same is best


def test_separating_instants_count_every_rerun() -> None:
    profile, budget = squeezed(0, 24)
    arrays = profile.arrays
    highest = int(profile_of(arrays, arrays.diagonal()).live.argmax())
    counted = []
    for most in (1, 3, 20):
        instants = tuple(sorted(separating(profile, {highest}, most)))
        assert highest in instants and len(instants) <= most
        relaxed = build_relaxation(arrays, instants, budget, integral=True)
        counted.append(relaxed.milp.evaluate(relaxed.encode(profile)) * arrays.problem.compute_s)
        assert solve(relaxed.milp, backend="mathopt-cpsat", time_limit_s=2.0).bound > 1.0
    assert counted == sorted(counted)
    assert counted[-1] == pytest.approx(arrays.problem.compute_s + profile.recomputed_s)
