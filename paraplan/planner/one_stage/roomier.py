"""A plan that fits by the bytes alive, made one for which allocators have room as well, in its own layouts.

What a caching allocator reserves is known once a plan is lowered, and is no steady function of what is alive: large
parameters are gathered where they are read, not before; and of one stage, more is made again, as much as was reserved
too much, and a little more each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import msgspec

from paraplan.cost_models.predict import predict, with_reserved
from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.plan import Plan, Prediction
from paraplan.ir.sizes import say_size
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan
from paraplan.planner.certificate import certified_as
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.evaluate_plan import gathers_large
from paraplan.planner.one_stage.few_away import with_few_away
from paraplan.planner.one_stage.refitted import refitted
from paraplan.planner.schedules.full_rounds import as_a_whole, programs_of

OTHERS, WORSE = 4, 1.2
"""Plans made on the way that are looked at; how much slower than the first a plan may be for no other to be
searched."""
REFITS, REFIT_STEP, REFIT_SHARE = 5, 0.01, 0.8
"""How often a plan is to recompute more; of the budget, by how much at least, times how often it has been; of the time
left, how long each may take."""


def needed_bytes(plan: Plan) -> int:
    """The most any rank's allocator reserves; where devices have none that caches, the most alive."""
    return max(_predicted(plan).reserved_bytes or _predicted(plan).peak_bytes)


def as_reserved(found: BestPlan, budget: int) -> BestPlan:
    """With what allocators reserve, where the search that made it has not said so for the same budget.

    Args:
        found: a plan that was priced.
        budget: bytes that allocators may reserve on a device.
    """
    if _predicted(found.plan).reserved_bytes:
        return found
    return replace(found, plan=with_reserved(found.plan, programs_of(found.plan), budget))


def with_room(
    job: Job, constraints: Constraints, plan: Plan, budget: int, deadline: Deadline, progress: Callable[[str], None]
) -> list[Plan]:
    """Plans in the layouts of one that allocators have room for: at most one of each way; none where there is none.

    Args:
        job, constraints: what was planned.
        plan: priced, with what is reserved for it, which is more than the budget.
        budget: bytes a device may hold.
        deadline: of the search; after it nothing is begun again.
        progress: told what is being tried.
    """
    few = with_few_away(plan, constraints, budget, deadline, needed_bytes)
    more = [] if few else _recomputing_more(job, constraints, plan, budget, deadline, progress)
    return [*gathering_later(plan, budget), *few, *more]


def gathering_later(plan: Plan, budget: int) -> list[Plan]:
    """The plan with large parameters gathered where they are read, not before, if allocators have room for that.

    Args:
        plan, budget: as of `with_room`.
    """
    known = plan.certificate
    if known is None or not plan.params_ahead or not gathers_large(programs_of(plan)):
        return []
    plan = msgspec.structs.replace(plan, params_ahead=False)
    made = as_a_whole(plan)
    prediction = predict(plan, made.programs, made.simulation)
    plan = certified_as(msgspec.structs.replace(plan, prediction=prediction), known)
    later = with_reserved(plan, made.programs, budget)
    return [later] if needed_bytes(later) <= budget else []


def _recomputing_more(
    job: Job, constraints: Constraints, plan: Plan, budget: int, deadline: Deadline, progress: Callable[[str], None]
) -> list[Plan]:
    """The plan of one stage with as much more made again as allocators need to have room for it."""
    allowed = budget
    for again in range(REFITS):
        if again and deadline.is_over:
            break
        over = max(needed_bytes(plan) - budget, int(REFIT_STEP * (again + 1) * budget))
        progress(f"{say_size(needed_bytes(plan))} would be reserved of {say_size(budget)}; recomputing more")
        allowed = min(max(_predicted(plan).peak_bytes), allowed) - over
        found = refitted(job, plan, constraints, allowed, deadline.share_s(REFIT_SHARE)) if allowed > 0 else None
        if found is None:
            return []
        plan = with_reserved(found, programs_of(found), budget)
        if needed_bytes(plan) <= budget:
            return [plan]
    return []


def others_with_room(first: BestPlan, budget: int, worse: float = WORSE) -> list[BestPlan]:
    """The fastest of the other plans made on the way for which allocators have room, if there is one among those that
    come near the best's step; of however many, where they need not.

    Args:
        first: a search's answer.
        budget: bytes a device may hold.
        worse: how much slower than it they may be.
    """
    near = [draft for draft in first.others if draft.step_s <= worse * first.step_s]
    for draft in near if math.isinf(worse) else near[:OTHERS]:
        with suppress(NoPlanError, ConstraintError):
            plan = draft.made()
            plan = with_reserved(plan, programs_of(plan), budget)
            if needed_bytes(plan) <= budget:
                return [BestPlan(plan, 0.0, 0.0)]
    return []


def _predicted(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction
