"""Windows of a schedule decided anew: what they find fits and is no worse, and one of all stages is the optimum."""

from __future__ import annotations

import numpy as np
import pytest

from paraplan.planner.memory.realise import separating
from paraplan.planner.memory.relaxation import build_relaxation
from paraplan.planner.memory.reruns import Arrays, Profile, profile_of
from paraplan.planner.memory.schedule import evaluate, freeing
from paraplan.planner.memory.squeeze import polish, squeeze
from paraplan.planner.memory.window_program import WindowProgram
from paraplan.planner.memory.windows import improve_windows, solve_window
from paraplan.planner.milp import solve
from tests.planner.memory.brute import least
from tests.planner.memory.graphs import chain, random_step


def squeezed(seed: int, num_ops: int) -> tuple[Profile, int] | None:
    """A schedule and the budget it fits, of a step that does not without reruns."""
    problem = chain(num_ops // 2) if seed % 3 == 0 else random_step(seed, num_ops)
    arrays = Arrays(problem)
    whole = profile_of(arrays, arrays.diagonal())
    budget = max(int(0.7 * whole.peak), int(arrays.working.max()))
    found = squeeze(whole, budget, deadline=np.inf)
    return None if found is None or not found.recomputed_s else (polish(found, budget), budget)


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_is_a_solution_of_each_of_its_windows(seed: int) -> None:
    made = squeezed(seed, 24)
    assert made is not None, "every seed's budget needs reruns"
    profile, budget = made
    n = profile.arrays.num_ops
    for first, last in ((0, n - 1), (n // 3, n // 2), (n // 2, n - 1), (5, 5)):
        inside = (profile.stages >= first) & (profile.stages <= last) & profile.rerun
        places = list(zip(profile.stages[inside].tolist(), profile.ops[inside].tolist(), strict=True))
        program = WindowProgram(profile, first, last, budget, 40, places)
        assert program.milp.is_solution(program.hint)
        seconds = program.milp.evaluate(program.hint) * profile.arrays.problem.compute_s
        assert seconds == pytest.approx(profile.arrays.time_s[profile.ops[inside]].sum())
        assert (program.keys(program.hint) == profile.keys).all()


def test_windows_find_what_fits_and_is_better() -> None:
    better = 0
    for seed in range(8):
        made = squeezed(seed, 14)
        if made is None:
            continue
        profile, budget = made
        found = improve_windows(profile, budget, deadline=np.inf)
        problem = profile.arrays.problem
        check = evaluate(problem, freeing(problem, tuple(found.ops.tolist())))
        assert check.peak_bytes == found.peak <= budget
        assert check.recomputed_s == pytest.approx(found.recomputed_s)
        assert found.recomputed_s <= profile.recomputed_s
        better += found.recomputed_s < profile.recomputed_s
    assert better


@pytest.mark.parametrize("seed", [7, 11, 19, 20, 34, 35, 41, 44, 46, 49, 50, 52])
def test_one_window_of_all_stages_is_the_optimum(seed: int) -> None:
    made = squeezed(seed, 6)
    assert made is not None, "a seed whose budget needs reruns"
    profile, budget = made
    problem = profile.arrays.problem
    best = least(problem, budget, in_order=True)
    assert best is not None
    found = profile
    while (better := solve_window(found, 0, len(problem.ops) - 1, budget, np.inf)) is not None:
        found = better
    assert found.recomputed_s == pytest.approx(best[0] - problem.compute_s)


def test_separating_instants_count_every_rerun() -> None:
    made = squeezed(0, 24)
    assert made is not None
    profile, budget = made
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
