"""Strategies proved optimal in a class, against everything in the class."""

from __future__ import annotations

import itertools

import pytest

from paraplan.baselines import MEMORY, Limits
from paraplan.baselines.kusumoto import lower_sets
from paraplan.baselines.lower_sets import LowerSet, forward_of
from paraplan.ir.errors import SolverLimitError
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.problem import MemoryProblem
from paraplan.planner.solvers.milp import Status
from paraplan.planner.solvers.milp_intervals import IntervalBuilder, solve_intervals
from tests.baselines.steps import least_in_stages, training
from tests.planner.memory.brute import least
from tests.planner.memory.graphs import random_step

LIMITS = Limits(time_s=120)
STEPS = [random_step(seed, 5) for seed in range(8)] + [training(seed, 3) for seed in range(4)]


def budgets(problem: MemoryProblem) -> range:
    whole = evaluate(problem, freeing(problem, tuple(range(len(problem.ops))))).peak_bytes
    return range(max(map(problem.working_bytes, range(len(problem.ops)))), whole + 1)


def step_s(name: str, problem: MemoryProblem, budget: int) -> float | None:
    try:
        found = MEMORY[name](problem, budget, LIMITS)
    except SolverLimitError as fault:
        assert name == "checkmate-lp" or "proved: none" in str(fault)
        return None
    if name != "checkmate-lp":
        assert found.status.value == "optimal"
        assert found.bound_s == pytest.approx(found.evaluation.step_s, rel=1e-5)
    return found.evaluation.step_s


@pytest.mark.parametrize("name", ["checkmate-ilp", "moccasin"])
@pytest.mark.parametrize("number", range(len(STEPS)))
def test_the_least_of_all_stages(name: str, number: int) -> None:
    """Equal to the class' optimum, and to that of the order given wherever no op need run twice between two others."""
    problem, same = STEPS[number], 0
    for budget in budgets(problem):
        found = step_s(name, problem, budget)
        assert found == least_in_stages(problem, budget, 3 if name == "moccasin" else None), budget
        in_order = least(problem, budget, in_order=True)
        assert found is None or (in_order is not None and in_order[0] <= found)
        same += found == (in_order and in_order[0])
    assert same >= len(budgets(problem)) - 1


def test_the_relaxation_bounds_and_its_rounding_is_legal() -> None:
    solved = 0
    for problem in STEPS:
        for budget in budgets(problem):
            best = least_in_stages(problem, budget)
            try:
                found = MEMORY["checkmate-lp"](problem, budget, LIMITS)
            except SolverLimitError:
                continue
            solved += 1
            assert best is not None and found.bound_s is not None
            assert found.bound_s <= best * (1 + 1e-7) and best <= found.evaluation.step_s
    assert solved >= len(STEPS)


def chains_of(sets: list[LowerSet], everything: LowerSet) -> list[list[LowerSet]]:
    """All strictly growing sequences of lower sets that end with everything."""
    found = []
    inner = [each for each in sets if each != everything]
    for count in range(len(inner) + 1):
        for chosen in itertools.combinations(inner, count):
            if all(a < b for a, b in itertools.pairwise(chosen)):
                found.append([*chosen, everything])
    return found


def all_lower_sets(problem: MemoryProblem, size: int, needs: tuple[frozenset[int], ...]) -> list[LowerSet]:
    found = []
    for count in range(1, size + 1):
        for chosen in itertools.combinations(range(size), count):
            inside = frozenset(chosen)
            if all(needs[op] <= inside for op in inside):
                found.append(inside)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_kusumoto_exact_is_the_best_canonical_strategy(seed: int) -> None:
    """Every chain of lower sets, its memory counted by the paper's sum; and that count is never below the peak."""
    problem = training(seed, 5)
    forward = forward_of(problem, "x")
    sets = all_lower_sets(problem, 5, forward.needs)
    assert set(sets) == set(lower_sets(forward, 1000) or ())
    priced = []
    for chosen in chains_of(sets, frozenset(range(5))):
        kept: frozenset[int] = frozenset()
        most, before = 0, frozenset[int]()
        for inside in chosen:
            cached = sum(problem.tensors[t].nbytes for t in kept)
            most = max(most, cached + forward.local_bytes(before, inside))
            kept |= forward.boundary(inside)
            before = inside
        evaluation = evaluate(problem, freeing(problem, forward.ops(chosen)))
        assert evaluation.peak_bytes <= most
        priced.append((evaluation.step_s, most))
    compared = 0
    for budget in budgets(problem):
        best = min((seconds for seconds, most in priced if most <= budget), default=None)
        try:
            found = MEMORY["kusumoto-exact"](problem, budget, LIMITS).evaluation.step_s
        except SolverLimitError:
            found = None
        try:
            approximate = MEMORY["kusumoto-approx"](problem, budget, LIMITS).evaluation.step_s
        except SolverLimitError:
            approximate = None
        assert (found is None) == (best is None)
        if found is not None:
            assert found <= best  # less where pruning drops a repeat nobody reads
            compared += 1
        assert approximate is None or (found is not None and approximate >= found)
    assert compared


def test_exact_lower_sets_give_up_by_name() -> None:
    """Twelve independent ops have 4096 lower sets."""
    problem = training(0, 4)
    assert lower_sets(forward_of(problem, "x"), 2) is None


def test_intervals_pack() -> None:
    """Three jobs of length 2 in [0, 4), two at a time by demand, one left out at a price; by hand: 1."""
    builder = IntervalBuilder()
    prices = (5, 1, 4)
    present = [builder.literal() for _ in prices]
    demands = {}
    for literal in present:
        start = builder.integer((0, 1))
        end = builder.ranged(0, 3)
        builder.row({start: 1, end: -1}, -2)
        demands[builder.interval(start, end, literal)] = 2
    builder.capacity(demands, 4)
    missing = {literal: -price for literal, price in zip(present, prices, strict=True)}
    builder.minimise(missing)
    found = solve_intervals(builder, time_limit_s=30)
    assert found.status is Status.OPTIMAL
    assert (found.objective, found.bound) == (-9, -9)
    assert [found.values[literal] for literal in present] == [1, 0, 1]
    builder.row({present[0]: 1}, 0)
    builder.row({present[0]: -1}, -1)
    assert solve_intervals(builder).status is Status.INFEASIBLE
