"""Planning memory: the least step time within a budget, with a proved bound.

What always is tried first is cheap: keep everything, and squeezing that. Then a loop: solve the relaxation at a few
critical instants (a bound, and what to keep and recompute), realise it just in time, squeeze what overflows, polish and
search around it; where the realised plan overflows becomes an instant. It ends when the gap is closed, nothing new is
learnt, or time is up. Small steps that are not settled then are searched exhaustively.

The bound holds for every schedule that executes ops for the first time in the given order (`SCOPE`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from paraplan.ir.errors import InfeasibleError, SolverLimitError
from paraplan.planner.memory.exact import search_states
from paraplan.planner.memory.improve import improve
from paraplan.planner.memory.problem import MemoryProblem, verify_problem
from paraplan.planner.memory.realise import realise
from paraplan.planner.memory.relaxation import build_relaxation
from paraplan.planner.memory.reruns import Arrays, Profile, profile_of
from paraplan.planner.memory.schedule import Actions, Evaluation, evaluate, freeing
from paraplan.planner.memory.squeeze import polish, squeeze
from paraplan.planner.milp import Status, solve

SCOPE = "ops executed for the first time in the given order"
SMALL_OPS = 24
"""Steps of up to so many ops and tensors are searched exhaustively where all else leaves a gap."""


@dataclass(frozen=True)
class MemoryLimits:
    """When to stop.

    Attributes:
        time_s: of the whole search.
        gap: (step - bound) / step that is good enough.
        rounds: of local search after each relaxation.
        instants: the most of them.
    """

    time_s: float = 60.0
    gap: float = 1e-4
    rounds: int = 20
    instants: int = 40


@dataclass(frozen=True)
class MemoryAnswer:
    """A schedule within the budget.

    Attributes:
        actions: what to do, in order.
        evaluation: what that costs, replayed.
        bound_s: no schedule of `SCOPE` takes less.
        status: OPTIMAL where the gap asked for is closed, else FEASIBLE.
    """

    actions: Actions
    evaluation: Evaluation
    bound_s: float
    status: Status

    @property
    def gap(self) -> float:
        """(step - bound) / step."""
        step = self.evaluation.step_s
        return (step - self.bound_s) / step if step else 0.0


def plan_memory(problem: MemoryProblem, budget_bytes: int, limits: MemoryLimits | None = None) -> MemoryAnswer:
    """The fastest schedule found whose peak is within a budget.

    Raises:
        InfeasibleError: proved that there is none in the given order; names the op that needs most and what it needs.
        SolverLimitError: none was found, nor proved impossible.
        InvalidPlanError: the ops do not run in their order.
    """
    verify_problem(problem)
    found = _Search(problem, budget_bytes, limits or MemoryLimits()).run()
    return found


class _Search:
    """The best schedule and bound so far."""

    def __init__(self, problem: MemoryProblem, budget_bytes: int, limits: MemoryLimits) -> None:
        self.problem, self.budget, self.limits = problem, budget_bytes, limits
        self.arrays = Arrays(problem)
        self.deadline = time.perf_counter() + limits.time_s
        self.best: Profile | None = None
        self.bound_s = problem.compute_s
        self.instants: set[int] = set()

    def run(self) -> MemoryAnswer:
        refuse_impossible(self.arrays, self.budget)
        everything = profile_of(self.arrays, self.arrays.diagonal())
        self.instants = {int(everything.stages[int(everything.live.argmax())])}
        if everything.peak <= self.budget:
            self.best = everything
        else:
            self._consider(everything)
            self._refine()
        if self.gap > self.limits.gap and self.arrays.num_ops <= SMALL_OPS and self.arrays.num_tensors <= SMALL_OPS:
            settled = self._settle()
            if settled is not None:
                return settled
        if self.best is None:
            raise SolverLimitError(
                f"no schedule within {self.budget} bytes was found in {self.limits.time_s:g} s, nor proved impossible; "
                f"give more time, or at least {everything.peak} bytes, which need no recomputation"
            )
        assert self.best.peak <= self.budget
        return self._answer(tuple(self.best.ops.tolist()), self.bound_s)

    @property
    def gap(self) -> float:
        if self.best is None:
            return np.inf
        step = self.problem.compute_s + self.best.recomputed_s
        return (step - self.bound_s) / step if step else 0.0

    @property
    def left_s(self) -> float:
        return self.deadline - time.perf_counter()

    def _consider(self, start: Profile) -> None:
        """Squeezes a schedule until it fits, searches around it and keeps the better."""
        most = np.inf if self.best is None else 1.5 * self.best.recomputed_s + 0.02 * self.problem.compute_s
        found = squeeze(start, self.budget, self.deadline, most_s=most)
        if found is None:
            return
        found = polish(found, self.budget)
        if self.best is None or found.recomputed_s < self.best.recomputed_s:
            self.best = found

    def _refine(self) -> None:
        """Relaxations with more and more instants."""
        while self.gap > self.limits.gap and self.left_s > 0:
            instants = tuple(sorted(self.instants))
            relaxation = build_relaxation(self.arrays, instants, self.budget)
            solution = solve(
                relaxation.milp, time_limit_s=max(0.1, self.left_s / 2), relative_gap=min(self.limits.gap / 2, 1e-3),
                warm_start=None if self.best is None else relaxation.encode(self.best),
            )  # fmt: skip
            if solution.status is Status.INFEASIBLE and self.arrays.num_ops <= SMALL_OPS:
                return
            if solution.status is Status.INFEASIBLE:
                refuse(self.arrays, self.budget, f"at ops {[self.problem.ops[i].name for i in instants][:8]} together")
            self.bound_s = max(self.bound_s, solution.bound * self.problem.compute_s)
            if solution.values is None:
                return
            start = realise(self.arrays, instants, relaxation.residents(solution.values))
            self._consider(start)
            if self.best is not None and self.gap > self.limits.gap:
                enough = self.bound_s - self.problem.compute_s
                until = time.perf_counter() + self.left_s / 4
                self.best = improve(self.best, self.budget, self.limits.rounds, until, enough)
            if TRACE: print(f"   T={len(instants)} cols {relaxation.milp.num_columns} bound {100*(self.bound_s/self.problem.compute_s-1):.3f} obj {100*(solution.objective-1):.3f} real {100*start.recomputed_s/self.problem.compute_s:.3f} peak {start.peak/self.budget:.3f} best {100*self.best.recomputed_s/self.problem.compute_s if self.best else -1:.3f} t {self.limits.time_s-self.left_s:.1f} cpu {time.process_time():.1f}", flush=True)
            more = overflowing(start, self.budget) - self.instants
            if not more or len(self.instants) >= self.limits.instants:
                return
            self.instants |= more

    def _settle(self) -> MemoryAnswer | None:
        """By exhaustion: in the given order, or in any where that one has none."""
        for in_order in (True, False):
            found = search_states(self.problem, self.budget, in_order)
            if not found.complete:
                return None
            if found.ops is not None:
                return self._answer(found.ops, found.seconds)
        refuse(self.arrays, self.budget, "in any order")
        return None

    def _answer(self, ops: tuple[int, ...], bound_s: float) -> MemoryAnswer:
        actions = freeing(self.problem, ops)
        found = evaluate(self.problem, actions)
        assert found.peak_bytes <= self.budget, f"{found.peak_bytes} bytes planned for {self.budget}"
        assert bound_s <= found.step_s * (1 + 1e-6), f"bound {bound_s} above the step {found.step_s}"
        bound = min(bound_s, found.step_s)
        closed = found.step_s - bound <= self.limits.gap * found.step_s
        return MemoryAnswer(actions, found, bound, Status.OPTIMAL if closed else Status.FEASIBLE)


TRACE = False

def overflowing(profile: Profile, budget_bytes: int, most: int = 4) -> set[int]:
    """Stages of the highest overflows of a schedule, some distance apart."""
    live = np.where(profile.live > budget_bytes, profile.live, 0)
    apart = max(1, profile.arrays.num_ops // 40)
    found: set[int] = set()
    while len(found) < most and live.max(initial=0) > 0:
        position = int(live.argmax())
        stage = int(profile.stages[position])
        # Inside a burst of reruns the bytes are those before the stage's own op.
        found.add(stage if profile.ops[position] == stage else max(0, stage - 1))
        live[np.abs(profile.stages - stage) <= apart] = 0
    return found


def refuse_impossible(arrays: Arrays, budget_bytes: int) -> None:
    """Raises where one op alone, or what is there before the first, does not fit."""
    if arrays.start_bytes > budget_bytes:
        raise InfeasibleError(f"{arrays.start_bytes} bytes are there before the first op, above a budget of {budget_bytes}")
    if arrays.num_ops and int(arrays.working.max()) > budget_bytes:
        refuse(arrays, budget_bytes, "")


def refuse(arrays: Arrays, budget_bytes: int, where: str) -> NoReturn:
    """Raises: nothing fits."""
    op = int(arrays.working.argmax())
    need = int(arrays.working[op])
    name = arrays.problem.ops[op].name
    if need > budget_bytes:
        raise InfeasibleError(
            f"no schedule fits in {budget_bytes} bytes: op {op} ({name}) alone needs {need}, with what it reads and "
            "makes and its workspace; split it, or give at least that much"
        )
    raise InfeasibleError(f"no schedule fits in {budget_bytes} bytes: memory does not suffice {where}; the least any op "
                          f"needs alone is {need} (op {op}, {name})")
