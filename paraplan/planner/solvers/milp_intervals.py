"""Integer programs with intervals: what CP-SAT solves that rows of a MILP say badly.

    problem = IntervalBuilder(); x = problem.integer((3, 5, 6)); …; found = solve_intervals(problem, time_limit_s=10)

Columns are integers over small sets or ranges, literals are 0/1 columns. An interval is [start, end) where its literal
holds; a capacity limits the demands of intervals that overlap. Rows a·x ≤ b may hold only where literals do. As in
`milp.solve`: an answer is evaluated afresh, INFEASIBLE is proved, a limit gives the best so far, one thread is
repeatable.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from ortools.sat.python import cp_model

from paraplan.planner.solvers.interruptible import interruptible
from paraplan.planner.solvers.milp_problem import SolverError, Status

_STATUS = {
    cp_model.OPTIMAL: Status.OPTIMAL,
    cp_model.FEASIBLE: Status.FEASIBLE,
    cp_model.INFEASIBLE: Status.INFEASIBLE,
    cp_model.UNKNOWN: Status.LIMIT,
}


@dataclass(frozen=True)
class IntervalSolution:
    """What a solve gave.

    Attributes:
        status: how it ended.
        objective: of `values`; None without a solution.
        bound: proved lower bound on every solution's objective; None where none is known.
        values: per column; empty without a solution.
        solve_s: wall time.
    """

    status: Status
    objective: int | None
    bound: int | None
    values: tuple[int, ...]
    solve_s: float


class IntervalBuilder:
    """Collects columns, intervals, capacities and rows. Columns are numbered from 0."""

    def __init__(self) -> None:
        self.model = cp_model.CpModel()
        self.columns: list[cp_model.IntVar] = []
        self.intervals: list[cp_model.IntervalVar] = []
        self.objective: dict[int, int] = {}

    def integer(self, values: tuple[int, ...]) -> int:
        """A column that takes one of some values."""
        return self._added(self.model.new_int_var_from_domain(cp_model.Domain.from_values(list(values)), self._name()))

    def ranged(self, lower: int, upper: int) -> int:
        """A column that takes any value of a range, both ends included."""
        return self._added(self.model.new_int_var(lower, upper, self._name()))

    def literal(self) -> int:
        """A 0/1 column."""
        return self._added(self.model.new_bool_var(self._name()))

    def interval(self, start: int, end: int, present: int) -> int:
        """[start, end) between two columns where a literal holds; returns the interval's number.

        Args:
            start, end: columns.
            present: a column of 0 or 1.
        """
        size = self.model.new_int_var(0, 2**40, self._name())
        first, last, literal = self.columns[start], self.columns[end], self.columns[present]
        self.intervals.append(self.model.new_optional_interval_var(first, size, last, literal, self._name()))
        return len(self.intervals) - 1

    def unit(self, start: int, present: int) -> int:
        """[start, start + 1) where a literal holds."""
        made = self.model.new_optional_fixed_size_interval_var(
            self.columns[start], 1, self.columns[present], self._name()
        )
        self.intervals.append(made)
        return len(self.intervals) - 1

    def stretch(self, start: int, end: int) -> int:
        """[start, end) between two columns."""
        size = self.model.new_int_var(0, 2**40, self._name())
        self.intervals.append(self.model.new_interval_var(self.columns[start], size, self.columns[end], self._name()))
        return len(self.intervals) - 1

    def task(self, start: int, size: int) -> int:
        """[start, start + size)."""
        self.intervals.append(self.model.new_fixed_size_interval_var(self.columns[start], size, self._name()))
        return len(self.intervals) - 1

    def disjoint(self, intervals: list[int]) -> None:
        """No two of these intervals overlap."""
        self.model.add_no_overlap([self.intervals[index] for index in intervals])

    def capacity(self, demands: dict[int, int], limit: int) -> None:
        """Demands by interval: those that overlap together need at most `limit`."""
        chosen = [self.intervals[index] for index in demands]
        self.model.add_cumulative(chosen, list(demands.values()), limit)

    def row(self, terms: dict[int, int], upper: int, where: tuple[int, ...] = ()) -> None:
        """Σ coefficient·column ≤ upper, where all of some literals hold.

        Args:
            terms: column -> coefficient.
            upper: of their sum.
            where: columns of 0 or 1; () for always.
        """
        made = self.model.add(sum(c * self.columns[index] for index, c in terms.items()) <= upper)
        if where:
            made.only_enforce_if([self.columns[index] for index in where])

    def minimise(self, objective: dict[int, int]) -> None:
        """Sets what to minimise: coefficients by column."""
        self.objective = objective
        self.model.minimize(sum(c * self.columns[index] for index, c in objective.items()))

    def _added(self, column: cp_model.IntVar) -> int:
        self.columns.append(column)
        return len(self.columns) - 1

    def _name(self) -> str:
        return ""


def solve_intervals(
    problem: IntervalBuilder,
    *,
    time_limit_s: float | None = None,
    warm_start: dict[int, int] | None = None,
    work_limit: float | None = None,
) -> IntervalSolution:
    """Minimise with CP-SAT on one thread.

    Args:
        problem: what to minimise.
        time_limit_s: wall time at most.
        warm_start: values by column to start from.
        work_limit: the solver's own count of its work at most, the same on every machine.

    Raises:
        SolverError: the model is malformed.
    """
    started = time.perf_counter()
    model, solver = problem.model, cp_model.CpSolver()
    model.clear_hints()
    for index, value in (warm_start or {}).items():
        model.add_hint(problem.columns[index], value)
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    if time_limit_s is not None:
        solver.parameters.max_time_in_seconds = time_limit_s
    if work_limit is not None:
        solver.parameters.max_deterministic_time = work_limit
    solver.parameters.catch_sigint_signal = False
    status = _STATUS.get(interruptible(lambda: solver.solve(model), solver.stop_search))
    if status is None:
        raise SolverError(f"CP-SAT refuses the model: {model.validate()}")
    values: tuple[int, ...] = ()
    objective = bound = None
    if status is Status.LIMIT and problem.objective and math.isfinite(solver.best_objective_bound):
        bound = round(solver.best_objective_bound)
    if status in (Status.OPTIMAL, Status.FEASIBLE):
        values = tuple(int(solver.value(column)) for column in problem.columns)
        objective = sum(c * values[index] for index, c in problem.objective.items())
        bound = min(objective, round(solver.best_objective_bound))
    return IntervalSolution(status, objective, bound, values, time.perf_counter() - started)
