"""Solving mixed-integer linear programs: the only door to the solvers.

    problem = MilpBuilder() … .build();  solution = solve(problem, backend="mathopt-highs", time_limit_s=60)

What a caller may rely on, whatever the backend:
 - `objective` is evaluated afresh from `values`, whose integers are exact and whose rows were checked;
 - `bound` is proved and never above `objective`;
 - INFEASIBLE and UNBOUNDED are proved; a time limit gives FEASIBLE with the best solution so far, or LIMIT;
 - with one thread and no time limit hit, equal input gives equal output.

Backends: OR-Tools MathOpt ("mathopt-highs", "mathopt-highs-ipm", "mathopt-scip", "mathopt-cpsat" for pure integer
problems, "mathopt-glop" and "mathopt-pdlp" for LPs) and PuLP ("pulp-cbc", or "pulp-<NAME>" for any solver of
`pulp.listSolvers()` installed here). Programs with intervals have a door of their own, `milp_intervals.py`.
"""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec
import numpy as np

from paraplan.planner.solvers import milp_mathopt, milp_pulp
from paraplan.planner.solvers.milp_problem import (
    Floats,
    Milp,
    MilpBuilder,
    Solution,
    SolverAnswer,
    SolverError,
    SolverOptions,
    Status,
    normalised,
)

__all__ = ["DEFAULT_BACKEND", "Milp", "MilpBuilder", "Solution", "SolverError", "Status", "backends", "solve"]

DEFAULT_BACKEND = "mathopt-highs"
SECOND_BACKENDS = {False: "mathopt-glop", True: "mathopt-scip"}
"""Asked where the default one fails, on rows whose entries differ by ten orders of magnitude, say: without integer
columns, and with."""

_OPTIMAL_GAP = 1e-6
"""A claimed optimum whose checked gap is above this (and above what was asked) is reported as FEASIBLE."""


def backends() -> tuple[str, ...]:
    """Names `solve` takes on this machine."""
    return (*milp_mathopt.BACKENDS, *milp_pulp.available())


def solve(
    problem: Milp,
    *,
    backend: str = DEFAULT_BACKEND,
    time_limit_s: float | None = None,
    relative_gap: float = 1e-9,
    relax: bool = False,
    warm_start: Floats | None = None,
    threads: int = 1,
) -> Solution:
    """Minimise a problem.

    Args:
        problem: what to solve.
        backend: who solves it, see the module's head.
        time_limit_s: wall time; None for no limit. Backends look at it only now and then.
        relative_gap: stop once (objective − bound) / |objective| is at most this.
        relax: solve the LP relaxation; `values` are then fractional and the objective bounds the MILP's.
        warm_start: [column] a point to start from. If it is a solution, the answer is never worse.
        threads: for backends that can use more than one.
    Raises:
        SolverError: the backend is unknown, not installed, cannot take this problem (integers for an LP solver,
            continuous columns for CP-SAT), failed, or returned a point that breaks a row; the default one, and
            another one too.
        ValueError: a nonsensical argument.
    """
    if threads < 1 or relative_gap < 0 or (time_limit_s is not None and time_limit_s <= 0):
        raise ValueError(f"threads {threads}, relative_gap {relative_gap}, time_limit_s {time_limit_s}")
    if warm_start is not None and np.shape(warm_start) != (problem.num_columns,):
        raise ValueError(f"warm_start has shape {np.shape(warm_start)}, the problem {problem.num_columns} columns")
    problem = problem.relaxed() if relax else problem
    options = SolverOptions(
        time_limit_s=time_limit_s, relative_gap=relative_gap, threads=threads, warm_start=warm_start
    )
    try:
        return _solved(problem, backend, options)
    except SolverError:
        if backend != DEFAULT_BACKEND:
            raise
        with suppress(SolverError):  # of two that fail, the first is heard
            return _solved(problem, SECOND_BACKENDS[bool(problem.is_integer.any())], options)
        raise


def _solved(problem: Milp, backend: str, options: SolverOptions) -> Solution:
    started = time.perf_counter()
    scaled, factor = normalised(problem)
    warm_start = options.warm_start
    outcome = _run(scaled, backend, options)
    if outcome.status is Status.UNBOUNDED:
        outcome = _settle_unbounded(scaled, backend, options)
    status, values = outcome.status, outcome.values
    if values is not None:
        values = _repaired(scaled, values, backend, options)
        if values is None and status is Status.OPTIMAL:
            raise SolverError(f"{backend} called a point optimal that breaks a row: {_worst(scaled, outcome.values)}")
        status = Status.LIMIT if values is None else status
    if warm_start is not None and status in (Status.FEASIBLE, Status.LIMIT) and problem.is_solution(warm_start):
        if values is None or problem.evaluate(warm_start) < problem.evaluate(values):
            values, status = _rounded(problem, warm_start), Status.FEASIBLE
    proved = outcome.bound if np.isfinite(outcome.bound) else -np.inf
    bound = proved / factor + problem.objective_offset
    return _solution(problem, status, values, bound, options, started=started, backend=backend)


