"""A search over the groups of a cluster: every set of groups as a cluster of its own, and pipelines over all of a set.

One stage over unequal devices runs at the pace of the slowest, and a slow link between groups is paid in every step, so
the fastest plan may well use some groups alone, or give each group positions of a pipeline with a sharding, a cut and a
budget of their own (`search_mixed`). The sets (`group_sets`) are searched within one time limit, all groups first, and
the plan of the shortest simulated step is taken. Where it leaves groups idle it is a plan for the cluster of the
others, to be started on their nodes alone. Its certificate is of the groups it uses. Clusters of one group are
searched as they are.

What is cheap is planned first: every set's devices as one mesh, so that a search that time cuts short loses to none of
these. What time did cut short is searched again in what others leave of it. A set whose products alone take nearly as
long as the best plan known (`work_bound`) comes last, and one whose products take longer not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from paraplan.ir.errors import ParaplanError, SolverLimitError
from paraplan.ir.plan import Plan
from paraplan.ir.plan_words import plan_words
from paraplan.planner.alternatives.tried import in_vain, kept, planned
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan, Progress
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_microbatches, check_param_names, planning_time_s
from paraplan.planner.deadline import Deadline
from paraplan.planner.interrupts import ended, found_until
from paraplan.planner.mixed.group_sets import GroupSet, cluster_of, group_sets, said
from paraplan.planner.mixed.listing import check_on_cluster
from paraplan.planner.mixed.search_mixed import allows_mixed
from paraplan.planner.mixed.work_bound import certified_by_work, work_bound_s

Search = Callable[[Job, Constraints, float, Progress, bool], BestPlan]
"""A search on all devices of a job's cluster: the job, what is pinned, seconds, progress, whether to certify."""
Way = tuple[GroupSet, bool]
"""A set of groups, and whether it is searched for pipelines whose positions differ."""
ALL_SHARE, MIXED_SHARE = 0.4, 0.5
"""Of the time left, for the search on all groups alike where pipelines follow that differ, and for such pipelines."""
ONE_MESH_SHARE = 0.1
"""Of the time limit, for every set's devices as one mesh, together."""
IDLE = " idle: this plan is for "
"""Between the groups that a plan leaves out and its cluster, in its note."""
DOUBTFUL = 0.6
"""Of the best step known, what products take at their peak rates from which on a set of groups comes last: hardly
anything runs at more of its peak."""


def among_groups(
    searches: tuple[Search, Search],
    job: Job,
    constraints: Constraints,
    time_limit_s: float,
    progress: Progress,
    certify: bool,
) -> BestPlan:
    """The fastest plan on all groups of a cluster or on some.

    Args:
        searches: on all devices alike; and for pipelines whose positions differ.
        job, constraints, progress, certify: as a search takes them.
        time_limit_s: for all of it.
    Raises:
        ConstraintError: what is pinned contradicts itself, the model or all devices.
        InfeasibleError: proved on all groups, and on every set that what is pinned allows.
        Interrupted: with the best plan until then, or none.
        SolverLimitError: nothing was found, nor proved impossible everywhere.
    """
    check_param_names(constraints, job.program.params)
    check_microbatches(constraints, job.program)
    if len(job.cluster.groups) == 1:
        return searches[0](job, constraints, time_limit_s, progress, certify)
    check_on_cluster(constraints, job.cluster)
    search = _GroupsSearch(searches, job, constraints, progress, certify, Deadline(planning_time_s(time_limit_s)))
    is_interrupted = False
    try:
        search.run()
    except KeyboardInterrupt:
        if not search.found:
            raise
        is_interrupted = True
    if not search.found:
        raise _nothing(search.ways, search.faults)
    found = search.found
    best = min(found, key=lambda way: (found[way].step_s, way[1], len(way[0])))
    plan = _told(job, best, found, search.faults, search.left_out(is_interrupted))
    made = BestPlan(plan, sum(each.solve_s for each in found.values()), search.deadline.passed_s)
    return ended(made, is_interrupted)


