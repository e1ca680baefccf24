"""The space of pipelines: every combination of degree, inner mesh, microbatches, schedule and stages a position.

A plan of one stage is a pipeline of degree 1. A combination pins what `pipeline_search` needs to plan one pipeline.
What the user pins restricts the list, and what cannot be (devices that do not lie along nodes, more stages than
segments) is not in it. Limits: of meshes inside a position, one axis, and two whose second divides a node's devices; of
microbatches, a power of two, and those of a power of two samples on every replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.option_words import OptionValue
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.pipeline.first_devices import first_devices
from paraplan.planner.pipeline.open_choices import check_turns, count_stages
from paraplan.planner.pipeline.searched_schedule import SEARCHED
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.named import NAMED, named_orders
from paraplan.planner.schedules.schedule_problem import Orders
from paraplan.rules.time_axis import program_micro, splittable

ONE_STAGE = "one stage"
"""The family of plans of one stage."""
EACH = (1, 2, 3, 4, 6, 8, 12, 16)
"""Stages a position: beyond, messages outweigh what is left of the bubble."""

APART = 64
"""Devices of a position up to which meshes whose ranks do not divide the batch are listed beside others."""


@dataclass(frozen=True)
class Combination:
    """One pipeline, but for its sharding, cuts and recomputation.

    Attributes:
        pp: positions.
        mesh: of a position's devices; () where the user's degrees say it.
        microbatches: of a step.
        schedule: a name of `NAMED`.
        each: stages a position.
    """

    pp: int
    mesh: tuple[int, ...]
    microbatches: int
    schedule: str
    each: int

    @property
    def num_stages(self) -> int:
        """Of the whole pipeline."""
        return self.pp * self.each

    @property
    def num_actions(self) -> int:
        """Forwards of a step, in all stages."""
        return self.num_stages * self.microbatches

    @property
    def family(self) -> str:
        """Its schedule, or one stage."""
        return ONE_STAGE if self.pp == 1 else self.schedule

    @property
    def text(self) -> str:
        """For notes and progress."""
        mesh = f" mesh {'x'.join(map(str, self.mesh))}" if self.mesh else ""
        each = f" with {self.each} stages a position" if self.each > NAMED[self.schedule].stages else ""
        if self.pp == 1:
            return f"one stage{mesh}, {self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"
        return f"pp={self.pp}{mesh}, {self.microbatches} microbatches, {self.schedule}{each}"

    def orders(self) -> Orders:
        """What every position computes."""
        return named_orders(self.schedule, self.pp, self.microbatches, self.each)

    def pinned(self, constraints: Constraints) -> Constraints:
        """The user's constraints with the combination's choices, stages apart."""
        mesh = self.mesh or constraints.mesh
        schedule = SEARCHED if constraints.schedule == SEARCHED else None if self.pp == 1 else self.schedule
        return msgspec.structs.replace(
            constraints, pp=self.pp, mesh=mesh, microbatches=self.microbatches, schedule=schedule
        )


def combinations(job: Job, constraints: Constraints) -> list[Combination]:
    """Every combination that what is pinned allows; of one position where no schedule is pinned.

    Raises:
        ConstraintError: what is pinned leaves none; says why the last one tried is not in the space.
    """
    if constraints.schedule not in (None, SEARCHED, *NAMED):
        named_orders(str(constraints.schedule), 2, 2)
    if constraints.pp is not None:
        name = constraints.schedule if constraints.schedule in NAMED else "1f1b"
        count_stages(constraints, constraints.pp, name, len(job.program.segments))
    found: list[Combination] = []
    refused: ConstraintError | None = None
    n = job.cluster.num_devices
    for pp in _degrees(constraints, n):
        try:
            check_constraints(msgspec.structs.replace(constraints, pp=pp), n)
            inner = first_devices(job.cluster, pp)
        except ConstraintError as fault:
            refused = fault
            continue
        found += _of_positions(job, constraints, pp, inner)
    if not found:
        _check_sizes(constraints, job.program)
        raise refused or ConstraintError(
            f"no pipeline over {n} devices takes this model's {len(job.program.segments)} segments and its batch of "
            f"{job.program.batch_size}; give pp, microbatches and schedule by hand"
        )
    return found


def _of_positions(job: Job, constraints: Constraints, pp: int, inner: ClusterSpec) -> list[Combination]:
    """Of so many positions, each of an inner cluster's devices; of many devices, meshes whose ranks do not divide the
    batch only where there are no others."""
    size, per_node = inner.num_devices, inner.groups[0].devices_per_node
    found: list[Combination] = []
    for outnumber in (True,) if size <= APART else (False, True):
        for mesh in inner_meshes(size, per_node, constraints):
            replicas = replica_counts(constraints, mesh, size, per_node)
            if outnumber and (mesh or constraints.mesh):
                replicas = tuple(math.gcd(each, job.program.batch_size) for each in replicas)
            for count in microbatch_counts(job, constraints, replicas):
                found += _schedules(job, constraints, pp, mesh, count)
        if found:
            break
    return found


def _check_sizes(constraints: Constraints, program: Program) -> None:
    """Whether the batch divides over the ranks that are pinned, and the schedule that is takes the positions,
    microbatches and stages that are, and the order that the program needs."""
    batch = program.batch_size
    pp, name, count, stages = constraints.pp, constraints.schedule, constraints.microbatches, constraints.stages
    if constraints.dp is not None and batch % constraints.dp:
        dp = OptionValue("dp", constraints.dp)
        raise ConstraintError("{} does not divide a batch of {}; use a divisor of it", dp, batch)
    if pp is not None and name in NAMED and count is not None:
        orders = named_orders(name, pp, count, None if stages is None else len(stages) // pp)
        schedule = complete(name, orders, num_replicas=NAMED[name].num_replicas)
        check_turns(program, count, name, schedule, max(a.stage for order in orders for a in order) + 1)


def _degrees(constraints: Constraints, n: int) -> tuple[int, ...]:
    """Positions: what is pinned, or any number that devices divide into."""
    if constraints.pp is not None:
        return (constraints.pp,)
    return tuple(d for d in range(1 if constraints.schedule is None else 2, n + 1) if n % d == 0)


def inner_meshes(devices: int, per_node: int, constraints: Constraints) -> Iterator[tuple[int, ...]]:
    """Of a position: what is pinned, or one axis, and two with the inner one inside a node.

    Args:
        devices: of a position.
        per_node: devices of a node.
        constraints: that pin its axes, or do not.
    """
    pinned = (constraints.mesh, constraints.dp, constraints.tp, constraints.cp, constraints.ep, constraints.zero)
    if any(each is not None for each in pinned):
        yield ()
        return
    yield (devices,)
    for inner in range(2, min(per_node, devices // 2) + 1):
        if per_node % inner == 0 and devices % inner == 0:
            yield devices // inner, inner


def replica_counts(constraints: Constraints, mesh: tuple[int, ...], devices: int, per_node: int) -> tuple[int, ...]:
    """Over how many ranks the batch may be thought to be shared out: an axis inside a node may also be a tensor's.

    Args:
        constraints: that pin the axes, or do not.
        mesh: as `inner_meshes` gave it; () where it is pinned.
        devices, per_node: as of `inner_meshes`.
    """
    if axes := mesh or constraints.mesh:
        return (axes[0], 1) if len(axes) == 1 and 1 < devices <= per_node else (axes[0],)
    return (constraints.dp or max(devices // ((constraints.tp or 1) * (constraints.cp or 1)), 1),)


def microbatch_counts(job: Job, constraints: Constraints, replicas: tuple[int, ...]) -> tuple[int, ...]:
    """Microbatches, the most first.

    Args:
        job: what is planned.
        constraints: that pin the count, or do not.
        replicas: as `replica_counts` gave them.
    """
    if constraints.microbatches is not None:
        return (constraints.microbatches,)
    batch = job.program.batch_size
    twos = [1 << power for power in range(batch.bit_length())]
    whole = [(ranks, two) for ranks in replicas for two in twos if batch % (ranks * two) == 0]
    counts = {count for ranks, two in whole for count in (two, batch // (ranks * two))}
    return tuple(count for count in sorted(counts, reverse=True) if splittable(job.program, count))


def _schedules(job: Job, constraints: Constraints, pp: int, mesh: tuple[int, ...], count: int) -> Iterator[Combination]:
    """Of some microbatches: every schedule that takes them, with every number of stages a position."""
    segments, micro = len(job.program.segments), program_micro(job.program, count)
    if pp == 1:
        yield Combination(pp, mesh, count, "gpipe" if micro.has_tail and count > 1 else "1f1b", 1)
        return
    names = tuple(NAMED) if constraints.schedule in (None, SEARCHED) else (constraints.schedule,)
    for name in names:
        if name not in NAMED or (micro.has_tail and name != "gpipe" and count > 1):
            continue
        some = EACH if constraints.stages is None else (len(constraints.stages) // pp,)
        for each in some if NAMED[name].counts(pp, count) else ():
            if pp * each <= segments and NAMED[name].takes(each):
                yield Combination(pp, mesh, count, name, each)
