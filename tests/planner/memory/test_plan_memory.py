"""Plans within a budget: the optimum of small steps, true bounds, and infeasible only where nothing exists."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.ir.errors import InfeasibleError
from paraplan.planner.memory.answer import MemoryAnswer, MemoryStatus
from paraplan.planner.memory.improvement import exact
from paraplan.planner.memory.improvement.exact import search_states
from paraplan.planner.memory.improvement.greedy_eviction import polish, squeeze
from paraplan.planner.memory.improvement.improve import improve
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.plan_memory import MemoryLimits, plan_memory
from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor
from paraplan.planner.memory.relaxations import relaxation
from paraplan.planner.memory.relaxations.relaxation import build_relaxation, useful
from paraplan.planner.memory.reruns import Arrays, profile_of, with_first, without_dead
from paraplan.planner.solvers.milp import Status, solve
from tests.planner.memory.brute import least
from tests.planner.memory.graphs import chain, random_step, trained_chain

LIMITS = MemoryLimits(time_s=20.0, rounds=5)


def check(problem: MemoryProblem, budget: int, answer: MemoryAnswer) -> None:
    """What an answer says is so."""
    again = evaluate(problem, answer.actions)
    assert again == answer.evaluation and again.peak_bytes <= budget
    assert answer.bound_s <= again.step_s and 0 <= answer.gap < 1


def budgets(problem: MemoryProblem) -> range:
    """From below what any op needs to all that is ever needed."""
    ops = range(len(problem.ops))
    return range(
        max(map(problem.working_bytes, ops)) - 1, evaluate(problem, freeing(problem, tuple(ops))).peak_bytes + 1
    )


@pytest.mark.parametrize("problem", [chain(2), chain(4), chain(5), *(random_step(seed, 6) for seed in range(8))])
def test_the_optimum_of_small_steps_at_every_budget(problem: MemoryProblem) -> None:
    for budget in budgets(problem):
        best = least(problem, budget, in_order=True) or least(problem, budget)
        if best is None:
            with pytest.raises(InfeasibleError, match=str(budget)):
                plan_memory(problem, budget, LIMITS)
            continue
        found = plan_memory(problem, budget, LIMITS)
        check(problem, budget, found)
        assert found.evaluation.step_s == pytest.approx(best[0]), budget
        assert found.status is MemoryStatus.OPTIMAL and found.bound_s <= best[0] + 1e-9


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 6), st.floats(0.4, 1.0))
def test_a_bound_is_below_the_optimum(seed: int, num_ops: int, share: float) -> None:
    problem = random_step(seed, num_ops)
    budget = round(share * budgets(problem).stop)
    best = least(problem, budget, in_order=True)
    if best is not None:
        found = plan_memory(problem, budget, LIMITS)
        check(problem, budget, found)
        assert found.bound_s <= best[0] * (1 + 1e-9) <= found.evaluation.step_s * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_every_schedule_is_a_point_of_the_relaxation(seed: int) -> None:
    draw = random.Random(seed)
    problem = chain(6) if seed % 3 == 0 else random_step(seed, 12)
    arrays, n = Arrays(problem), len(problem.ops)
    pairs = [t * n + j for t in range(n) for j in range(t) if draw.random() < draw.choice((0.02, 0.2))]
    profile = without_dead(profile_of(arrays, with_first(arrays, np.array(pairs, np.int64))))
    instants = tuple(sorted(draw.sample(range(n), draw.randint(1, 5))))
    relaxed = build_relaxation(arrays, instants, profile.peak, integral=seed % 2 == 0)
    point = relaxed.encode(profile)
    assert relaxed.milp.is_solution(point)
    assert relaxed.milp.evaluate(point) * problem.compute_s <= problem.compute_s + profile.recomputed_s + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_every_schedule_is_a_point_where_reruns_need_nothing(seed: int) -> None:
    """A backward of many ops with a parameter's gradient each, which an update reads: all of it may be made again."""
    draw = random.Random(seed)
    problem = trained_chain(10)
    arrays, n = Arrays(problem), len(problem.ops)
    able = [j for j in range(n) if problem.ops[j].repeatable]
    pairs = [t * n + j for t in range(n) for j in able if j < t and draw.random() < draw.choice((0.02, 0.2))]
    profile = without_dead(profile_of(arrays, with_first(arrays, np.array(pairs, np.int64))))
    instants = tuple(sorted(draw.sample(range(n), 4)))
    relaxed = build_relaxation(arrays, instants, profile.peak, integral=True, every=seed % 2 == 0)
    point = relaxed.encode(profile)
    assert relaxed.milp.is_solution(point)
    assert relaxed.milp.evaluate(point) * problem.compute_s <= problem.compute_s + profile.recomputed_s + 1e-9


