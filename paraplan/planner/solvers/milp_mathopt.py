"""OR-Tools MathOpt as a backend of `milp.py`.

The model goes over as one protobuf filled from arrays (130,000 columns and 280,000 entries: 0.1 s), and the
compiled solver is called with it. The Python `mathopt.Model` layer is left out: it costs 0.5 s more at that
size, and in ortools 9.15 a rejected parameter becomes an AttributeError there instead of the solver's message.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ortools.math_opt import callback_pb2, model_parameters_pb2, model_pb2, parameters_pb2, result_pb2, solution_pb2
from ortools.math_opt.core.python import solver as mathopt
from ortools.util.python.solve_interrupter import SolveInterrupter

from paraplan.planner.solvers.interruptible import interruptible
from paraplan.planner.solvers.milp_problem import (
    Floats,
    Milp,
    SolverAnswer,
    SolverError,
    SolverOptions,
    Status,
    dual_bound,
)
from paraplan.planner.solvers.quiet import quiet

_SOLVERS: dict[str, Any] = {
    "mathopt-highs": parameters_pb2.SOLVER_TYPE_HIGHS,
    "mathopt-highs-ipm": parameters_pb2.SOLVER_TYPE_HIGHS,
    "mathopt-scip": parameters_pb2.SOLVER_TYPE_GSCIP,
    "mathopt-cpsat": parameters_pb2.SOLVER_TYPE_CP_SAT,
    "mathopt-glop": parameters_pb2.SOLVER_TYPE_GLOP,
    "mathopt-pdlp": parameters_pb2.SOLVER_TYPE_PDLP,
}
BACKENDS = tuple(_SOLVERS)
LP_BACKENDS = ("mathopt-glop", "mathopt-pdlp")

_CPSAT_RANGE = 2**31
"""CP-SAT cuts unbounded columns off at 1e7 by default, and would then prove things that are not so."""

_STATUS = {
    result_pb2.TERMINATION_REASON_OPTIMAL: Status.OPTIMAL,
    result_pb2.TERMINATION_REASON_FEASIBLE: Status.FEASIBLE,
    result_pb2.TERMINATION_REASON_INFEASIBLE: Status.INFEASIBLE,
    result_pb2.TERMINATION_REASON_UNBOUNDED: Status.UNBOUNDED,
    result_pb2.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED: Status.UNBOUNDED,
    result_pb2.TERMINATION_REASON_NO_SOLUTION_FOUND: Status.LIMIT,
}


def run(problem: Milp, backend: str, options: SolverOptions) -> SolverAnswer:
    """Solve with one of `BACKENDS`.

    Args:
        problem: to solve.
        backend: its name.
        options: limits and hints.
    Raises:
        SolverError: see `milp.solve`.
    """
    _refuse_unfit(problem, backend)
    interrupter = SolveInterrupter()

    def solved() -> result_pb2.SolveResultProto:
        with quiet():
            return mathopt.solve(
                _model(problem),
                _SOLVERS[backend],
                parameters_pb2.SolverInitializerProto(),
                _parameters(backend, options),
                _hints(options),
                None,
                callback_pb2.CallbackRegistrationProto(),
                None,
                None if backend == "mathopt-scip" else interrupter.pybind_interrupter,  # it complains on stderr
            )

    try:
        result = interruptible(solved, interrupter.interrupt)
    except Exception as fault:  # noqa: BLE001 - the binding's StatusNotOk has no importable, stable home
        if "PrimalSolutionProto.objective_value" in str(fault):  # SCIP's answer to an unbounded LP: a point at -inf
            return SolverAnswer(status=Status.UNBOUNDED)
        raise SolverError(f"{backend}: {fault}") from None
    return _outcome(problem, backend, result)


def _refuse_unfit(problem: Milp, backend: str) -> None:
    if backend in LP_BACKENDS and problem.is_integer.any():
        raise SolverError(
            f"{backend} solves LPs only; this problem has integer columns: use relax=True or a MILP backend"
        )
    if backend == "mathopt-cpsat":
        if not problem.is_integer.all():
            raise SolverError(f"{backend} takes integer columns only (it would round the continuous ones' domains)")
        if max(np.abs(problem.lower).max(), np.abs(problem.upper).max()) > _CPSAT_RANGE:
            raise SolverError(f"{backend} needs every column bounded within ±2^31")


def _model(problem: Milp) -> model_pb2.ModelProto:
    model = model_pb2.ModelProto()
    columns = range(problem.num_columns)
    model.variables.ids.extend(columns)
    model.variables.lower_bounds.extend(problem.lower)
    model.variables.upper_bounds.extend(problem.upper)
    model.variables.integers.extend(problem.is_integer.tolist())
    priced = np.flatnonzero(problem.objective)
    model.objective.linear_coefficients.ids.extend(priced.tolist())
    model.objective.linear_coefficients.values.extend(problem.objective[priced])
    model.linear_constraints.ids.extend(range(problem.num_rows))
    model.linear_constraints.lower_bounds.extend(problem.row_lower)
    model.linear_constraints.upper_bounds.extend(problem.row_upper)
    model.linear_constraint_matrix.row_ids.extend(problem.entry_rows.tolist())
    model.linear_constraint_matrix.column_ids.extend(problem.columns.tolist())
    model.linear_constraint_matrix.coefficients.extend(problem.coefficients)
    return model


def _parameters(backend: str, options: SolverOptions) -> parameters_pb2.SolveParametersProto:
    parameters = parameters_pb2.SolveParametersProto()
    if backend != "mathopt-pdlp":  # has no randomness, and rejects a seed
        parameters.random_seed = 0
    if options.time_limit_s is not None:
        parameters.time_limit.FromNanoseconds(int(options.time_limit_s * 1e9))
    if backend not in LP_BACKENDS:
        parameters.relative_gap_tolerance = options.relative_gap
        parameters.absolute_gap_tolerance = 0.0
    if _SOLVERS[backend] == parameters_pb2.SOLVER_TYPE_HIGHS:
        # HiGHS' thread count is process-wide, so MathOpt rejects `threads`; on or off is all there is to say
        parameters.highs.string_options["parallel"] = "off" if options.threads == 1 else "on"
        if backend == "mathopt-highs-ipm":
            parameters.highs.string_options["solver"] = "ipm"
    elif backend != "mathopt-glop":
        parameters.threads = options.threads
    if backend == "mathopt-cpsat":
        parameters.cp_sat.linearization_level = 2  # clauses are rows of its LP too: most of what proves bounds here
    if backend == "mathopt-pdlp":
        criteria = parameters.pdlp.termination_criteria.simple_optimality_criteria
        criteria.eps_optimal_absolute = criteria.eps_optimal_relative = 1e-8
    return parameters


def _hints(options: SolverOptions) -> model_parameters_pb2.ModelSolveParametersProto:
    hints = model_parameters_pb2.ModelSolveParametersProto()
    if options.warm_start is not None:
        values = hints.solution_hints.add().variable_values
        values.ids.extend(range(len(options.warm_start)))
        values.values.extend(options.warm_start)
    return hints


def _outcome(problem: Milp, backend: str, result: result_pb2.SolveResultProto) -> SolverAnswer:
    termination = result.termination
    values = _primal_values(problem, result)
    status = _STATUS.get(termination.reason)
    if status is None and termination.reason == result_pb2.TERMINATION_REASON_IMPRECISE and values is not None:
        return SolverAnswer(status=Status.FEASIBLE, values=values)
    if status is None:
        reason = result_pb2.TerminationReasonProto.Name(termination.reason)
        raise SolverError(f"{backend}: {reason}: {termination.detail or 'no further detail'}")
    if status in (Status.OPTIMAL, Status.FEASIBLE) and values is None:
        status = Status.LIMIT
    bound = termination.objective_bounds.dual_bound
    if backend == "mathopt-pdlp":  # a first-order method's own bound is off by its dual infeasibility
        bound = _bound_of_duals(problem, result)
    return SolverAnswer(status=status, bound=bound, values=values)


def _primal_values(problem: Milp, result: result_pb2.SolveResultProto) -> Floats | None:
    for solution in result.solutions:
        primal = solution.primal_solution
        if primal.feasibility_status == solution_pb2.SOLUTION_STATUS_FEASIBLE:
            return _dense(primal.variable_values, problem.num_columns)
    return None


def _bound_of_duals(problem: Milp, result: result_pb2.SolveResultProto) -> float:
    duals = [s.dual_solution.dual_values for s in result.solutions if s.HasField("dual_solution")]
    return max((dual_bound(problem, _dense(y, problem.num_rows)) for y in duals), default=-np.inf)


def _dense(vector: Any, size: int) -> Floats:
    values = np.zeros(size)
    values[np.array(vector.ids, np.int64)] = vector.values
    return values
