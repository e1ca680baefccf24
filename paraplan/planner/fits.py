"""Plans that fit as allocators hold them: what they reserve, not what is alive, is within what devices leave to a plan.

What a caching allocator reserves is known once a plan is lowered (`cost_models.simulator.allocator_replay`) and is no
sum that a solver could bound. So the search is for bytes alive, and where more would be reserved for its plan than
there is, the fastest other plan that it made on the way and for which there is room is kept; of one stage, it itself
recomputes more until there is (`one_stage.refitted`), and gathers no large parameters ahead; and it searches again for
fewer: as many as would do if as large a share of what is reserved were alive, or, where that is too few for any plan,
halfway between. That is done on the plan's mesh, which some percent of memory seldom change, in its microbatches and in
any, and on all meshes where nothing fits there. All of it shares one time limit, of which the first search has a part
where later ones may follow; when it is over the plan of least memory is looked for, and where that does not fit there
are a few more tries, short ones, on the last plan's mesh and in its number of microbatches. Where they find nothing,
one device's plan is the leanest that is found (`planner.passes.leanest`), if that fits.

With R(p) >= peak(p) what is reserved for a plan and B the budget, every p with R(p) <= B has peak(p) <= B: the first
search's bound holds for all of them, that of a later one only for plans within its own budget. So the first one's is
what is certified. That nothing is found within a lower budget proves nothing about B.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import msgspec

from paraplan.ir.errors import InfeasibleError, NoPlanError, SolverLimitError
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.plan import Plan, Prediction
from paraplan.ir.plan_words import plan_words
from paraplan.ir.process.garbage import seldom_collected
from paraplan.ir.sizes import say_size
from paraplan.planner.allowing import allowing
from paraplan.planner.alternatives.tried import kept, planned, unreserved
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan, Progress
from paraplan.planner.certificate import certified_as
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.contradictions import left_of, planning_time_s
from paraplan.planner.deadline import FIRST, Deadline
from paraplan.planner.interrupts import Interrupted, found_until, handing_on, interrupted_plan
from paraplan.planner.joint.planned_again import planned_again
from paraplan.planner.mixed.idle_groups import among_groups
from paraplan.planner.one_stage.least_memory import LeastMemory
from paraplan.planner.one_stage.nearest_plan import how_near, what_fits
from paraplan.planner.one_stage.roomier import (
    WORSE,
    as_reserved,
    gathering_later,
    needed_bytes,
    others_with_room,
    with_room,
)
from paraplan.planner.pipeline.draft import Draft
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.search import find, find_mixed, prepared

ROUNDS = 10
"""Searches for fewer bytes, on one mesh and then on all."""
ENOUGH = 0.02
"""How much slower than the first a plan may be for no other microbatches to be searched."""
LATE = 2
"""Searches begun after the time is over."""
STRIDE = 0.002
"""Of the bytes alive, how many fewer the first of these searches is for at least, and the next for twice as many: what
is reserved may hardly depend on them."""
EACH = 0.2
"""Of the time, what a search for fewer bytes has at least."""
_NEAR = 200
"""Budgets nearer than one part in so many are not told apart."""


def search_room(
    job: Job,
    constraints: Constraints,
    time_limit_s: float = 60.0,
    progress: Progress = lambda text: None,
    certify: bool = True,
    passed_s: float = 0.0,
) -> BestPlan:
    """The fastest plan found for which allocators have room.

    Args:
        job, constraints, progress, certify: as for `search`; with `reserve_bytes` 0, what allocators reserve is
            predicted and not looked at.
        time_limit_s: for all of it.
        passed_s: of that, before what is planned was captured.
    Raises:
        ConstraintError, InfeasibleError, KeyboardInterrupt: as by `search`.
        SolverLimitError: likewise; or plans fit by the bytes alive, and no plan was found that fits as it is reserved.
    """

    def made(limit_s: float) -> BestPlan:
        searches = partial(allowing, partial(_search_room, asked_s=limit_s), _room), _mixed_room
        return among_groups(searches, job, constraints, left_of(limit_s, passed_s), progress, certify)

    try:
        return made(time_limit_s)
    except NoPlanError as fault:
        raise fault.explained() from None
    except KeyboardInterrupt as fault:
        return interrupted_plan(fault, partial(made, 0.0), progress)


@seldom_collected()
def _search_room(
    job: Job,
    constraints: Constraints,
    time_limit_s: float = 60.0,
    progress: Progress = lambda text: None,
    certify: bool = True,
    known: Sequence[BestPlan] = (),
    *,
    asked_s: float,
) -> BestPlan:
    """The plan of a part of the time that was asked for."""
    deadline = Deadline(planning_time_s(time_limit_s), asked_s)
    time_limit_s = deadline.limit_s
    looks = constraints.reserve_bytes != 0 and all(group.device.backend == "cuda" for group in job.cluster.groups)
    first_s = (FIRST if looks else 1.0) * time_limit_s
    budget = device_budget(job.cluster, constraints)
    try:
        drafts = [Draft.of(each.plan) for each in known]
        first = find(job, constraints, first_s, progress, certify, reserves=looks, known=drafts)
    except KeyboardInterrupt as fault:
        raise Interrupted(_fitting(found_until(fault, BestPlan), budget, looks)) from None
    except InfeasibleError as fault:
        raise _with_leanest(fault, job, constraints, budget) from None
    except SolverLimitError as fault:
        lean = None if known else _least_memory(job, constraints, deadline, progress).plan(constraints)
        if lean is None:
            raise _with_nearest(fault, job, constraints, budget) from None
        return _timed(lean, deadline)
    tries = [as_reserved(first, budget)]
    if not looks or needed_bytes(tries[0].plan) <= budget:
        return _timed(tries[0], deadline)
    try:
        least = partial(_least_memory(job, constraints, deadline, progress).plan, constraints)
        rounds = _Rounds(job, tries, budget, deadline, progress, least, constraints.stages is None, known)
        return _timed(_for_fewer(rounds, constraints), deadline)
    except KeyboardInterrupt as fault:
        fitting = _fitting([*found_until(fault, BestPlan), *tries], budget, looks)
        raise Interrupted([_last_of([tries[0], each]) for each in fitting]) from None
    except SolverLimitError as fault:
        if not rounds.leanest():
            raise _with_nearest(fault, job, constraints, budget) from None
        return _timed(_last_of([*tries, *rounds.lean]), deadline)


def _with_nearest(fault: SolverLimitError, job: Job, constraints: Constraints, budget: int) -> SolverLimitError:
    """The fault; explained, it says by how much the leanest plans do not fit (of one device it says so by itself)."""
    if job.cluster.num_devices == 1:
        return fault
    return SolverLimitError(str(fault), lambda: f"{how_near(job, constraints, budget, find)}{fault.explained()}")


def _with_leanest(fault: InfeasibleError, job: Job, constraints: Constraints, budget: int) -> InfeasibleError:
    """The fault; explained, it says what the leanest plans need."""
    if job.cluster.num_devices == 1:
        return fault
    return InfeasibleError(str(fault), lambda: f"{fault.explained()}{what_fits(job, constraints, budget, find)}")


def _fitting(found: Sequence[BestPlan], budget: int, looks: bool) -> list[BestPlan]:
    """Of plans found until an interrupt the fastest that allocators have room for, or another one made on its way."""
    made = [as_reserved(each, budget) for each in found]
    fitting = [each for each in made if not looks or needed_bytes(each.plan) <= budget]
    if not fitting:
        fitting = [other for each in made[:1] for other in others_with_room(each, budget, math.inf)]
    return sorted(fitting, key=lambda each: each.step_s)[:1]


def _mixed_room(job: Job, constraints: Constraints, time_limit_s: float, progress: Progress, certify: bool) -> BestPlan:
    looks = constraints.reserve_bytes != 0 and all(group.device.backend == "cuda" for group in job.cluster.groups)
    return find_mixed(job, constraints, time_limit_s, progress, certify, reserves=looks)


def _least_memory(job: Job, constraints: Constraints, deadline: Deadline, progress: Progress) -> LeastMemory:
    return LeastMemory(find, prepared(job, constraints), deadline, progress)


def _room(job: Job, constraints: Constraints, time_limit_s: float, progress: Progress) -> float:
    """Whether a plan of least memory fits, from 0 for no to 1 for one that is easily found, or that none is known."""
    return _least_memory(job, constraints, Deadline(time_limit_s), progress).room(constraints)


def _for_fewer(rounds: _Rounds, constraints: Constraints) -> BestPlan:
    """A plan that allocators have room for, of searches for fewer bytes: in the first plan's microbatches and in any on
    its mesh, of which the faster counts, or else on all meshes."""
    tries, budget, deadline = rounds.tries, rounds.budget, rounds.deadline
    near = on_the_same_mesh(constraints, tries[0].plan)
    near = near if near.mesh != constraints.mesh else constraints
    fitting = list(rounds.known)
    with handing_on(fitting):
        fitting += others_with_room(tries[0], budget)
        roomier = with_room(rounds.job, constraints, tries[0].plan, budget, deadline, rounds.progress)
        fitting += [replace(tries[0], plan=plan, others=()) for plan in roomier]
        rounds.has_fitting = bool(fitting)
        if constraints.microbatches is None and not (fitting and deadline.is_over):
            fitting += rounds.fitting(in_the_family(constraints, tries[0].plan))
        if _is_worse(fitting, tries[0], WORSE if deadline.is_over else 1 + ENOUGH):
            fitting += rounds.fitting(near)
        if near is not constraints and _is_worse(fitting, tries[0]):
            fitting += rounds.fitting(constraints)
    fitting = fitting or [*others_with_room(tries[0], budget, math.inf), *rounds.lean]
    if fitting:
        best = min(fitting, key=lambda each: _predicted(each.plan).step_s)
        return _last_of([*(each for each in tries if each is not best), best])
    said = partial(_no_room, budget, tries, deadline)
    why = rounds.why
    raise SolverLimitError(said(why), lambda: said(why and why.explained()))


def _is_worse(fitting: Sequence[BestPlan], first: BestPlan, times: float = WORSE) -> bool:
    """Whether every plan takes more than so many times the first one's step: a search cut short may choose badly."""
    return not any(_predicted(each.plan).step_s <= times * _predicted(first.plan).step_s for each in fitting)


