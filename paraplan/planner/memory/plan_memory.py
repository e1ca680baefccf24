"""Planning memory: the least step time within a budget, with a proved bound.

Recomputation alone is planned first (`recompute_only`); where there are tiers, recomputation and copies together
(`recompute_and_copy`), and the better is taken. Steps of some dozens of ops are searched exhaustively (`exact`),
shortly first, and from the schedule known where that leaves a gap.

The bound holds for schedules that execute ops for the first time in the given order (`SCOPE`); a step that has none in
that order, but has one in another, is given the best of any order where it is small.
"""

from __future__ import annotations

import math
import time
from typing import NoReturn

from paraplan.ir.errors import InfeasibleError, SolverLimitError
from paraplan.ir.execution.memory_actions import Actions
from paraplan.planner.memory.answer import MemoryAnswer, MemoryStatus
from paraplan.planner.memory.improvement.exact import search_states
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.problem import MemoryProblem, verify_problem
from paraplan.planner.memory.recompute_and_copy import plan_joint
from paraplan.planner.memory.recompute_only import MemoryLimits, Recomputation
from paraplan.planner.memory.relaxations.least_budget import least_need
from paraplan.planner.memory.reruns import Arrays

__all__ = ["SCOPE", "MemoryAnswer", "MemoryLimits", "plan_memory"]

SCOPE = "schedules that execute ops for the first time in the given order"
SMALL_OPS = 24
"""Steps of up to so many ops and tensors are searched exhaustively in any order where all else leaves a gap."""
MIDDLE_OPS = 80
"""Likewise, in the given order, in the time that is kept for it."""
_FIRST_STATES = 15_000
"""Looked at before anything else: a few seconds."""
_MIDDLE_STATES = 400_000
_MIDDLE_SHARE = 0.3
"""Of the time, kept for what comes before exhaustion."""
_NEED_S = 2.0
"""For what an error says is needed at least."""
_ALONE_SHARE = 0.4
"""Of the time: for recomputation alone, where there are tiers."""


def plan_memory(problem: MemoryProblem, budget_bytes: int, limits: MemoryLimits | None = None) -> MemoryAnswer:
    """The fastest schedule found whose peak is within a budget.

    Args:
        problem: ops with their times and bytes.
        budget_bytes: on the device.
        limits: of the search; left out, the defaults.
    Raises:
        InfeasibleError: proved that there is none in the given order; names the op that needs most and what it needs.
        SolverLimitError: none was found, nor proved impossible.
        InvalidPlanError: the ops do not run in their order.
    """
    verify_problem(problem)
    limits = limits or MemoryLimits()
    started = time.perf_counter()
    arrays = Arrays(problem)
    _refuse_impossible(arrays, budget_bytes)
    middle = not problem.tiers and arrays.num_ops <= MIDDLE_OPS
    share = _ALONE_SHARE if problem.tiers else _MIDDLE_SHARE if middle else 1.0
    if middle:
        quick = search_states(problem, budget_bytes, True, _FIRST_STATES, deadline=started + share * limits.time_s)
        if quick.complete and quick.ops is not None:
            return _answer(arrays, budget_bytes, freeing(problem, quick.ops), quick.bound_s, limits)
    alone = Recomputation(
        arrays, budget_bytes, MemoryLimits(share * limits.time_s, limits.gap, limits.rounds, limits.instants)
    )
    alone.run()
    if problem.tiers and (alone.best is None or alone.best.recomputed_s):
        return _with_copies(alone, limits, started + limits.time_s)
    small = max(arrays.num_ops, arrays.num_tensors) <= SMALL_OPS
    if small and alone.gap > limits.gap:
        settled = _settled(arrays, budget_bytes, limits, started + limits.time_s)
        if settled is not None:
            return settled
    if middle and alone.gap > limits.gap:
        return _in_order(alone, limits, started + limits.time_s)
    if alone.best is None:
        _give_up(alone, limits.time_s)
    ops = tuple(alone.best.ops.tolist())
    return _answer(arrays, budget_bytes, freeing(problem, ops), alone.bound_s, limits)


def _in_order(alone: Recomputation, limits: MemoryLimits, deadline: float) -> MemoryAnswer:
    """By exhaustion from what is known, in the given order: settled, or a better bound."""
    arrays, budget, best = alone.arrays, alone.budget, alone.best
    known_s = math.inf if best is None else alone.compute_s + best.recomputed_s
    found = search_states(arrays.problem, budget, True, _MIDDLE_STATES, known_s, deadline)
    if found.ops is not None:
        return _answer(arrays, budget, freeing(arrays.problem, found.ops), found.bound_s, limits)
    if best is None:
        if found.complete:
            _refuse(arrays, budget, "in the given order of execution")
        _give_up(alone, limits.time_s)
    bound_s = max(alone.bound_s, min(found.bound_s, known_s))
    return _answer(arrays, budget, freeing(arrays.problem, tuple(best.ops.tolist())), bound_s, limits)


