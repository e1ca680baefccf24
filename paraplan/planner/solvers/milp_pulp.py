"""PuLP as a backend of `milp.py`: CBC, which it ships, and whatever commercial solver is installed here.

PuLP keeps one Python object per column and term, so models over about 10^5 columns are slow to build (seconds);
MathOpt is for those. PuLP reports no dual bound: CBC's is read from its log, and for other solvers it is known only
once they claim optimality.
"""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path

import numpy as np
import pulp

from paraplan.planner.solvers.milp_problem import Milp, SolverAnswer, SolverError, SolverOptions, Status

_CBC = "PULP_CBC_CMD"

_CBC_INCREMENT = 1e-5
"""CBC takes a new solution only if better by this much, in the (normalised) objective, so "optimal" means within it."""


def available() -> tuple[str, ...]:
    """Backend names that work on this machine."""
    return tuple("pulp-cbc" if name == _CBC else f"pulp-{name}" for name in pulp.listSolvers(onlyAvailable=True))


def run(problem: Milp, backend: str, options: SolverOptions) -> SolverAnswer:
    """Solve with "pulp-cbc" or "pulp-<NAME>".

    Args:
        problem: to solve.
        backend: its name.
        options: limits and hints.
    Raises:
        SolverError: see `milp.solve`.
    """
    if backend not in available():
        raise SolverError(f"{backend} is not installed here; PuLP finds: {', '.join(available()) or 'no solver'}")
    model, variables = _model(problem, options)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="paraplan-milp-") as folder:
        log = Path(folder) / "log"
        try:
            model.solve(_solver(backend, options, log, folder))
        except (pulp.PulpSolverError, OSError, ValueError) as fault:
            raise SolverError(f"{backend}: {fault}") from None
        log_text = log.read_text(errors="replace") if log.exists() else ""
    status = _status(model)
    if status is Status.INFEASIBLE:
        if _out_of_time(options, time.perf_counter() - started, log_text):
            status = Status.LIMIT
        elif _may_be_unbounded(problem):  # CBC's presolve says "infeasible" of both; the caller settles which
            status = Status.UNBOUNDED
    if status not in (Status.OPTIMAL, Status.FEASIBLE):
        return SolverAnswer(status=status, bound=_logged_bound(log_text) if status is Status.LIMIT else -np.inf)
    values = np.array([variable.varValue or 0.0 for variable in variables])
    if status is Status.FEASIBLE:
        return SolverAnswer(status=status, bound=_logged_bound(log_text), values=values)
    objective = problem.evaluate(values)
    slack = options.relative_gap * abs(objective)
    if problem.is_integer.any() and problem.objective.any():
        slack = max(slack, _CBC_INCREMENT)
    return SolverAnswer(status=status, bound=objective - slack, values=values)


def _model(problem: Milp, options: SolverOptions) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    model = pulp.LpProblem("paraplan", pulp.LpMinimize)
    kinds = np.where(problem.is_integer, pulp.LpInteger, pulp.LpContinuous).tolist()
    bounds = zip(_or_none(problem.lower), _or_none(problem.upper), kinds, strict=True)
    variables = [model.add_variable(f"x{j}", low, high, kind) for j, (low, high, kind) in enumerate(bounds)]
    priced = np.flatnonzero(problem.objective).tolist()
    model += pulp.LpAffineExpression([(variables[j], float(problem.objective[j])) for j in priced])
    columns, coefficients = problem.columns.tolist(), problem.coefficients.tolist()
    starts = problem.row_starts.tolist()
    for row, (low, high) in enumerate(zip(_or_none(problem.row_lower), _or_none(problem.row_upper), strict=True)):
        span = slice(starts[row], starts[row + 1])
        terms = [(variables[j], a) for j, a in zip(columns[span], coefficients[span], strict=True)]
        for sense, side in _sides(low, high):
            model += pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=side)
    if options.warm_start is not None:
        for variable, value in zip(variables, options.warm_start.tolist(), strict=True):
            variable.setInitialValue(value, check=False)
    return model, variables


def _solver(backend: str, options: SolverOptions, log: Path, folder: str) -> pulp.LpSolver:
    name = _CBC if backend == "pulp-cbc" else backend.removeprefix("pulp-")
    settings: dict[str, object] = {"msg": False, "gapRel": options.relative_gap, "threads": options.threads}
    settings |= {"timeLimit": options.time_limit_s, "warmStart": options.warm_start is not None}
    if name == _CBC:
        # several threads make CBC non-deterministic, and even `threads 1` starts its parallel machinery
        settings |= {"logPath": str(log), "gapAbs": 0.0, "threads": options.threads if options.threads > 1 else None}
        settings["options"] = ["randomSeed 1", "randomCbcSeed 1"]
    try:
        solver = pulp.getSolver(name, **settings)
    except TypeError as fault:
        raise SolverError(f"{backend}: PuLP's {name} does not take a needed setting: {fault}") from None
    if isinstance(solver, pulp.LpSolver_CMD):
        solver.tmpDir = folder
    return solver


def _status(model: pulp.LpProblem) -> Status:
    if model.status == pulp.LpStatusInfeasible:
        return Status.INFEASIBLE
    if model.status == pulp.LpStatusUnbounded:
        return Status.UNBOUNDED
    if model.sol_status == pulp.LpSolutionOptimal:
        return Status.OPTIMAL
    return Status.FEASIBLE if model.sol_status == pulp.LpSolutionIntegerFeasible else Status.LIMIT


def _out_of_time(options: SolverOptions, elapsed_s: float, log_text: str) -> bool:
    """Whether "infeasible" may only mean that time ran out during the root relaxation, as CBC is known to say."""
    if options.time_limit_s is None:
        return False
    return elapsed_s >= 0.9 * options.time_limit_s or "Stopped on time" in log_text or "time limit" in log_text.lower()


def _may_be_unbounded(problem: Milp) -> bool:
    """Whether some column has a cost that falls without end towards an infinite bound."""
    down = (problem.objective > 0) & np.isinf(problem.lower)
    up = (problem.objective < 0) & np.isinf(problem.upper)
    return bool((down | up).any())


def _logged_bound(log_text: str) -> float:
    found = re.findall(r"^Lower bound:\s+(\S+)", log_text, re.MULTILINE)
    return float(found[-1]) if found else -np.inf


def _sides(low: float | None, high: float | None) -> list[tuple[int, float]]:
    """A row with both bounds is two of PuLP's constraints, or one equality."""
    if low is not None and low == high:
        return [(pulp.LpConstraintEQ, low)]
    sides = [(pulp.LpConstraintGE, low), (pulp.LpConstraintLE, high)]
    return [(sense, side) for sense, side in sides if side is not None]


def _or_none(bounds: np.ndarray) -> list[float | None]:
    return [bound if np.isfinite(bound) else None for bound in bounds.tolist()]
