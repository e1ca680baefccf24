"""Of a search that found nothing: by how much lean plans, quickly made, are over what a device may hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import msgspec

from paraplan.cost_models.predict import with_reserved
from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.plan import Plan
from paraplan.ir.plan_words import plan_words
from paraplan.ir.sizes import say_size
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.one_stage.all_sharded import all_sharded
from paraplan.planner.one_stage.roomier import needed_bytes
from paraplan.planner.schedules.full_rounds import programs_of

TIMES = 1024
"""As much memory as devices have, for a plan to be made whatever it needs."""
TRIED, TIME_S = 4, 2.5
"""Plans made, and the seconds each may take to solve."""
ROUNDS = 8
"""Limits of allocators tried, one after another."""


def how_near(job: Job, constraints: Constraints, budget: int, find: Callable[..., BestPlan]) -> str:
    """What the leanest of some plans needs, with everything sharded and all made again or nothing, and what would help;
    empty where none is made.

    Args:
        job, constraints: what was searched.
        budget: bytes a device may hold.
        find: a search (`planner.search.find`).
    """
    found = _lean_plans(job, constraints, budget, find)
    if not found:
        return ""
    least = min(found, key=needed_bytes)
    over = needed_bytes(least) - budget
    if over <= 0:
        return ""
    away = "" if constraints.tiers else ", or states that leave the device (offload='host')"
    return (
        f"no plan was found that fits: the leanest of {len(found)} that divide everything and recompute all or nothing "
        f"({plan_words(least)}) needs {say_size(needed_bytes(least))}, {say_size(over)} more than the "
        f"{say_size(budget)} of a device that are a plan's; use more devices, a smaller batch or shorter sequences, an "
        f"optimizer of fewer states{away}. Of those tried before: "
    )


def what_fits(job: Job, constraints: Constraints, budget: int, find: Callable[..., BestPlan]) -> str:
    """What the leanest of these plans needs, where less than some bound is proved not to be enough; empty where none is
    made, and where it is not memory that is missing.

    Args:
        job, constraints, budget, find: as of `how_near`.
    """
    found = _lean_plans(job, constraints, budget, find)
    if not found:
        return ""
    least = min(found, key=needed_bytes)
    words = f"; {plan_words(least)} would do with {say_size(needed_bytes(least))}"
    return words if needed_bytes(least) > budget else ""


def _lean_plans(job: Job, constraints: Constraints, budget: int, find: Callable[..., BestPlan]) -> list[Plan]:
    roomy = replace(job, cluster=_with_memory(job.cluster))
    deadline, found = Deadline(TRIED * TIME_S), list[Plan]()
    for pins in all_sharded(job, msgspec.structs.replace(constraints, memory_bytes=None)):
        if len(found) == TRIED or deadline.is_over:
            break
        with suppress(NoPlanError, ConstraintError):
            plan = find(roomy, pins, TIME_S, certify=False).plan
            found.append(_reserved_within(plan, budget) if constraints.reserve_bytes != 0 else plan)
    return found


def _reserved_within(plan: Plan, budget: int) -> Plan:
    """The plan as allocators hold it within what is reserved for it then, of the budget or more: what they give back as
    they come to a limit hangs on that."""
    programs = programs_of(plan)
    made = with_reserved(plan, programs, budget)
    for _ in range(ROUNDS):
        needed = needed_bytes(made)
        if needed <= budget:
            break
        made, budget = with_reserved(plan, programs, needed), needed
    return made


def _with_memory(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster, its devices with memory for anything."""
    groups = [
        msgspec.structs.replace(
            group, device=msgspec.structs.replace(group.device, memory_bytes=TIMES * group.device.memory_bytes)
        )
        for group in cluster.groups
    ]
    return msgspec.structs.replace(cluster, groups=tuple(groups))