@dataclass
class _GroupsSearch:
    """A search under way.

    Attributes:
        searches, job, constraints, progress, certify: as for `among_groups`.
        deadline: of all of it.
        found, faults: per way, its fastest plan, and why it has none.
        searched: ways that were begun with all that is left open.
    """

    searches: tuple[Search, Search]
    job: Job
    constraints: Constraints
    progress: Progress
    certify: bool
    deadline: Deadline
    found: dict[Way, BestPlan] = field(default_factory=dict)
    faults: dict[Way, ParaplanError] = field(default_factory=dict)
    searched: list[Way] = field(default_factory=list)

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """What is searched."""
        return _ways(self.job, self.constraints)

    def run(self) -> None:
        """Search every way, as long as there is time; those that it cut short again in what others leave of it, and
        then those of which little is to be hoped."""
        self._as_one_mesh()
        cut: list[Way] = []
        doubtful: list[Way] = []
        for number, way in enumerate(self.ways):
            late = self.found and self.deadline.is_over
            if self._least_s(way) > DOUBTFUL * self._best_s:
                doubtful.append(way)
            elif not late and self._has_taken_all(way, self.deadline.share_s(_share(self.ways, number))):
                cut.append(way)
        again = [*cut, *doubtful]
        for number, way in enumerate(again):
            if not self.deadline.is_over and self._least_s(way) < self._best_s:
                self._has_taken_all(way, self.deadline.share_s(1 / (len(again) - number)))

    @property
    def _best_s(self) -> float:
        return min((each.step_s for each in self.found.values()), default=math.inf)

    def _least_s(self, way: Way) -> float:
        """What no plan on a set of groups is faster than."""
        return work_bound_s(self.job.program, cluster_of(self.job.cluster, way[0]))

    def left_out(self, is_interrupted: bool) -> dict[Way, str]:
        """Ways that were not begun, and why."""
        ended = "the search was interrupted" if is_interrupted else "time ran out"
        slow = "its products alone take longer"
        left = [way for way in self.ways if way not in self.searched]
        return {way: slow if self._least_s(way) >= self._best_s else ended for way in left}

    def _as_one_mesh(self) -> None:
        """Every set's devices as one mesh, where that and more is to be chosen."""
        if self.constraints.pp is not None or self.constraints.schedule is not None:
            return
        limit_s, alike = ONE_MESH_SHARE * self.deadline.limit_s, [way for way in self.ways if not way[1]]
        for way in alike:
            if self._least_s(way) <= DOUBTFUL * self._best_s:
                with suppress(ParaplanError):  # whose search says why
                    self._search(way, msgspec.structs.replace(self.constraints, pp=1), limit_s / len(alike), False)

    def _has_taken_all(self, way: Way, share_s: float) -> bool:
        """Whether a search took all its time."""
        began_s = self.deadline.passed_s
        self.searched.append(way)
        try:
            self._search(way, self.constraints, share_s, self.certify)
        except ParaplanError as fault:  # of one way: others are looked at
            self.faults[way] = fault
        return self.deadline.passed_s - began_s >= share_s

    def _search(self, way: Way, pins: Constraints, share_s: float, certify: bool) -> None:
        words = said(self.job.cluster, way[0])
        part = replace(self.job, cluster=cluster_of(self.job.cluster, way[0]))
        made: list[BestPlan] = []
        try:
            search = self.searches[way[1]]
            made.append(search(part, pins, share_s, lambda text: self.progress(f"on {words}: {text}"), certify))
        except KeyboardInterrupt as fault:
            made += found_until(fault, BestPlan)
            raise
        finally:
            for each in made:
                self.found[way] = min(each, self.found.get(way, each), key=lambda known: known.step_s)


def _share(ways: Sequence[Way], number: int) -> float:
    """Of the time left, what a search has that others follow."""
    if number == len(ways) - 1:
        return 1.0
    if ways[number][1]:
        return MIXED_SHARE
    if number == 0:
        return ALL_SHARE if ways[1][1] else 0.5
    return 1 / (len(ways) - number)


def _ways(job: Job, constraints: Constraints) -> tuple[Way, ...]:
    """What is searched: every set of groups alike, and what can be of several groups that differ."""
    found: list[Way] = []
    for chosen in group_sets(job.cluster):
        found.append((chosen, False))
        if allows_mixed(replace(job, cluster=cluster_of(job.cluster, chosen)), constraints):
            found.append((chosen, True))
    return tuple(found)


def _nothing(ways: Sequence[Way], faults: dict[Way, ParaplanError]) -> ParaplanError:
    """What is said of all groups; as proved only where it is proved of every set."""
    first = faults[ways[0]]
    open_ = [fault for fault in faults.values() if isinstance(fault, SolverLimitError)]
    if not open_ or isinstance(first, SolverLimitError):
        return first
    return SolverLimitError(
        f"{first}; on some of the groups alone nothing was found, and not all of it is proved: {open_[0]}"
    )


def _told(
    job: Job,
    best: Way,
    found: dict[Way, BestPlan],
    faults: dict[Way, ParaplanError],
    left: Mapping[Way, str],
) -> Plan:
    """The best plan with what is to be known of the others, and of those left out, why."""
    cluster, plan = job.cluster, found[best].plan
    everything = len(cluster.groups)
    idle = tuple(index for index in range(everything) if index not in best[0])

    def of(way: Way) -> str:
        return f"{said(cluster, way[0])}{', positions of their own' if way[1] else ''}"

    words = [f"{of(each)}: {made.step_s:.4g} s" for each, made in found.items()]
    words += [f"{of(each)}: no plan" for each in faults if each not in found]
    words += [f"{of(each)}: not searched, as {why}" for each, why in left.items()]
    notes = [f"groups of nodes searched, each set as a cluster of its own: {'; '.join(words)}"]
    if idle:
        notes.insert(0, f"{said(cluster, idle)}{IDLE}{plan.cluster.name}, to be started there alone")
    others = [planned(f"on {of(each)}", made.plan) for each, made in found.items() if each != best]
    none = [in_vain(f"on {of(each)}", fault) for each, fault in faults.items() if each not in found]
    own = plan.tried or (planned(plan_words(plan), plan),)
    certificate = plan.certificate
    if certificate is not None and certificate.bound_s <= 0 and not job.compiled:
        plan = certified_by_work(plan)
        certificate = plan.certificate
    if certificate is not None:
        scope = f"{certificate.bound_scope}; on {said(cluster, best[0])}{' alone' if idle else ''}"
        certificate = msgspec.structs.replace(certificate, bound_scope=scope)
    return msgspec.structs.replace(
        plan, notes=(*plan.notes, *notes), tried=kept((*others, *none, *own)), certificate=certificate
    )
