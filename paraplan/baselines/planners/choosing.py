"""What a named planner chooses, and several side by side.

A planner's answers are tried in its order: constraints are planned as the user's own are, what they leave open being
ours to choose; an `Answer` is made a plan as it stands (`answered`). The first that fits is the plan, or the fastest.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from paraplan.baselines.planners.answered import answered
from paraplan.baselines.planners.registry import NAMES, OURS, PLANNERS
from paraplan.baselines.planners.task import Answer, NamedPlanner, Task
from paraplan.ir.errors import ConstraintError, NoPlanError, SolverLimitError
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan, Progress
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import left_of, planning_time_s
from paraplan.planner.deadline import Deadline
from paraplan.planner.fits import search_room
from paraplan.planner.interrupts import NOTE


def check_planner(name: str) -> None:
    """Refuse a name that no planner has.

    Raises:
        ConstraintError: so it is; says which are alike.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 2) or NAMES
        raise ConstraintError(f"strategy {name!r} is unknown; there are {', '.join(near)}")


def plan_by(
    name: str,
    job: Job,
    constraints: Constraints,
    time_limit_s: float,
    progress: Progress = lambda text: None,
    certify: bool = True,
    passed_s: float = 0.0,
) -> BestPlan:
    """What a named planner chooses.

    Args:
        name: of `NAMES`.
        job: what is planned.
        constraints: what the user pins; a planner's tries that pin something else are left out.
        time_limit_s: for all tries.
        progress: told what is being tried.
        certify: whether our own search bounds the step of every plan in scope; the others prove nothing.
        passed_s: of the limit, before what is planned was captured.
    Raises:
        ConstraintError: there is no such planner, or what is pinned leaves none of its tries.
        InfeasibleError, SolverLimitError: none of them fits; says what the last came to.
        KeyboardInterrupt: before one was found; after that, the plan is of those found until then.
    """
    check_planner(name)
    if name == OURS:
        return search_room(job, constraints, time_limit_s, progress, certify, passed_s)
    planner, deadline = PLANNERS[name], Deadline(planning_time_s(left_of(time_limit_s, passed_s)))
    task = Task(job, constraints, deadline, progress)
    tries = _tries(name, task)
    found: list[BestPlan] = []
    faults: list[NoPlanError | ConstraintError] = []
    done, began = 0, time.perf_counter()
    for number, answer in enumerate(tries):
        if found and (_differ(planner, tries[number - 1], answer) or deadline.is_over):
            break
        if deadline.is_over and 0 < number < len(tries) - 1:  # of what is left, the last holds least
            continue
        done += 1
        try:
            progress(f"{name}: {_words(_pins(answer))}")
            found.append(plan_answer(task, answer))
        except (NoPlanError, ConstraintError) as fault:
            faults.append(fault)
            continue
        except KeyboardInterrupt:
            if not found:
                raise
            found[-1] = replace(found[-1], is_interrupted=True)
        if found[-1].is_interrupted or not planner.fastest:
            break
    if not found:
        raise _nothing(name, faults, done)
    best = min(found, key=lambda each: _step_s(each.plan))
    cut = found[-1].is_interrupted
    notes = [f"chosen as {name} does ({planner.says}): {done} of {len(tries)} tries planned"]
    notes += [NOTE] if cut and NOTE not in best.plan.notes else []
    plan = msgspec.structs.replace(best.plan, notes=(*best.plan.notes, *task.said, *notes))
    return replace(best, plan=plan, total_s=time.perf_counter() - began, is_interrupted=cut)


def _tries(name: str, task: Task) -> list[Constraints | Answer]:
    """A planner's answers that what is pinned allows.

    Raises:
        ConstraintError: it allows none.
        SolverLimitError: the planner has none.
    """
    answers = list(PLANNERS[name].tries(task))
    if not answers:
        late = f" in the {task.deadline.limit_s:.3g} s it had; more time may help" if task.deadline.is_over else ""
        raise SolverLimitError(f"strategy {name!r}: its own search finds nothing that fits{late}")
    tries = list(_allowed(answers, task.constraints))
    if not tries:
        raise ConstraintError(
            f"strategy {name!r} has no plan with what is pinned{_clash(answers, task.constraints)}; pin less, or "
            f"choose {OURS!r}"
        )
    return tries


