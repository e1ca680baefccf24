"""One suite every solver backend passes: known answers, brute force, and what a limit may and may not claim."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paraplan.planner.solvers import milp
from paraplan.planner.solvers.milp import Milp, MilpBuilder, Solution, SolverError, Status, backends, solve
from paraplan.planner.solvers.milp_problem import dual_bound, normalised

LP_ONLY = ("mathopt-glop", "mathopt-pdlp")
INTEGER_ONLY = ("mathopt-cpsat",)
MILP_BACKENDS = [name for name in backends() if name not in LP_ONLY]
MIXED_BACKENDS = [name for name in MILP_BACKENDS if name not in INTEGER_ONLY]
LP_BACKENDS = [name for name in backends() if name not in INTEGER_ONLY]

each_milp = pytest.mark.parametrize("backend", MILP_BACKENDS)
each_mixed = pytest.mark.parametrize("backend", MIXED_BACKENDS)
each_lp = pytest.mark.parametrize("backend", LP_BACKENDS)


def tolerance(backend: str) -> float:
    return 1e-5 if backend == "mathopt-pdlp" else 1e-7


def checked(problem: Milp, solution: Solution) -> Solution:
    """Every answer, whatever its status, keeps the promises of `milp`'s head."""
    assert solution.bound <= solution.objective
    if solution.values is not None:
        assert solution.objective == problem.evaluate(solution.values)
        assert problem.violation(solution.values) <= 1e-6
        assert (solution.values[problem.is_integer] == np.round(solution.values[problem.is_integer])).all()
    return solution


def knapsack(values: list[float], weights: list[float], capacity: float, scale: float = 1.0) -> Milp:
    builder = MilpBuilder()
    builder.add_columns(len(values), upper=1.0, integer=True, objective=-np.array(values) * scale)
    builder.add_row(np.arange(len(values)), weights, upper=capacity)
    return builder.build()