def test_late_instants_have_columns_of_what_is_left() -> None:
    """Parameters' gradients wait for their updates, and to make one again takes the whole step."""
    problem = trained_chain(40)
    arrays = Arrays(problem)
    late = max(index for index, op in enumerate(problem.ops) if op.backward) - 4
    budget = int(0.6 * profile_of(arrays, arrays.diagonal()).peak)
    relaxed = build_relaxation(arrays, (40, late), budget, integral=True)
    forward = arrays.maker < 40
    assert int((relaxed.resident[0] >= 0)[forward].sum()) >= 40
    assert int((relaxed.resident[1] >= 0)[forward].sum()) < 12
    assert int((useful(arrays, late) & forward).sum()) >= 40


@pytest.mark.parametrize("seed", range(10))
def test_a_bound_is_below_the_optimum_where_reruns_need_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaxation, "_BEHIND", 1)
    problem = trained_chain(2, seed)
    arrays = Arrays(problem)
    draw = random.Random(seed)
    budget = draw.choice(budgets(problem)[:-1])
    best = least(problem, budget, in_order=True)
    instants = tuple(sorted(draw.sample(range(arrays.num_ops), 3)))
    relaxed = build_relaxation(arrays, instants, budget, integral=True, every=True).milp
    bound = solve(relaxed, backend="mathopt-cpsat").bound
    assert best is None or bound * problem.compute_s <= best[0] * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_a_relaxation_has_one_optimum_with_integers_alone_and_without(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    problem = chain(10) if seed == 0 else random_step(seed, 24)
    arrays = Arrays(problem)
    budget = max(round(0.6 * budgets(problem).stop), int(arrays.working.max()))
    instants = tuple(sorted(draw.sample(range(arrays.num_ops), 4)))
    monkeypatch.setattr(relaxation, "add_bursts", lambda *given: np.full_like(given[3], -1))
    mixed = solve(build_relaxation(arrays, instants, budget).milp)
    clauses = solve(build_relaxation(arrays, instants, budget, integral=True).milp, backend="mathopt-cpsat")
    assert mixed.status is clauses.status
    assert clauses.objective == pytest.approx(mixed.objective, rel=1e-6)
    assert clauses.bound <= mixed.objective * (1 + 1e-6)


def test_bytes_inside_bursts_raise_the_bound_and_keep_it_true() -> None:
    """At one instant each, against the relaxation without them and the optimum."""
    raised = 0
    for seed in range(24):
        problem = chain(5) if seed % 4 == 0 else random_step(seed, 6)
        arrays = Arrays(problem)
        draw = random.Random(seed)
        budget = draw.choice(budgets(problem)[1:])
        best = least(problem, budget, in_order=True)
        instants = tuple(sorted(draw.sample(range(arrays.num_ops), 2)))
        without = solve(build_relaxation(arrays, instants, budget).milp)
        inside = solve(build_relaxation(arrays, instants, budget, integral=True).milp, backend="mathopt-cpsat")
        assert inside.bound >= without.objective * (1 - 1e-6) or without.status is not Status.OPTIMAL
        if best is not None:
            assert inside.bound * problem.compute_s <= best[0] * (1 + 1e-6)
        raised += inside.bound > without.objective * (1 + 1e-6)
    assert raised


@pytest.mark.parametrize("seed", range(20))
def test_squeezing_and_polishing_fit(seed: int) -> None:
    problem = chain(12) if seed % 2 else random_step(seed, 30)
    arrays = Arrays(problem)
    whole = profile_of(arrays, arrays.diagonal())
    for share in (0.9, 0.7, 0.5):
        budget = max(int(whole.peak * share), int(arrays.working.max()))
        found = squeeze(whole, budget, deadline=np.inf)
        if found is not None:
            leaner = polish(found, budget)
            check_peak = evaluate(problem, freeing(problem, tuple(leaner.ops.tolist()))).peak_bytes
            assert check_peak == leaner.peak <= budget
            assert leaner.recomputed_s <= found.recomputed_s
            better = improve(leaner, budget, rounds=5, deadline=np.inf)
            assert better.peak <= budget and better.recomputed_s <= leaner.recomputed_s
            assert (improve(leaner, budget, rounds=5, deadline=np.inf).keys == better.keys).all()


def test_what_fits_is_kept() -> None:
    problem = chain(6)
    found = plan_memory(problem, budgets(problem).stop - 1)
    assert found.evaluation.recomputed_s == 0.0 and found.gap == 0.0


def test_an_op_too_large_is_named() -> None:
    problem = MemoryProblem((MemOp("head", 1.0, (), (0,), 5),), (MemTensor(7, 0, kept=True),), base_bytes=3)
    with pytest.raises(InfeasibleError, match=r"op 0 \(head\) alone needs 15"):
        plan_memory(problem, 14)
    with pytest.raises(InfeasibleError, match="before the first op"):
        plan_memory(MemoryProblem((), (MemTensor(7, -1),)), 6)


def test_what_must_not_be_repeated_is_kept() -> None:
    ops = (
        MemOp("a", 1.0, (), (0,), repeatable=False),
        MemOp("b", 1.0, (0,), (1,)),
        MemOp("c", 1.0, (1,), (2,)),
        MemOp("d", 1.0, (0, 2), (3,)),
    )
    problem = MemoryProblem(ops, (MemTensor(4, 0), MemTensor(4, 1), MemTensor(1, 2), MemTensor(1, 3, kept=True)))
    for budget, fits in ((9, True), (8, False)):
        if fits:
            assert plan_memory(problem, budget).evaluation.recomputed_s == 0.0
        else:
            with pytest.raises(InfeasibleError):
                plan_memory(problem, budget)


@pytest.mark.parametrize("seed", range(6))
def test_exhaustion_equals_brute_force(seed: int) -> None:
    problem = random_step(seed + 50, 5)
    for budget in budgets(problem):
        for in_order in (True, False):
            best = least(problem, budget, in_order)
            found = search_states(problem, budget, in_order)
            assert found.complete and (found.ops is None) == (best is None)
            if best is not None and found.ops is not None:
                assert found.seconds == pytest.approx(best[0])
                assert evaluate(problem, freeing(problem, found.ops)).peak_bytes <= budget
    assert not search_states(problem, 10**6, True, most_states=2).complete


@pytest.mark.parametrize("seed", range(8))
def test_exhaustion_cut_off_or_from_a_known_schedule(seed: int) -> None:
    """Its bound is true wherever it is cut off; only what is better than the known schedule is found."""
    problem = random_step(seed + 80, 6)
    for budget in budgets(problem):
        best = least(problem, budget, in_order=True)
        if best is None:
            continue
        for states in (1, 3, 10, 100):
            assert search_states(problem, budget, True, states).bound_s <= best[0] * (1 + 1e-9)
        assert search_states(problem, budget, True, known_s=best[0]).ops is None
        assert search_states(problem, budget, True, known_s=best[0] * 1.001).seconds == pytest.approx(best[0])


def test_a_chain_of_some_dozens_of_ops_is_settled() -> None:
    problem = chain(12)
    found = plan_memory(problem, 6, MemoryLimits(time_s=600.0))
    check(problem, 6, found)
    assert found.status is MemoryStatus.OPTIMAL


def test_many_small_tensors_are_not_taken_as_there_for_nothing() -> None:
    """Each is below a thousandth of the budget; their bytes are all there is."""
    problem = chain(1200)
    arrays = Arrays(problem)
    whole = profile_of(arrays, arrays.diagonal())
    budget, highest = whole.peak * 9 // 10, int(whole.live.argmax())
    assert int(arrays.nbytes.max()) < budget / 1000
    relaxed = build_relaxation(arrays, (highest,), budget, integral=True)
    assert int(arrays.nbytes[relaxed.tiny].sum()) <= budget / 100
    bound = solve(relaxed.milp, backend="mathopt-highs", relative_gap=1e-3).bound
    dropped = whole.peak - budget - budget / 100 - 1
    assert bound - 1 >= dropped / problem.compute_s * 0.98


def test_exhaustion_ends_where_one_state_has_very_many_successors(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op with room for half of what is there may free any half of it: more ways than can be looked at."""
    made = tuple(MemOp(f"make {index}", 1.0, (), (index,)) for index in range(40))
    readers = (MemOp("wide", 1.0, (), (40,), 20), MemOp("end", 1.0, (40, *range(40)), ()))
    problem = MemoryProblem((*made, *readers), tuple(MemTensor(1, index) for index in range(41)))
    monkeypatch.setattr(exact, "_MOST_REACHED", 500)
    found = search_states(problem, 41, True)
    assert not found.complete and found.bound_s == 42.0
    assert not search_states(problem, 41, True, deadline=0.0).complete
