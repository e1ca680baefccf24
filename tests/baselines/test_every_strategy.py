"""What every strategy promises: legal schedules, the evaluation's costs, within the budget, never below the optimum."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paraplan.baselines import MEMORY, OFFLOADING, UNBUDGETED, Limits
from paraplan.ir.errors import ConstraintError, InfeasibleError, ParaplanError, SolverLimitError
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.problem import MemoryProblem
from tests.baselines.steps import training, with_tier
from tests.planner.memory.brute import least
from tests.planner.memory.graphs import chain, random_step

LIMITS = Limits(time_s=60)
NEEDS_TIER = ("vdnn-all", "vdnn-conv", "swapadvisor", "pofo")
ANY_GRAPH = ("checkmate-ilp", "checkmate-lp", "treewidth", "moccasin", "dtr", "coop", "capuchin", "swapadvisor")
each = pytest.mark.parametrize("name", MEMORY)


def whole_peak(problem: MemoryProblem) -> int:
    return evaluate(problem, freeing(problem, tuple(range(len(problem.ops))))).peak_bytes


def planned(name: str, problem: MemoryProblem, budget_bytes: int) -> float | None:
    """The step of a strategy's answer, checked; None where it says it has none."""
    try:
        found = MEMORY[name](problem, budget_bytes, LIMITS)
    except (SolverLimitError, InfeasibleError):
        return None
    assert found.evaluation == evaluate(problem, found.actions)
    assert name in UNBUDGETED or found.evaluation.peak_bytes <= budget_bytes
    if found.bound_s is not None:
        assert found.bound_s <= found.evaluation.step_s * (1 + 1e-9)
    again = MEMORY[name](problem, budget_bytes, LIMITS)
    assert name == "swapadvisor" or again.actions == found.actions
    return found.evaluation.step_s if found.evaluation.peak_bytes <= budget_bytes else None


def steps_for(name: str) -> list[MemoryProblem]:
    found = [training(seed, 3) for seed in range(6)]
    if name in ANY_GRAPH:
        found += [random_step(seed, 5) for seed in range(4)]
    return found


@each
def test_never_below_the_optimum(name: str) -> None:
    """Against everything that recomputation can do; what copies is compared where there is no tier."""
    solved = tried = 0
    for problem in steps_for(name):
        if name in NEEDS_TIER:
            problem = with_tier(problem, 0.7)
        low = max(map(problem.working_bytes, range(len(problem.ops))))
        for budget in range(low, whole_peak(problem) + 1):
            try:
                step_s = planned(name, problem, budget)
            except ConstraintError:
                continue  # an op of a class it is about is missing, or no cut
            tried += 1
            solved += step_s is not None
            if step_s is not None and problem.tiers:
                assert step_s >= problem.compute_s - 1e-9
            elif step_s is not None:
                best = least(problem, budget)
                assert best is not None and step_s >= best[0] - 1e-9
    assert solved and tried >= 5


@each
def test_a_budget_for_everything_costs_nothing(name: str) -> None:
    problem = training(1, 5)
    problem = with_tier(problem, 1e-6) if name in OFFLOADING else problem
    step_s = planned(name, problem, 2 * whole_peak(problem))
    if name in ("chen-sqrt", "revolve"):  # the one always recomputes, the other keeps nothing inside blocks
        assert step_s is not None and step_s <= problem.compute_s + sum(
            op.time_s for op in problem.ops if not op.backward
        )
    else:
        assert step_s == pytest.approx(problem.compute_s, rel=1e-5)


@each
def test_on_a_chain_memory_falls(name: str) -> None:
    problem = chain(9)
    problem = replace(problem, ops=tuple(replace(op, name=f"conv_{op.name}") for op in problem.ops))
    problem = with_tier(problem, 0.4) if name in OFFLOADING else problem
    found = MEMORY[name](problem, 8, LIMITS)
    assert found.evaluation.peak_bytes <= 8 < whole_peak(problem)
    assert found.notes


@each
def test_what_nothing_can_meet_is_infeasible(name: str) -> None:
    problem = chain(4)
    problem = replace(problem, ops=tuple(replace(op, name=f"conv_{op.name}") for op in problem.ops))
    problem = with_tier(problem, 0.4) if name in OFFLOADING else problem
    with pytest.raises(InfeasibleError, match=r"op \d+ \(conv_B\d\) alone needs 4 bytes"):
        MEMORY[name](problem, 3, LIMITS)


@pytest.mark.parametrize("name", [name for name in MEMORY if name not in ANY_GRAPH])
def test_a_step_without_a_backward_is_refused(name: str) -> None:
    with pytest.raises(ConstraintError, match="marked backward"):
        MEMORY[name](with_tier(random_step(0, 5), 1.0), 1000, LIMITS)


@pytest.mark.parametrize("name", NEEDS_TIER)
def test_copying_needs_a_tier(name: str) -> None:
    with pytest.raises(ConstraintError, match="the problem has none"):
        MEMORY[name](training(3, 3), 1000, LIMITS)


@each
def test_what_must_not_be_repeated_is_not(name: str) -> None:
    """Evaluation refuses schedules that do; every budget is tried."""
    solved = 0
    for seed in range(3):
        problem = training(seed, 4)
        once = tuple(replace(op, repeatable=index != 1) for index, op in enumerate(problem.ops))
        problem = replace(problem, ops=once)
        problem = with_tier(problem, 0.7) if name in OFFLOADING else problem
        low = max(map(problem.working_bytes, range(len(problem.ops))))
        for budget in range(low, whole_peak(problem) + 1, 3):
            try:
                solved += planned(name, problem, budget) is not None
            except ConstraintError:
                solved += 1
    assert solved


def test_names() -> None:
    assert set(MEMORY) == {
        *("chen-sqrt", "chen-greedy", "revolve", "divide-conquer", "rotor", "checkmate-ilp", "checkmate-lp"),
        *("kusumoto-exact", "kusumoto-approx", "treewidth", "moccasin", "dtr", "coop", "vdnn-all", "vdnn-conv"),
        *("capuchin", "superneurons", "swapadvisor", "pofo"),
    }
    assert UNBUDGETED | OFFLOADING <= set(MEMORY)
    assert issubclass(SolverLimitError, ParaplanError)
