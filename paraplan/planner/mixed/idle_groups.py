"""A search that may leave groups of nodes idle: every set of groups is searched as a cluster of its own.

One stage over unequal devices runs at the pace of the slowest, and a slow link between groups is paid in every step, so
the fastest plan may well use some groups alone. The sets (`group_sets`) are searched within one time limit, all groups
first, and the plan of the shortest simulated step is taken. Where it leaves groups idle it is a plan for the cluster of
the others, to be started on their nodes alone. Its certificate is of the groups it uses. Clusters of one group are
searched as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from paraplan.ir.errors import ConstraintError, NoPlanError, SolverLimitError
from paraplan.ir.plan import Plan
from paraplan.ir.plan_words import plan_words
from paraplan.planner.alternatives.tried import in_vain, kept, planned
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan, Progress
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints, planning_time_s
from paraplan.planner.deadline import Deadline
from paraplan.planner.mixed.group_sets import GroupSet, cluster_of, group_sets, said

Search = Callable[[Job, Constraints, float, Progress, bool], BestPlan]
"""A search on all devices of a job's cluster: the job, what is pinned, seconds, progress, whether to certify."""
ALL_SHARE = 0.5
"""Of the time limit, for the search on all groups where others follow."""


def among_groups(
    search: Search, job: Job, constraints: Constraints, time_limit_s: float, progress: Progress, certify: bool
) -> BestPlan:
    """The fastest plan on all groups of a cluster or on some.

    Args:
        search: on all devices.
        job, constraints, progress, certify: as `search` takes them.
        time_limit_s: for all of it.
    Raises:
        ConstraintError: what is pinned contradicts itself or all devices.
        InfeasibleError: proved on all groups, and on every set that what is pinned allows.
        SolverLimitError: nothing was found, nor proved impossible everywhere.
    """
    if len(job.cluster.groups) == 1:
        return search(job, constraints, time_limit_s, progress, certify)
    check_constraints(constraints, job.cluster.num_devices)
    deadline = Deadline(planning_time_s(time_limit_s))
    sets = group_sets(job.cluster)
    found: dict[GroupSet, BestPlan] = {}
    faults: dict[GroupSet, NoPlanError | ConstraintError] = {}
    late: list[GroupSet] = []
    for number, chosen in enumerate(sets):
        if found and deadline.is_over:
            late.append(chosen)
            continue
        share_s = deadline.share_s(ALL_SHARE if number == 0 else 1 / (len(sets) - number))
        words = said(job.cluster, chosen)
        try:
            found[chosen] = search(
                replace(job, cluster=cluster_of(job.cluster, chosen)),
                constraints,
                share_s,
                lambda text, words=words: progress(f"on {words}: {text}"),  # type: ignore[misc]
                certify,
            )
        except (NoPlanError, ConstraintError) as fault:
            faults[chosen] = fault
    if not found:
        raise _nothing(sets, faults)
    best = min(found, key=lambda chosen: (found[chosen].step_s, len(chosen)))
    plan = _told(job, best, found, faults, late)
    return BestPlan(plan, sum(each.solve_s for each in found.values()), deadline.passed_s)


def _nothing(
    sets: Sequence[GroupSet], faults: dict[GroupSet, NoPlanError | ConstraintError]
) -> NoPlanError | ConstraintError:
    """What is said of all groups; as proved only where it is proved of every set."""
    first = faults[sets[0]]
    open_ = [fault for fault in faults.values() if isinstance(fault, SolverLimitError)]
    if not open_ or isinstance(first, SolverLimitError):
        return first
    return SolverLimitError(
        f"{first}; on some of the groups alone nothing was found, and not all of it is proved: {open_[0]}"
    )


def _told(
    job: Job,
    best: GroupSet,
    found: dict[GroupSet, BestPlan],
    faults: dict[GroupSet, NoPlanError | ConstraintError],
    late: Sequence[GroupSet],
) -> Plan:
    """The best plan with what is to be known of the others."""
    cluster, plan = job.cluster, found[best].plan
    everything = len(cluster.groups)
    idle = tuple(index for index in range(everything) if index not in best)
    words = [f"{said(cluster, each)}: {made.step_s:.4g} s" for each, made in found.items()]
    words += [f"{said(cluster, each)}: no plan" for each in faults]
    words += [f"{said(cluster, each)}: not searched, as time ran out" for each in late]
    notes = [f"groups of nodes searched, each set as a cluster of its own: {'; '.join(words)}"]
    if idle:
        notes.insert(0, f"{said(cluster, idle)} idle: this plan is for {plan.cluster.name}, to be started there alone")
    others = [planned(f"on {said(cluster, each)}", made.plan) for each, made in found.items() if each != best]
    none = [in_vain(f"on {said(cluster, each)}", fault) for each, fault in faults.items()]
    own = plan.tried or (planned(plan_words(plan), plan),)
    certificate = plan.certificate
    if certificate is not None:
        scope = f"{certificate.bound_scope}; on {said(cluster, best)}{' alone' if idle else ''}"
        certificate = msgspec.structs.replace(certificate, bound_scope=scope)
    return msgspec.structs.replace(
        plan, notes=(*plan.notes, *notes), tried=kept((*others, *none, *own)), certificate=certificate
    )
