"""Allowing more is never worse: where things may leave the device and need not, plans of which nothing does come first.

Options to put states, parameters and activations on tiers multiply what a search looks at, and within a time limit it
looks at less of each. So it begins with plans that keep everything, which have a part of the time, and goes on with
all. The faster is given; what is proved is of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import msgspec

from paraplan.ir.errors import NoPlanError
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan, Progress
from paraplan.planner.certificate import certified_as
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.interrupts import handing_on
from paraplan.planner.options.placements import ON_DEVICE

KEPT_SHARE, LEAST_SHARE = 0.5, 0.1
"""Of the time, for plans that keep everything on the device, and what others have at least."""


Room = Callable[[Job, Constraints, float, Progress], float]
"""Given seconds that it may take."""


class PlanSearch(Protocol):
    """A search for the fastest plan."""

    def __call__(
        self,
        job: Job,
        constraints: Constraints,
        time_limit_s: float,
        progress: Progress,
        certify: bool,
        known: Sequence[BestPlan] = (),
    ) -> BestPlan: ...


def allowing(
    search: PlanSearch,
    room: Room,
    job: Job,
    constraints: Constraints,
    time_limit_s: float,
    progress: Progress,
    certify: bool,
) -> BestPlan:
    """The fastest plan that a search finds, not slower than what it finds where nothing leaves the device.

    Args:
        search: with these arguments, and with plans that it is to be faster than.
        room: whether anything may fit under some constraints, told quickly: from 0 for no to 1 for easily.
        job, constraints, time_limit_s, progress, certify: as of `search.search`.
    Raises:
        ConstraintError, InfeasibleError, SolverLimitError: as of the search of all plans.
    """
    kept = msgspec.structs.replace(constraints.placed(ON_DEVICE), offload="none")
    if constraints.pins_away or (kept.places == constraints.places and not constraints.tiers):
        return search(job, constraints, time_limit_s, progress, certify)
    deadline, known = Deadline(time_limit_s), list[BestPlan]()
    with suppress(NoPlanError):
        if share := KEPT_SHARE * room(job, kept, LEAST_SHARE * time_limit_s, progress):
            known.append(search(job, kept, share * time_limit_s, progress, False))
    try:
        with handing_on(known):
            left_s = max(time_limit_s - deadline.passed_s, LEAST_SHARE * time_limit_s)
            found = search(job, constraints, left_s, progress, certify, known)
    except NoPlanError:
        if not known:
            raise
        return known[0]
    if not known or found.step_s < known[0].step_s:
        return found
    (first,), proved = known, found.plan.certificate
    plan = first.plan if proved is None else certified_as(first.plan, proved)
    others = [each for each in (found.step_s, *(draft.step_s for draft in found.others)) if each > first.step_s]
    said = f"the fastest found takes {min(others):.4g} s" if others else "none was found that is faster"
    note = f"nothing leaves the device: of plans of which something does {said}"
    plan = msgspec.structs.replace(plan, notes=(*plan.notes, note), tried=(*plan.tried, *found.plan.tried))
    return replace(first, plan=plan, solve_s=first.solve_s + found.solve_s, total_s=deadline.passed_s)