def _solution(
    problem: Milp,
    status: Status,
    values: Floats | None,
    bound: float,
    options: SolverOptions,
    *,
    started: float,
    backend: str,
) -> Solution:
    """Evaluate afresh and let the numbers, not the backend, say whether the gap is closed."""
    objective = np.inf if values is None else problem.evaluate(values)
    if status is Status.INFEASIBLE:
        bound = np.inf
    elif status is Status.UNBOUNDED:
        objective = bound = -np.inf
    # the largest single cost is the scale below which a difference between two objectives is rounding
    scale = max(abs(objective), np.abs(problem.objective).max(initial=0.0))
    if bound > objective + _OPTIMAL_GAP * scale:
        raise SolverError(f"{backend} claims the bound {bound!r}, above the solution {objective!r} it returned")
    bound = min(bound, objective)
    if status in (Status.OPTIMAL, Status.FEASIBLE):
        closed = objective - bound <= max(options.relative_gap, _OPTIMAL_GAP) * scale
        status = Status.OPTIMAL if closed and (status is Status.OPTIMAL or objective == bound) else Status.FEASIBLE
    return Solution(
        status=status,
        objective=objective,
        bound=bound,
        values=values,
        solve_s=time.perf_counter() - started,
        backend=backend,
    )


def _run(problem: Milp, backend: str, options: SolverOptions) -> SolverAnswer:
    """One backend on one problem; trivial cases that backends disagree about are settled here."""
    family, _, name = backend.partition("-")
    if (problem.lower > problem.upper).any() or (problem.row_lower > problem.row_upper).any():
        return SolverAnswer(status=Status.INFEASIBLE)
    empty = np.diff(problem.row_starts) == 0
    if (problem.row_lower[empty] > 0).any() or (problem.row_upper[empty] < 0).any():
        return SolverAnswer(status=Status.INFEASIBLE)
    if problem.num_columns == 0:
        return SolverAnswer(status=Status.OPTIMAL, bound=0.0, values=np.empty(0))
    if family == "mathopt" and backend in milp_mathopt.BACKENDS:
        return milp_mathopt.run(problem, backend, options)
    if family == "pulp" and name:
        return milp_pulp.run(problem, backend, options)
    raise SolverError(f"no solver backend {backend!r}; there are: {', '.join(backends())}")


def _settle_unbounded(problem: Milp, backend: str, options: SolverOptions) -> SolverAnswer:
    """Backends say "unbounded" of relaxations, or "infeasible or unbounded"; whether a solution exists decides."""
    anything = msgspec.structs.replace(problem, objective=np.zeros(problem.num_columns))
    outcome = _run(anything, backend, options)
    if outcome.status in (Status.OPTIMAL, Status.FEASIBLE):
        return SolverAnswer(status=Status.UNBOUNDED)
    return SolverAnswer(status=Status.LIMIT if outcome.status is Status.UNBOUNDED else outcome.status)


def _repaired(problem: Milp, values: Floats, backend: str, options: SolverOptions) -> Floats | None:
    """The point with exact integers and within its bounds; None where the rows do not allow it.

    Rounding an integer that was off by 1e-6 can break a row; the continuous columns are then solved for again.
    """
    rounded = _rounded(problem, values)
    if problem.is_solution(rounded):
        return rounded
    if problem.is_integer.all() or not problem.is_integer.any() or backend == "mathopt-cpsat":
        return None
    again = _run(problem.fixed_integers(rounded), backend, options)
    if again.values is None:
        return None
    refined = _rounded(problem, np.where(problem.is_integer, rounded, again.values))
    return refined if problem.is_solution(refined) else None


def _rounded(problem: Milp, values: Floats) -> Floats:
    clipped = np.clip(np.where(problem.is_integer, np.round(values), values), problem.lower, problem.upper)
    return clipped + 0.0  # no negative zeros, so that equal answers print equally


def _worst(problem: Milp, values: Floats | None) -> str:
    assert values is not None
    return f"relative violation {problem.violation(_rounded(problem, values)):.3g}"
