"""Memory strategies side by side: ours and the named ones, on the program of one device, at some budgets.

The program is flattened into ops and storages (`memory.flatten`), so what is compared is what would be executed, timed
as the simulator times it. Every schedule is priced by the same evaluation, whatever its method thinks of it.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from paraplan.baselines import MEMORY, Limits
from paraplan.cost_models.predict import plan_costs
from paraplan.ir.errors import ConstraintError, InfeasibleError, SolverLimitError
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.plan import Plan
from paraplan.planner.memory.answer import MemoryAnswer
from paraplan.planner.memory.flatten import flatten
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.plan_memory import MemoryLimits, plan_memory
from paraplan.planner.memory.problem import MemoryProblem
from paraplan.planner.memory.single_device import memory_tiers

OURS = "paraplan"
STRATEGIES = (OURS, *MEMORY)


class Outcome(StrEnum):
    """What came of a strategy at a budget."""

    ANSWERED = "answered"
    INFEASIBLE = "infeasible"  # proved
    NONE_FOUND = "none found"  # which proves nothing
    INAPPLICABLE = "does not apply"


@dataclass(frozen=True)
class Compared:
    """One strategy at one budget.

    Attributes:
        strategy, budget_bytes: which.
        answer: what it found; None where nothing.
        why: then, why.
        solve_s: seconds it took.
        outcome: what came of it.
    """

    strategy: str
    budget_bytes: int
    answer: MemoryAnswer | None
    why: str
    solve_s: float
    outcome: Outcome


@dataclass(frozen=True)
class Comparison:
    """Strategies at budgets, and the step they start from.

    Attributes:
        step_s, peak_bytes: of every op once, each result freed after its last reader.
        base_bytes: there all the time (parameters, optimizer states).
        num_ops: of the step.
        rows: by budget, then strategy.
    """

    step_s: float
    peak_bytes: int
    base_bytes: int
    num_ops: int
    rows: tuple[Compared, ...]


def check_names(names: Sequence[str]) -> None:
    """Whether all are `STRATEGIES`.

    Raises:
        ConstraintError: one is not; says which are alike.
    """
    for name in names:
        if name not in STRATEGIES:
            near = [each for each in STRATEGIES if name and name in each]
            near = near or difflib.get_close_matches(name.lower(), STRATEGIES, 3, 0.5)
            said = f"did you mean {' or '.join(near)}? There are" if near else "choose among"
            raise ConstraintError(f"strategy {name!r} is unknown; {said} {', '.join(STRATEGIES)}")


def compare(
    plan: Plan,
    program: RankProgram,
    budgets: Callable[[int, int], Sequence[int]],
    names: Sequence[str],
    time_s: float,
    tell: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Every strategy at every budget.

    Args:
        plan, program: of one device.
        budgets: from the peak without recomputation and what is always there, in bytes, to the budgets.
        names: of `STRATEGIES`.
        time_s: for each strategy at each budget.
        tell: told what is being tried.
    Raises:
        ConstraintError: there is no such strategy.
        InvalidPlanError: the program communicates.
    """
    check_names(names)
    problem = flatten(program, plan_costs(plan)[0]).problem
    problem = replace(problem, tiers=memory_tiers(plan.cluster))
    alone = replace(problem, tiers=())
    start = evaluate(alone, freeing(alone, tuple(range(len(problem.ops)))))
    rows = []
    for budget in budgets(start.peak_bytes, problem.base_bytes):
        for name in names:
            tell(f"{name} within {budget} bytes")
            rows.append(_row(problem, name, budget, time_s))
    return Comparison(start.step_s, start.peak_bytes, problem.base_bytes, len(problem.ops), tuple(rows))


def _row(problem: MemoryProblem, name: str, budget: int, time_s: float) -> Compared:
    started = time.perf_counter()
    answer, why, outcome = None, "", Outcome.ANSWERED
    try:
        if name == OURS:
            answer = plan_memory(problem, budget, MemoryLimits(time_s=time_s))
        else:
            answer = MEMORY[name](problem, budget, Limits(time_s=time_s))
    except InfeasibleError as fault:
        why, outcome = str(fault), Outcome.INFEASIBLE
    except SolverLimitError as fault:
        why, outcome = str(fault), Outcome.NONE_FOUND
    except ConstraintError as fault:
        why, outcome = str(fault), Outcome.INAPPLICABLE
    said = f"{outcome}: {why}" if why else ""
    return Compared(name, budget, answer, said, time.perf_counter() - started, outcome)