def _with_copies(alone: Recomputation, limits: MemoryLimits, deadline: float) -> MemoryAnswer:
    """The better of recomputation alone and of it with copies; the bound allows for copies."""
    arrays, problem, budget = alone.arrays, alone.arrays.problem, alone.budget
    found = plan_joint(problem, budget, alone.instants, alone.best, deadline, limits.gap)
    if found.actions is not None:
        return _answer(arrays, budget, found.actions, found.bound_s, limits)
    if alone.best is None:
        if found.infeasible:
            _refuse(arrays, budget, "with copies to " + ", ".join(tier.name for tier in problem.tiers))
        _give_up(alone, limits.time_s)
    return _answer(arrays, budget, freeing(problem, tuple(alone.best.ops.tolist())), found.bound_s, limits)


def _settled(arrays: Arrays, budget_bytes: int, limits: MemoryLimits, deadline: float) -> MemoryAnswer | None:
    """By exhaustion: in the given order, or in any where that one has none; None where there are too many states."""
    for in_order in (True,) if arrays.problem.in_order else (True, False):
        found = search_states(arrays.problem, budget_bytes, in_order, deadline=deadline)
        if not found.complete:
            return None
        if found.ops is not None:
            return _answer(arrays, budget_bytes, freeing(arrays.problem, found.ops), found.seconds, limits)
    _refuse(arrays, budget_bytes, f"in {'the given' if arrays.problem.in_order else 'any'} order of execution")


def _answer(arrays: Arrays, budget_bytes: int, actions: Actions, bound_s: float, limits: MemoryLimits) -> MemoryAnswer:
    found = evaluate(arrays.problem, actions)
    assert found.peak_bytes <= budget_bytes, f"{found.peak_bytes} bytes planned for {budget_bytes}"
    assert bound_s <= found.step_s * (1 + 1e-6), f"bound {bound_s} above the step {found.step_s}"
    bound = min(bound_s, found.step_s)
    closed = found.step_s - bound <= limits.gap * found.step_s
    status = MemoryStatus.OPTIMAL if closed else MemoryStatus.FEASIBLE
    return MemoryAnswer(actions, found, bound, status, (f"proved of {SCOPE}, within a gap of {limits.gap:g}",))


def _give_up(alone: Recomputation, time_s: float) -> NoReturn:
    if alone.refuted and not alone.arrays.problem.tiers:
        names = [alone.arrays.problem.ops[op].label for op in alone.refuted]
        _refuse(alone.arrays, alone.budget, f"at ops {'; '.join(names[:4])} taken together")
    need = least_need(alone.arrays, time.perf_counter() + _NEED_S)
    if need.nbytes > alone.budget:
        _refuse(alone.arrays, alone.budget, "in the given order of execution")
    raise SolverLimitError(
        f"no schedule within {alone.budget} bytes was found in {time_s:g} s, nor proved impossible; give "
        f"more time, or more memory: the least budget lies between {need.nbytes} bytes, which any schedule needs as op "
        f"{need.op} ({alone.arrays.problem.ops[need.op].label}) executes, and {alone.everything.peak}, which need no "
        "recomputation"
    )


def _refuse_impossible(arrays: Arrays, budget_bytes: int) -> None:
    """Raises where one op alone, or what is there before the first, does not fit."""
    if arrays.start_bytes > budget_bytes:
        raise InfeasibleError(
            f"no schedule fits in {budget_bytes} bytes: {arrays.start_bytes} are there before the first op"
        )
    if arrays.num_ops and int(arrays.working.max()) > budget_bytes:
        _refuse(arrays, budget_bytes, "")


def _refuse(arrays: Arrays, budget_bytes: int, where: str) -> NoReturn:
    op = int(arrays.working.argmax())
    need, name = int(arrays.working[op]), arrays.problem.ops[op].label
    if need > budget_bytes:
        raise InfeasibleError(
            f"no schedule fits in {budget_bytes} bytes: op {op} ({name}) alone needs {need}, with what it reads and "
            "makes and its workspace; split it, or give at least that much"
        )
    least = least_need(arrays, time.perf_counter() + _NEED_S)
    raise InfeasibleError(
        f"no schedule fits in {budget_bytes} bytes: memory does not suffice {where}; as op {least.op} "
        f"({arrays.problem.ops[least.op].label}) executes, {least.nbytes} are needed at least"
    )
