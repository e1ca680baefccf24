"""What the memory strategies share: their limits, how answers are made, and when nothing can fit.

A strategy is a function (problem, budget_bytes, limits) -> MemoryAnswer. It decides in its paper's own terms; the
schedule it hands back is priced by `schedule.evaluate` alone. Most decide an order of executions, repeats among them:
what is held when then follows (`schedule.freeing` frees each result after its last use before it is made again).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from paraplan.ir.errors import ConstraintError, InfeasibleError, SolverLimitError
from paraplan.ir.execution.memory_actions import Actions
from paraplan.planner.memory.answer import MemoryAnswer, MemoryStatus
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.problem import GIVEN, MemoryProblem, Tier

GIB = 2**30


@dataclass(frozen=True)
class Limits:
    """What a strategy may spend.

    Attributes:
        time_s: wall seconds; looked at now and then.
        seed: of what is drawn.
        memory_slots: into how many equal parts dynamic programs over bytes divide the budget (sizes are rounded up).
    """

    time_s: float = 60.0
    seed: int = 0
    memory_slots: int = 500


class MemoryStrategy(Protocol):
    """A named algorithm that says in which order a step's ops run, and what is held or copied away meanwhile."""

    def __call__(self, problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
        """The schedule that its paper's method finds.

        Args:
            problem: ops and tensors of a step of one device, with the tiers it may copy to.
            budget_bytes: that may be held at once.
            limits: of time, and of how finely bytes are counted.
        Raises:
            InfeasibleError: nothing can meet the budget.
            SolverLimitError: the method found nothing within it.
            ConstraintError: the method does not apply to the problem.
        """


class Clock:
    """The time a strategy has left."""

    def __init__(self, limits: Limits) -> None:
        self.end = time.monotonic() + limits.time_s

    @property
    def left_s(self) -> float:
        """Seconds left, never below a hundredth (solvers take no zero)."""
        return max(0.01, self.end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the time has passed."""
        return time.monotonic() >= self.end


def given_bytes(problem: MemoryProblem) -> int:
    """Bytes of what is there before the first op: it cannot be made again."""
    return sum(tensor.nbytes for tensor in problem.tensors if tensor.maker == GIVEN)


def check_budget(problem: MemoryProblem, budget_bytes: int) -> None:
    """Refuses budgets that nothing can meet.

    Raises:
        InfeasibleError: an op alone needs more, or what is given before or kept after the step does.
    """
    kept = problem.base_bytes + sum(tensor.nbytes for tensor in problem.tensors if tensor.kept)
    given = problem.base_bytes + given_bytes(problem)
    needs = [(given, "what is given before the step"), (kept, "what is kept after it")]
    needs += [(problem.working_bytes(index), f"op {index} ({op.name}) alone") for index, op in enumerate(problem.ops)]
    most, what = max(needs, key=lambda need: need[0])
    if most > budget_bytes:
        raise InfeasibleError(
            f"{what} needs {most} bytes ({most / GIB:.2f} GiB), the budget is {budget_bytes}: raise it or split the op"
        )


def pruned(problem: MemoryProblem, ops: tuple[int, ...]) -> tuple[int, ...]:
    """The sequence without repeats whose results nobody reads, and without repeats of ops that must not be."""
    seen: set[int] = set()
    first = [index not in seen and not seen.add(index) for index in ops]  # type: ignore[func-returns-value]
    needed: set[int] = set()
    found = []
    for index, is_first in zip(reversed(ops), reversed(first), strict=True):
        op = problem.ops[index]
        if not is_first and (not op.repeatable or needed.isdisjoint(op.makes)):
            continue
        needed.difference_update(op.makes)
        needed.update(op.reads)
        found.append(index)
    return tuple(reversed(found))


def answer(
    problem: MemoryProblem,
    actions: Actions,
    *,
    bound_s: float | None = None,
    status: MemoryStatus = MemoryStatus.FEASIBLE,
    notes: tuple[str, ...] = (),
) -> MemoryAnswer:
    """An answer, priced.

    Args:
        problem: ops and tensors.
        actions: the schedule.
        bound_s: no schedule of the class takes less; None where nothing is proved.
        status: of the search.
        notes: what the reader should know.
    """
    evaluation = evaluate(problem, actions)
    if bound_s is not None:
        bound_s = min(bound_s, evaluation.step_s)
    return MemoryAnswer(actions, evaluation, bound_s, status, notes)


def answer_ops(problem: MemoryProblem, ops: tuple[int, ...], notes: tuple[str, ...] = ()) -> MemoryAnswer:
    """The answer that executes ops in an order, useless repeats left out.

    Args:
        problem: ops and tensors.
        ops: in order, with repeats.
        notes: what the reader should know.
    """
    return answer(problem, freeing(problem, pruned(problem, ops)), notes=notes)


def fits(found: MemoryAnswer, budget_bytes: int) -> bool:
    """Whether its peak is within the budget."""
    return found.evaluation.peak_bytes <= budget_bytes


def keep_all(problem: MemoryProblem) -> MemoryAnswer:
    """Every op once in the order given."""
    return answer_ops(problem, tuple(range(len(problem.ops))), ("every op once",))


def nothing_fits(strategy: str, budget_bytes: int, least_bytes: float | None, why: str) -> SolverLimitError:
    """What a strategy raises that found no schedule within the budget.

    Args:
        strategy: its name.
        budget_bytes: that may be held.
        least_bytes: of its leanest schedule; None where there is none.
        why: in words.
    """
    least = "" if least_bytes is None else f"; the leanest it tried peaks at {int(least_bytes)} bytes"
    return SolverLimitError(
        f"{strategy} found no schedule within {budget_bytes} bytes ({why}){least}: raise the budget or take another "
        "strategy"
    )


def best_within(strategy: str, tried: list[MemoryAnswer], budget_bytes: int, why: str) -> MemoryAnswer:
    """The shortest of the answers that fit, the earlier of equals.

    Args:
        strategy: its name.
        tried: answers.
        budget_bytes: that may be held.
        why: what was tried, in words.
    Raises:
        SolverLimitError: none does.
    """
    fitting = [each for each in tried if fits(each, budget_bytes)]
    if not fitting:
        least = min((each.evaluation.peak_bytes for each in tried), default=None)
        raise nothing_fits(strategy, budget_bytes, least, why)
    return min(fitting, key=lambda each: each.evaluation.step_s)


def tier_of(problem: MemoryProblem, strategy: str) -> Tier:
    """Where a strategy offloads to: the first tier.

    Raises:
        ConstraintError: there is none.
    """
    if not problem.tiers:
        raise ConstraintError(f"{strategy} copies tensors to a slower tier and the problem has none: describe one")
    return problem.tiers[0]