@dataclass
class _Rounds:
    """Searches for fewer bytes.

    Attributes:
        job, budget, deadline, progress: of the whole search.
        tries: plans found, the first one first: added to.
        least: plans for as little memory as can be.
        cuts_anew: whether a pipeline's stages may be others than its plan's.
        known: plans that fit.
        has_fitting: whether any plan is known that fits: with one, none is begun late.
        why: why the last that found nothing did.
        late: searches begun after the time was over.
        lean: the plan of least memory once it was asked for, which is found sooner than others late; none where it does
            not fit.
    """

    job: Job
    tries: list[BestPlan]
    budget: int
    deadline: Deadline
    progress: Progress
    least: Callable[[], BestPlan | None]
    cuts_anew: bool
    known: Sequence[BestPlan] = ()
    has_fitting: bool = False
    why: NoPlanError | None = None
    late: int = 0
    lean: Sequence[BestPlan] = ()
    _has_looked: bool = False

    def leanest(self) -> Sequence[BestPlan]:
        """The plan of least memory, looked for once, where nothing else is known to fit."""
        if not (self._has_looked or self.has_fitting):
            self._has_looked, lean = True, self.least()
            self.lean = [lean] if lean else []
        return self.lean

    def _is_too_late(self) -> bool:
        """Whether no other search is begun: after the time none where a plan fits, which is looked for then."""
        if self.deadline.is_over:
            self.late += 1
            self.leanest()
        return self.late > (0 if self.has_fitting or self.lean else LATE)

    def fitting(self, pins: Constraints) -> list[BestPlan]:
        """A plan that allocators have room for, if one is found under some constraints."""
        low, high, allowed, plan = 0, self.budget, self.budget, self.tries[0].plan
        stride = STRIDE
        for _ in range(ROUNDS):
            if self._is_too_late():
                break
            if allowed > low:  # the last search found a plan
                said = f"{say_size(needed_bytes(plan))} would be reserved of {say_size(self.budget)}"
                self.progress(f"{said}; planning for less")
                high = min(max(_predicted(plan).peak_bytes), allowed)
                allowed = min(high * self.budget // needed_bytes(plan), round((1 - stride) * high))
                stride *= 2
            allowed = allowed if allowed > low else (low + high) // 2
            if high - low <= self.budget // _NEAR:
                break
            fewer = msgspec.structs.replace(in_the_family(pins, plan) if self.late else pins, memory_bytes=allowed)
            try:
                found = self._found(fewer, plan)
            except NoPlanError as fault:
                low, self.why = allowed, fault
                continue
            self.tries.append(as_reserved(found, self.budget))
            plan = self.tries[-1].plan
            found, fits = self.tries[-1], needed_bytes(plan) <= self.budget
            later = [] if fits else gathering_later(plan, self.budget)
            if fits or later:
                self.has_fitting = True
                return [replace(found, plan=each, others=()) for each in later] or [found]
        return []

    def _found(self, fewer: Constraints, plan: Plan) -> BestPlan:
        """A plan for fewer bytes: of a pipeline's own family in its own sharding, where that fits."""
        began = time.perf_counter()
        if len(plan.stages) > 1 and in_the_family(fewer, plan) == fewer:
            with suppress(SolverLimitError):
                again = planned_again(self.job, fewer, plan, Shardings(_unasked), self.cuts_anew)
                return BestPlan(again, time.perf_counter() - began, time.perf_counter() - began)
        share_s = max(self.deadline.share_s(0.5), EACH * self.deadline.limit_s)
        drafts = [Draft.of(each.plan) for each in self.known]
        beside = fewer.mesh is not None  # plain data parallelism was among what the first search made
        return find(self.job, fewer, share_s, self.progress, certify=False, beside=beside, known=drafts)


def _unasked(job: Job, constraints: Constraints, kept_bytes: float | None, mesh: Mesh | None) -> NoReturn:
    raise AssertionError(f"a sharding was asked for, and is known ({job}, {constraints}, {kept_bytes}, {mesh})")


def _timed(found: BestPlan, deadline: Deadline) -> BestPlan:
    """With a note where time ran out; what several searches took together is no more than has passed."""
    found = replace(found, solve_s=min(found.solve_s, deadline.passed_s))
    if not deadline.is_over:
        return found
    first = "the first plan found that fits, as a time limit of 0 s asks for"
    said = f"the time limit of {deadline.asked_s:g} s ran out" if deadline.asked_s else first
    note = f"{said}: with more, a faster plan may be found"
    return replace(found, plan=msgspec.structs.replace(found.plan, notes=(*found.plan.notes, note)))


def in_the_family(constraints: Constraints, plan: Plan) -> Constraints:
    """The constraints with a plan's positions, mesh, stages, schedule and microbatches."""
    return msgspec.structs.replace(on_the_same_mesh(constraints, plan), microbatches=plan.num_microbatches)


def on_the_same_mesh(constraints: Constraints, plan: Plan) -> Constraints:
    """The constraints with a plan's stages and their mesh, where they leave them open; where meshes differ, with its
    positions and schedule."""
    degrees = (constraints.dp, constraints.tp, constraints.cp, constraints.ep, constraints.zero)
    mesh, meshes = plan.stages[0].mesh, {each for stage in plan.stages for each in stage.meshes}
    named = plan.schedule.name in NAMED
    if len({each.shape for each in meshes}) > 1:
        name = constraints.schedule or (plan.schedule.name if named else None)
        return msgspec.structs.replace(constraints, pp=constraints.pp or len(meshes), schedule=name)
    if constraints.pp is None:
        pp = plan.cluster.num_devices // mesh.size
        constraints = msgspec.structs.replace(constraints, pp=pp)
        if pp > 1 and constraints.schedule is None and named:
            bounds = tuple((stage.first, stage.stop) for stage in plan.stages)
            constraints = msgspec.structs.replace(constraints, schedule=plan.schedule.name, stages=bounds)
    if constraints.mesh is not None or any(degree is not None for degree in degrees):
        return constraints
    return msgspec.structs.replace(constraints, mesh=mesh.shape)


def _predicted(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction


def _last_of(tries: Sequence[BestPlan]) -> BestPlan:
    """The last search's plan, with the bound of the first one, and a note of why it is not that one's."""
    first, plan = tries[0].plan, tries[-1].plan
    if len(tries) > 1 and plan.certificate is not None and first.certificate is not None:
        step_s = _predicted(plan).step_s
        plan = certified_as(plan, first.certificate)
        note = (
            f"of the fastest plan by the bytes alive ({_predicted(first).step_s:.4g} s) "
            f"{say_size(needed_bytes(first))} would be reserved, of this one {say_size(needed_bytes(plan))}"
        )
        tried = kept((*unreserved(first, step_s), *plan.tried, planned(plan_words(plan), plan)))
        plan = msgspec.structs.replace(plan, notes=(*plan.notes, note), tried=tried)
    return BestPlan(plan, sum(each.solve_s for each in tries), sum(each.total_s for each in tries))


def _no_room(budget: int, tries: Sequence[BestPlan], deadline: Deadline, why: NoPlanError | None) -> str:
    """Why there is no plan, and what to do."""
    least = min(needed_bytes(each.plan) for each in tries)
    late = f"; the time limit of {deadline.asked_s:g} s ran out, and more may help" if deadline.is_over else ""
    less = "" if why is None else f". For less memory: {why}"
    return (
        f"plans fit by the bytes alive, but of the {len(tries)} tried {say_size(least)} at least would be reserved, "
        f"and {say_size(budget)} of a device are a plan's; give a smaller reserve, or reserve=0 and train with "
        f"expandable segments (PYTORCH_CUDA_ALLOC_CONF){late}{less}"
    )
