"""Checkmate: the optimal schedule of stages by integer programming, and by rounding its relaxation.

checkmate-ilp solves the program of `checkmate_model.py`. Its optimum is the least step among schedules that execute ops
for the first time in the order given and, between two first executions, every other at most once and in that order.
A run that meets its limit gives the best schedule so far and the bound proved.

checkmate-lp solves the relaxation with the budget lowered by an allowance, rounds what is held at 1/2, and executes
exactly what then must be (two-phase rounding). The first allowance (0, 10 … 50 %) whose schedule fits is taken; the
relaxation at the whole budget bounds every schedule of the program.

Source: Jain et al. 2020 (Checkmate). Limits: O(n²) integers; graphs of some hundred ops.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paraplan.baselines.checkmate_model import Model, checkmate_model
from paraplan.baselines.common import (
    Clock,
    Limits,
    answer,
    best_within,
    check_budget,
    fits,
    keep_all,
    nothing_fits,
    pruned,
)
from paraplan.ir.errors import SolverLimitError
from paraplan.planner.memory.answer import MemoryAnswer, MemoryStatus
from paraplan.planner.memory.memory_schedule import freeing
from paraplan.planner.memory.problem import GIVEN, MemoryProblem
from paraplan.planner.solvers.milp import Status, solve

CLASS = "schedules of Checkmate's stages in the order given"
ALLOWANCES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
MOST_OPS = 400
"""Above, the program has more columns than memory allows for."""


def checkmate_ilp(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """The integer program's schedule.

    Raises:
        SolverLimitError: it has none (proved of its class only), or none was found in time.
    """
    check_budget(problem, budget_bytes)
    free = keep_all(problem)
    if fits(free, budget_bytes):
        return _whole(problem, free)
    clock = Clock(limits)
    model = _model(problem, budget_bytes, "checkmate-ilp", clock)
    if model is None:
        raise nothing_fits("checkmate-ilp", budget_bytes, None, "writing the program took all the time")
    found = solve(model.milp, time_limit_s=clock.left_s)
    if found.values is None:
        proved = found.status is Status.INFEASIBLE
        why = f"proved: none among {CLASS}" if proved else f"none found in {limits.time_s} s, which proves nothing"
        raise nothing_fits("checkmate-ilp", budget_bytes, None, why)
    ops = tuple(op for (stage, op), column in sorted(model.executed.items()) if found.values[column] > 0.5)
    status = MemoryStatus.OPTIMAL if found.status is Status.OPTIMAL else MemoryStatus.FEASIBLE
    notes = (f"{model.milp.num_columns} columns; bound and status are of {CLASS}",)
    bound = max(found.bound, problem.compute_s)
    return answer(problem, freeing(problem, ops), bound_s=bound, status=status, notes=notes)


def checkmate_lp(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """The rounded relaxation's schedule.

    Raises:
        SolverLimitError: no allowance's rounding is within the budget, or time passed first.
    """
    check_budget(problem, budget_bytes)
    free = keep_all(problem)
    if fits(free, budget_bytes):
        return _whole(problem, free)
    clock = Clock(limits)
    bound, tried = problem.compute_s, []
    for allowance in ALLOWANCES:
        if clock.over:
            break
        model = _model(problem, int(budget_bytes * (1 - allowance)), "checkmate-lp", clock)
        if model is None:
            break
        found = solve(model.milp, relax=True, time_limit_s=clock.left_s)
        if found.values is None:
            break
        if allowance == 0.0:
            bound = max(bound, found.bound)
        ops = rounded(problem, model, found.values)
        notes = (f"allowance {allowance:.0%}; the bound is of {CLASS}",)
        tried.append(answer(problem, freeing(problem, pruned(problem, ops)), bound_s=bound, notes=notes))
        if fits(tried[-1], budget_bytes):
            break
    return best_within("checkmate-lp", tried, budget_bytes, f"{len(tried)} roundings in {limits.time_s} s")


def _whole(problem: MemoryProblem, free: MemoryAnswer) -> MemoryAnswer:
    return answer(problem, free.actions, bound_s=problem.compute_s, status=MemoryStatus.OPTIMAL, notes=free.notes)


def _model(problem: MemoryProblem, budget_bytes: int, strategy: str, clock: Clock) -> Model | None:
    if len(problem.ops) > MOST_OPS:
        raise SolverLimitError(
            f"{strategy} writes O(n²) integers and takes at most {MOST_OPS} ops; this step has {len(problem.ops)}: "
            "plan a piece of it, or take rotor or dtr"
        )
    return checkmate_model(problem, budget_bytes, clock)


def rounded(problem: MemoryProblem, model: Model, values: NDArray[np.float64]) -> tuple[int, ...]:
    """Holds what the relaxation holds by at least one half, and executes what that and the next op need.

    Args:
        problem: ops and tensors.
        model: its relaxation.
        values: of the model's columns.
    """
    count = len(problem.ops)
    held = [
        {t for t in range(len(problem.tensors)) if (stage, t) in model.held and values[model.held[stage, t]] >= 0.5}
        for stage in range(count + 1)
    ]
    for tensor, it in enumerate(problem.tensors):
        if it.maker == GIVEN:
            for stage in range(count + 1):
                held[stage].add(tensor)  # cannot be executed for: freed after its last reader
        elif not problem.ops[it.maker].repeatable:
            last = max(problem.readers[tensor], default=it.maker)
            end = count if it.kept else last
            for stage in range(it.maker + 1, end + 1):
                held[stage].add(tensor)
    sequence: list[int] = []
    for stage in range(count):
        wanted = {stage}
        need = {t for t in held[stage + 1] - held[stage] if problem.tensors[t].maker <= stage}
        for index in range(stage, -1, -1):
            op = problem.ops[index]
            if index in wanted or not need.isdisjoint(op.makes):
                wanted.add(index)
                need.difference_update(op.makes)
                need.update(t for t in op.reads if t not in held[stage])
        sequence += sorted(wanted)
    return tuple(sequence)