def _nothing(name: str, faults: Sequence[NoPlanError | ConstraintError], done: int) -> NoPlanError | ConstraintError:
    said = [each for each in faults if isinstance(each, NoPlanError)]
    if not said:
        return ConstraintError(f"strategy {name!r}, whose own choices are among these: {{}}", faults[-1])
    last = said[-1]
    return SolverLimitError(f"strategy {name!r}: none of {done} tries fits; the last: {last}")


def _allowed(tries: Sequence[Constraints | Answer], given: Constraints) -> Iterator[Constraints | Answer]:
    """A planner's answers with what the user pins; those that pin something else are left out."""
    for answer in tries:
        pins = _merged(_pins(answer), given)
        if pins is None:
            continue
        if isinstance(answer, Answer):
            if given.recompute == "none" and set(answer.remade) != {"none"}:
                continue
            remade = (given.recompute,) * len(answer.remade) if given.recompute else answer.remade
            yield replace(answer, pins=pins, remade=remade)
        else:
            yield pins


def plan_answer(task: Task, answer: Constraints | Answer) -> BestPlan:
    """The plan of one of a planner's answers.

    Raises:
        ConstraintError, NoPlanError: there is none that fits.
    """
    if isinstance(answer, Answer):
        return answered(task, answer)
    return search_room(task.job, answer, task.deadline.share_s(), task.progress, certify=False)


def _clash(answers: Sequence[Constraints | Answer], given: Constraints) -> str:
    """Which of the user's pins no answer has, and what answers have instead; "" where that is one's and another's."""
    plain = Constraints()
    for field in plain.__struct_fields__:
        default, theirs = getattr(plain, field), getattr(given, field)
        mine = [getattr(_pins(answer), field) for answer in answers]
        if theirs != default and default not in mine and theirs not in mine:
            has = " or ".join(dict.fromkeys(map(str, mine)))
            return f": {field}={theirs} is pinned, and its plans have {field}={has}"
    return ""


def _pins(answer: Constraints | Answer) -> Constraints:
    return answer.pins if isinstance(answer, Answer) else answer


def _differ(planner: NamedPlanner, before: Constraints | Answer, after: Constraints | Answer) -> bool:
    return any(getattr(_pins(before), name) != getattr(_pins(after), name) for name in planner.degrees)


def _merged(pins: Constraints, given: Constraints) -> Constraints | None:
    """A planner's constraints with the user's; None where both pin something, and differ."""
    plain, made = Constraints(), {}
    for field in pins.__struct_fields__:
        mine, theirs, default = getattr(pins, field), getattr(given, field), getattr(plain, field)
        if mine != default and theirs not in (default, mine):
            return None
        made[field] = theirs if mine == default else mine
    return Constraints(**made)


def _words(pins: Constraints) -> str:
    named = ("pp", "dp", "tp", "zero", "microbatches", "schedule", "recompute")
    return " ".join(f"{name}={getattr(pins, name)}" for name in named if getattr(pins, name) is not None)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


@dataclass(frozen=True)
class ComparedPlan:
    """What one planner chose.

    Attributes:
        strategy: its name.
        plan: None where it found nothing.
        why: then, why.
        solve_s: seconds it took.
    """

    strategy: str
    plan: Plan | None
    why: str
    solve_s: float


def compare_planners(
    job: Job, constraints: Constraints, names: Sequence[str], time_limit_s: float, progress: Progress
) -> list[ComparedPlan]:
    """What named planners choose, side by side.

    Args:
        job, constraints: what is planned, and what is pinned for all.
        names: of `NAMES`.
        time_limit_s: for each.
        progress: told what is being tried.
    """
    found = []
    for name in names:
        began, best, why = time.perf_counter(), None, ""
        try:
            best = plan_by(name, job, constraints, time_limit_s, progress)
        except (NoPlanError, ConstraintError) as fault:
            why = str(fault)
        plan = None if best is None else best.plan
        found.append(ComparedPlan(name, plan, why, time.perf_counter() - began))
        if best is not None and best.is_interrupted:
            left = names[len(found) :]
            return [*found, *(ComparedPlan(each, None, "the comparison was interrupted", 0.0) for each in left)]
    return found