def assignment(costs: np.ndarray) -> Milp:
    """min Σ costs[i, j]·x[i, j], each i to one j and each j to one i."""
    size = len(costs)
    builder = MilpBuilder(objective_offset=100.0)
    builder.add_columns(size * size, upper=1.0, integer=True, objective=costs.ravel())
    entries = np.arange(size * size)
    builder.add_rows(size, entries // size, entries, 1.0, lower=1.0, upper=1.0)
    builder.add_rows(size, entries % size, entries, 1.0, lower=1.0, upper=1.0)
    return builder.build()


def hard_instance(size: int = 60, seed: int = 0) -> Milp:
    """Market split with slacks priced: feasible at once, optimal practically never proved."""
    rng = np.random.default_rng(seed)
    builder = MilpBuilder()
    builder.add_columns(size, upper=1.0, integer=True)
    for _ in range(6):
        weights = rng.integers(1, 1000, size).astype(float)
        slack = builder.add_columns(2, upper=100_000.0, integer=True, objective=1.0)
        half = np.floor(weights.sum() / 2)
        columns = np.append(np.arange(size), [slack, slack + 1])
        builder.add_row(columns, np.append(weights, [1.0, -1.0]), lower=half, upper=half)
    return builder.build()


@each_milp
def test_knapsack(backend: str) -> None:
    problem = knapsack([10, 13, 7, 8], [5, 6, 4, 3], 10.5)
    found = checked(problem, solve(problem, backend=backend))
    assert found.status is Status.OPTIMAL
    assert found.objective == -21.0
    assert found.values is not None and found.values.tolist() == [0, 1, 0, 1]
    assert found.bound == pytest.approx(-21.0, rel=1e-6)
    assert found.gap <= 1e-6


@each_milp
@pytest.mark.parametrize(("cost_scale", "weight_scale"), [(1e-7, 1.0), (1.0, 2.0**33), (1e-9, 1e11), (1e8, 1e-6)])
def test_scale_of_units_does_not_matter(backend: str, cost_scale: float, weight_scale: float) -> None:
    """Seconds and bytes: differences of 1e-9 s decide, capacities of 1e11 bytes bind."""
    weights = [5.0 * weight_scale, 6.0 * weight_scale, 4.0 * weight_scale, 3.0 * weight_scale]
    problem = knapsack([10, 13, 7, 8], weights, 10.5 * weight_scale, cost_scale)
    found = checked(problem, solve(problem, backend=backend))
    assert found.status is Status.OPTIMAL
    assert found.values is not None and found.values.tolist() == [0, 1, 0, 1]


@each_milp
def test_assignment_with_offset(backend: str) -> None:
    costs = np.random.default_rng(3).integers(0, 50, (6, 6)).astype(float)
    best = min(sum(costs[i, p[i]] for i in range(6)) for p in itertools.permutations(range(6)))
    problem = assignment(costs)
    found = checked(problem, solve(problem, backend=backend))
    assert (found.status, found.objective) == (Status.OPTIMAL, 100.0 + best)
    assert found.bound == pytest.approx(100.0 + best, rel=1e-6)


@each_milp
def test_infeasible_is_proved(backend: str) -> None:
    """Integrality alone makes it infeasible: 2x + 2y = 3."""
    builder = MilpBuilder()
    builder.add_columns(2, upper=5.0, integer=True, objective=1.0)
    builder.add_row([0, 1], [2.0, 2.0], lower=3.0, upper=3.0)
    found = solve(builder.build(), backend=backend)
    assert (found.status, found.values, found.objective) == (Status.INFEASIBLE, None, np.inf)


@each_lp
def test_infeasible_lp(backend: str) -> None:
    builder = MilpBuilder()
    builder.add_columns(2, upper=1.0, objective=1.0)
    builder.add_row([0, 1], [1.0, 1.0], lower=3.0)
    assert solve(builder.build(), backend=backend).status is Status.INFEASIBLE


@pytest.mark.parametrize("backend", backends())
def test_trivially_infeasible(backend: str) -> None:
    crossed = MilpBuilder()
    crossed.add_columns(1, lower=2.0, upper=1.0)
    fractional = MilpBuilder()
    fractional.add_columns(1, lower=0.2, upper=0.8, integer=True)
    empty_row = MilpBuilder()
    empty_row.add_columns(1)
    empty_row.add_row([], [], lower=1.0)
    for builder in (crossed, fractional, empty_row):
        assert solve(builder.build(), backend=backend).status is Status.INFEASIBLE


@each_lp
def test_unbounded_lp(backend: str) -> None:
    builder = MilpBuilder()
    builder.add_columns(2, objective=[-1.0, 0.0])
    builder.add_row([0, 1], [1.0, -1.0], upper=2.0)
    found = solve(builder.build(), backend=backend)
    assert (found.status, found.objective, found.values) == (Status.UNBOUNDED, -np.inf, None)


@each_mixed
def test_unbounded_needs_a_solution(backend: str) -> None:
    """A relaxation that is unbounded proves nothing: these integers have no solution at all."""
    for target, expected in ((3.0, Status.INFEASIBLE), (4.0, Status.UNBOUNDED)):
        builder = MilpBuilder()
        builder.add_columns(1, lower=-np.inf, upper=np.inf, objective=-1.0)
        builder.add_columns(2, upper=5.0, integer=True)
        builder.add_row([1, 2], [2.0, 2.0], lower=target, upper=target)
        assert solve(builder.build(), backend=backend).status is expected


@each_mixed
def test_free_and_unbounded_integer_columns(backend: str) -> None:
    """min y, y ≥ x − 7/2, y ≥ 7/2 − x, x integer and free, y free: 1/2 at x = 3 or 4; and far below zero."""
    for shift in (0.0, -40_000.0):
        builder = MilpBuilder()
        x = builder.add_columns(1, lower=-np.inf, integer=True)
        y = builder.add_columns(1, lower=-np.inf, objective=1.0)
        builder.add_row([y, x], [1.0, -1.0], lower=-3.5 - shift)
        builder.add_row([y, x], [1.0, 1.0], lower=3.5 + shift)
        problem = builder.build()
        found = checked(problem, solve(problem, backend=backend))
        assert found.status is Status.OPTIMAL
        assert found.objective == pytest.approx(0.5, abs=1e-6)


@each_mixed
def test_ranged_rows_mixed_columns(backend: str) -> None:
    """max 3x + 2y + z with 1 ≤ x + y ≤ 2.5, −1 ≤ x − z ≤ 0.25, x integer in 0 … 2."""
    builder = MilpBuilder()
    builder.add_columns(1, upper=2.0, integer=True, objective=-3.0)
    builder.add_columns(2, upper=[10.0, 1.9], objective=[-2.0, -1.0])
    builder.add_rows(2, [0, 0, 1, 1], [0, 1, 0, 2], [1.0, 1.0, 1.0, -1.0], lower=[1.0, -1.0], upper=[2.5, 0.25])
    problem = builder.build()
    found = checked(problem, solve(problem, backend=backend))
    assert found.status is Status.OPTIMAL
    assert found.objective == pytest.approx(-8.9, rel=1e-7)
    assert found.values == pytest.approx([2.0, 0.5, 1.9], abs=1e-6)


@each_milp
def test_empty_objective_and_no_rows(backend: str) -> None:
    builder = MilpBuilder(objective_offset=7.0)
    builder.add_columns(3, upper=4.0, integer=True)
    builder.add_row([0, 1, 2], [1.0, 1.0, 1.0], lower=5.0)
    problem = builder.build()
    found = checked(problem, solve(problem, backend=backend))
    assert (found.status, found.objective, found.bound) == (Status.OPTIMAL, 7.0, 7.0)
    free = MilpBuilder()
    free.add_columns(2, lower=-3.0, upper=4.0, integer=True, objective=[1.0, -1.0])
    assert solve(free.build(), backend=backend).objective == -7.0
    nothing = solve(MilpBuilder(objective_offset=2.0).build(), backend=backend)
    assert (nothing.status, nothing.objective) == (Status.OPTIMAL, 2.0)


@each_lp
def test_relaxation_bounds_the_milp(backend: str) -> None:
    rng = np.random.default_rng(5)
    problem = knapsack(rng.uniform(1, 20, 12).tolist(), rng.uniform(1, 9, 12).tolist(), 17.3)
    exact = solve(problem)
    relaxed = checked(problem.relaxed(), solve(problem, backend=backend, relax=True))
    reference = solve(problem, backend="mathopt-highs", relax=True)
    assert relaxed.objective == pytest.approx(reference.objective, rel=tolerance(backend))
    assert relaxed.bound == pytest.approx(reference.objective, rel=tolerance(backend))
    assert relaxed.status is Status.OPTIMAL
    assert relaxed.bound < exact.objective


@each_milp
def test_time_limit_never_claims_infeasible(backend: str) -> None:
    problem = hard_instance()
    found = checked(problem, solve(problem, backend=backend, time_limit_s=1.0))
    assert found.status in (Status.FEASIBLE, Status.LIMIT)
    assert (found.values is None) == (found.status is Status.LIMIT)
    assert found.bound >= -1e-6 or found.bound == -np.inf
    assert found.solve_s < 10.0


@each_milp
def test_no_time_is_a_limit_too(backend: str) -> None:
    rng = np.random.default_rng(0)
    found = solve(assignment(rng.uniform(0, 1, (40, 40))), backend=backend, time_limit_s=1e-4)
    assert found.status in (Status.OPTIMAL, Status.FEASIBLE, Status.LIMIT)


@pytest.fixture(scope="module")
def hard_and_best() -> tuple[Milp, Solution]:
    problem = hard_instance()
    return problem, solve(problem, backend="mathopt-cpsat", time_limit_s=3.0)


@each_milp
def test_warm_start_is_never_lost(hard_and_best: tuple[Milp, Solution], backend: str) -> None:
    problem, best = hard_and_best
    assert best.values is not None
    found = checked(problem, solve(problem, backend=backend, time_limit_s=0.5, warm_start=best.values))
    assert found.status is Status.FEASIBLE
    assert found.objective <= best.objective
    wrong = solve(knapsack([1.0, 2.0], [1.0, 1.0], 1.0), backend=backend, warm_start=np.ones(2))
    assert (wrong.status, wrong.objective) == (Status.OPTIMAL, -2.0)


@each_milp
def test_equal_input_gives_equal_output(backend: str) -> None:
    """Many optima; the same one each time."""
    problem = assignment(np.random.default_rng(1).integers(0, 3, (7, 7)).astype(float))
    first, second = (solve(problem, backend=backend) for _ in range(2))
    assert first.values is not None and second.values is not None
    assert first.values.tobytes() == second.values.tobytes()


def random_problem(seed: int) -> Milp:
    rng = np.random.default_rng(seed)
    columns, rows = int(rng.integers(2, 9)), int(rng.integers(1, 6))
    builder = MilpBuilder(objective_offset=float(rng.integers(-5, 6)))
    builder.add_columns(columns, upper=1.0, integer=True, objective=rng.integers(-9, 10, columns))
    matrix = rng.integers(-5, 6, (rows, columns)) * (rng.random((rows, columns)) < 0.7)
    lower = np.where(rng.random(rows) < 0.5, -np.inf, rng.integers(-6, 2, rows))
    upper = np.where(
        np.isinf(lower) | (rng.random(rows) < 0.4), np.maximum(lower, 0) + rng.integers(0, 5, rows), np.inf
    )
    at = np.nonzero(matrix)
    builder.add_rows(rows, at[0], at[1], matrix[at], lower=lower, upper=upper)
    return builder.build()


def brute_force(problem: Milp) -> float:
    points = (np.array(point) for point in itertools.product((0.0, 1.0), repeat=problem.num_columns))
    return min((problem.evaluate(point) for point in points if problem.is_solution(point)), default=np.inf)


def permuted(problem: Milp, seed: int) -> Milp:
    """The same problem with columns and rows in another order."""
    rng = np.random.default_rng(seed)
    column_at, row_at = rng.permutation(problem.num_columns), rng.permutation(problem.num_rows)
    builder = MilpBuilder(problem.objective_offset)
    new_of_old = np.argsort(column_at)
    builder.add_columns(
        problem.num_columns,
        lower=problem.lower[column_at],
        upper=problem.upper[column_at],
        integer=problem.is_integer[column_at],
        objective=problem.objective[column_at],
    )
    builder.add_rows(
        problem.num_rows,
        np.argsort(row_at)[problem.entry_rows],
        new_of_old[problem.columns],
        problem.coefficients,
        lower=problem.row_lower[row_at],
        upper=problem.row_upper[row_at],
    )
    return builder.build()


@each_milp
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_brute_force_and_renaming(backend: str, seed: int) -> None:
    problem = random_problem(seed)
    best = brute_force(problem)
    for variant in (problem, permuted(problem, seed)):
        found = checked(variant, solve(variant, backend=backend))
        assert found.objective == best
        assert found.status is (Status.INFEASIBLE if best == np.inf else Status.OPTIMAL)
        assert found.bound <= best


def test_misfits_are_refused_by_name() -> None:
    problem = knapsack([1.0], [1.0], 1.0)
    for backend in LP_ONLY:
        with pytest.raises(SolverError, match=backend):
            solve(problem, backend=backend)
    with pytest.raises(SolverError, match=r"mathopt-cpsat takes integer columns only"):
        solve(problem, backend="mathopt-cpsat", relax=True)
    with pytest.raises(SolverError, match=r"no solver backend 'gurobi'; there are: .*mathopt-highs.*pulp-cbc"):
        solve(problem, backend="gurobi")
    with pytest.raises(SolverError, match=r"pulp-NOSUCH is not installed here; PuLP finds: .*pulp-cbc"):
        solve(problem, backend="pulp-NOSUCH")
    with pytest.raises(ValueError, match="warm_start"):
        solve(problem, warm_start=np.zeros(3))


def test_builder_rejects_nonsense() -> None:
    for bad in ({"lower": np.nan}, {"lower": np.inf}, {"upper": -np.inf}, {"objective": np.inf}):
        builder = MilpBuilder()
        builder.add_columns(1, **bad)
        with pytest.raises(ValueError):
            builder.build()
    builder = MilpBuilder()
    builder.add_columns(1)
    builder.add_row([1], [1.0])
    with pytest.raises(ValueError, match="columns 1 … 1 of 1"):
        builder.build()
    with pytest.raises(ValueError, match="block of 2"):
        builder.add_rows(2, [2], [0], [1.0])


def test_builder_adds_up_entries_and_freezes() -> None:
    builder = MilpBuilder()
    builder.add_columns(3)
    builder.add_rows(2, [1, 0, 1, 1], [2, 1, 0, 2], [4.0, 5.0, 0.0, 6.0])
    problem = builder.build()
    assert problem.row_starts.tolist() == [0, 1, 2]
    assert problem.columns.tolist() == [1, 2]
    assert problem.coefficients.tolist() == [5.0, 10.0]
    with pytest.raises(ValueError, match="read-only"):
        problem.lower[0] = 1.0


@pytest.mark.parametrize("relax", [True, False])
def test_another_solver_is_asked_where_the_default_one_fails(monkeypatch: pytest.MonkeyPatch, relax: bool) -> None:
    problem, asked, run = random_problem(3), list[str](), milp._run
    wanted = solve(problem, relax=relax).objective

    def failing(problem: Milp, backend: str, options: object) -> object:
        asked.append(backend)
        if backend == milp.DEFAULT_BACKEND:
            raise SolverError("called a point optimal that breaks a row")
        return run(problem, backend, options)  # type: ignore[arg-type]

    monkeypatch.setattr(milp, "_run", failing)
    assert solve(problem, relax=relax).objective == pytest.approx(wanted, rel=1e-6)
    assert asked[:2] == [milp.DEFAULT_BACKEND, "mathopt-glop" if relax else "mathopt-scip"]
    with pytest.raises(SolverError, match="breaks a row"):
        monkeypatch.setattr(milp, "SECOND_BACKENDS", dict.fromkeys((False, True), milp.DEFAULT_BACKEND))
        solve(problem, relax=relax)


def test_dual_bound_holds_for_any_multipliers() -> None:
    rng = np.random.default_rng(0)
    for seed in range(30):
        problem = random_problem(seed).relaxed()
        exact = solve(problem).objective
        for _ in range(20):
            assert dual_bound(problem, rng.normal(0, 3, problem.num_rows)) <= exact + 1e-9


def test_normalised_keeps_every_point() -> None:
    problem = knapsack([1e-6, 3e-6], [5e10, 7e10], 8e10)
    scaled, factor = normalised(problem)
    assert 512 <= np.abs(scaled.objective).max() < 1024
    assert 512 <= scaled.row_magnitude()[0] < 1024
    for point in itertools.product((0.0, 1.0), repeat=2):
        values = np.array(point)
        assert scaled.evaluate(values) == problem.evaluate(values) * factor
        assert scaled.is_solution(values) == problem.is_solution(values)
