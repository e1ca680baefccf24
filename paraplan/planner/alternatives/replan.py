"""A plan's job planned again: with other pins, or with more memory.

A plan file has all of its job: program, cluster, optimizer, the pins it was planned with. Of measured times it has
those of its own ops, so other ops of another plan are priced by the model. A plan whose recomputation was pinned by
name has its layers as segments, and so have others made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.machine.cluster import ClusterSpec, NodeGroup
from paraplan.ir.options import check_keywords, fields_of, from_keywords, keywords_of
from paraplan.ir.plan import Plan
from paraplan.planner.alternatives.filed_pins import constraints_from
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import PARALLELISM, PIPELINE, Constraints
from paraplan.planner.fits import in_the_family, on_the_same_mesh, search_room
from paraplan.planner.mixed.listing import check_on_cluster

Progress = Callable[[str], None]
_WAYS = (PARALLELISM, PIPELINE)
_DEGREES = frozenset(
    ("microbatches", "params", *(word for word, each in fields_of(Constraints).items() if each.option.group in _WAYS))
)
"""Options that say how work and layouts are divided, of which one replaces all that a plan was pinned to."""
SAME = 1e-9
"""Relative difference of the steps of one plan."""
ROOMY_BYTES = 1 << 50
"""Of a device on which anything fits."""


def constraints_of(plan: Plan) -> Constraints:
    """What a plan was pinned to; of a plan that does not say so, what has to be pinned for its job to be the same.

    Raises:
        InvalidPlanError: the file's pins are none.
    """
    return _constraints(plan, plan.pins)


def family_of(plan: Plan) -> Constraints:
    """What a plan's search pinned to come to it; of a plan that does not say so, its positions and their mesh.

    Recomputation stays open where the user left it so.

    Raises:
        InvalidPlanError: see `constraints_of`.
    """
    asked, step_s = constraints_of(plan), _step_s(plan)
    own = next((each for each in plan.tried if each.pins and abs((each.step_s or 0.0) - step_s) <= SAME * step_s), None)
    if own is not None:
        found = _constraints(plan, {**plan.pins, **own.pins})
        return msgspec.structs.replace(found, recompute=asked.recompute)
    return in_the_family(asked, plan) if len(plan.stages) > 1 else on_the_same_mesh(asked, plan)


def _constraints(plan: Plan, pins: dict[str, Any]) -> Constraints:
    made = constraints_from(pins)
    stages = made.stages
    if stages is not None and made.recompute not in (None, "none"):  # said in the captured program's segments
        stages = tuple((stage.first, stage.stop) for stage in plan.stages)
    return msgspec.structs.replace(made, compiled=plan.compiled, reduce_dtype=plan.reduce_dtype, stages=stages)


def job_of(plan: Plan) -> Job:
    """What a plan was made for."""
    return Job(
        program=plan.program,
        cluster=plan.cluster,
        optimizer=plan.optimizer,
        model=plan.model,
        versions=plan.made_with,
        profile=plan.profile,
        compiled=plan.compiled,
        reduce_dtype=plan.reduce_dtype,
        sum_products=plan.sum_products,
    )


@dataclass(frozen=True)
class WithMore:
    """A plan's family with more memory.

    Attributes:
        family: what was pinned of it.
        plan: made with more memory; None where none was found in time.
        again: where that is faster than the plan, the family planned with the memory as it is.
        said: why there is no plan.
    """

    family: Constraints
    plan: Plan | None = None
    again: Plan | None = None
    said: str = ""


def with_more_memory(plan: Plan, extra_bytes: int, time_limit_s: float, progress: Progress) -> WithMore:
    """Plan a plan's family again with more memory on every device.

    Args:
        plan: priced.
        extra_bytes: how much more.
        time_limit_s: for either of two searches.
        progress: told what is being tried.
    Raises:
        InvalidPlanError: see `constraints_of`.
    """
    family, job = family_of(plan), job_of(plan)
    budget = family.memory_bytes
    more = msgspec.structs.replace(family, memory_bytes=None if budget is None else budget + extra_bytes)
    roomier = replace(job, cluster=with_memory(job.cluster, extra_bytes))
    progress("the same family with more memory")
    try:
        best = search_room(roomier, more, time_limit_s, progress, certify=False)
    except (NoPlanError, ConstraintError) as fault:
        return WithMore(family, said=str(fault))
    found = best.plan
    if _step_s(found) >= _step_s(plan) or best.is_interrupted:
        return WithMore(family, found)
    progress("the same family as it is")
    try:
        again = search_room(job, family, time_limit_s, progress, certify=False).plan
    except (NoPlanError, ConstraintError):
        again = None
    return WithMore(family, found, again)


def with_memory(cluster: ClusterSpec, extra_bytes: int) -> ClusterSpec:
    """The cluster with more memory on every device."""

    def group(old: NodeGroup) -> NodeGroup:
        memory = old.device.memory_bytes + extra_bytes
        return msgspec.structs.replace(old, device=msgspec.structs.replace(old.device, memory_bytes=memory))

    return msgspec.structs.replace(cluster, groups=tuple(map(group, cluster.groups)))


@dataclass(frozen=True)
class Alternative:
    """What other pins come to.

    Attributes:
        constraints: all that was pinned.
        kept, dropped: of what the plan was pinned to, what holds on and what does not, by keyword.
        plan: made; None where there is none.
        contradiction: why the pins cannot be; "" otherwise.
        no_plan: why no plan was found; "" otherwise.
        too_large: where none was found, plans made with memory for anything: how, and the plan.
    """

    constraints: Constraints
    kept: dict[str, Any]
    dropped: dict[str, Any]
    plan: Plan | None = None
    contradiction: str = ""
    no_plan: str = ""
    too_large: tuple[tuple[str, Plan], ...] = ()


def alternative(plan: Plan, pins: Mapping[str, Any], time_limit_s: float, progress: Progress) -> Alternative:
    """Plan a plan's job with other pins.

    Where they say degrees, a mesh or a pipeline, what the plan was pinned to of these is left out; all else holds on.

    Args:
        plan: whose job it is.
        pins: options of `Constraints` by keyword; a default in place of what was pinned leaves that open.
        time_limit_s: for each of up to three searches.
        progress: told what is being tried.
    Raises:
        ConstraintError: a value cannot be read, or nothing is pinned.
        InvalidPlanError: see `constraints_of`.
        TypeError: there is no such option.
    """
    check_keywords("explain", pins, Constraints)
    read = from_keywords(Constraints, pins)
    asked = {word: getattr(read, fields_of(Constraints)[word].name) for word in pins}
    if not asked:
        raise ConstraintError("why-not pins nothing: name an option and a value, e.g. tp=8,pp=4")
    before = keywords_of(constraints_of(plan))
    divides = bool(_DEGREES.difference(("microbatches",)).intersection(asked))
    replaced = _DEGREES if divides else frozenset[str]()
    left = {word: value for word, value in before.items() if word not in asked and word not in replaced}
    dropped = {
        word: value
        for word, value in before.items()
        if word not in left and (word not in asked or asked[word] != value)
    }
    constraints = from_keywords(Constraints, {**left, **asked})
    made = Alternative(constraints, left, dropped)
    job = job_of(plan)
    try:
        check_on_cluster(constraints, job.cluster)
        found = search_room(job, constraints, time_limit_s, progress, certify=False)
    except ConstraintError as fault:
        return replace(made, contradiction=str(fault))
    except NoPlanError as fault:
        return replace(made, no_plan=str(fault), too_large=_with_room(job, constraints, time_limit_s, progress))
    return replace(made, plan=found.plan)


def _with_room(
    job: Job, constraints: Constraints, time_limit_s: float, progress: Progress
) -> tuple[tuple[str, Plan], ...]:
    """Plans on devices on which anything fits: for speed alone, and with every layer made again where that is free."""
    roomy = replace(job, cluster=with_memory(job.cluster, ROOMY_BYTES))
    free = msgspec.structs.replace(constraints, memory_bytes=None, reserve_bytes=0)
    ways = [("planned for speed alone", free)]
    if constraints.recompute is None:
        ways.append(("with every layer made again", msgspec.structs.replace(free, recompute="full")))
    found: list[tuple[str, Plan]] = []
    for how, pins in ways:
        progress(f"{how}, on devices with room for anything")
        try:
            found.append((how, search_room(roomy, pins, time_limit_s, progress, certify=False).plan))
        except (NoPlanError, ConstraintError):
            continue
    return tuple(found)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s
