"""Who holds what: groups of ranks, each with one mesh and the stages that lie on it; and who runs what.

A rank may hold several stages (interleaved schedules); they share its mesh, its parameters and its batch. Meshes of
different groups have no rank in common and may have any shapes. Where several groups hold a stage (bidirectional
schedules), the schedule gives each microbatch to one of them, and a microbatch's way through the groups is its route.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.model.program import Program, trained_params
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.ir.plan import Plan, Stage


@dataclass(frozen=True)
class Holding:
    """A group of ranks.

    Attributes:
        mesh: of its stages.
        stages: their indices, ascending.
        segments: of all of them, ascending.
        stage_of: segment -> its stage.
        params, batch: layouts of what its stages hold and read.
        buffers, written: those its segments read or write, and those they write.
        trained: parameters that are updated here, in the model's order: those held here that receive a gradient
            anywhere. A group that only reads one (detached) has states for it too, and gets its gradient from the
            others, so that all copies stay equal.
        graded: those of them that receive a gradient here.
    """

    mesh: Mesh
    stages: tuple[int, ...]
    segments: tuple[int, ...]
    stage_of: dict[int, int]
    params: dict[str, ParamLayouts]
    batch: dict[str, str]
    buffers: tuple[str, ...]
    written: tuple[str, ...]
    trained: tuple[str, ...]
    graded: tuple[str, ...]


class GroupPath(NamedTuple):
    """A way through the groups.

    Attributes:
        groups: per stage, the index of the group that runs it.
        microbatches: those that go this way, ascending.
    """

    groups: tuple[int, ...]
    microbatches: tuple[int, ...]


def holdings(plan: Plan) -> tuple[Holding, ...]:
    """The groups of a plan, in order of their first stage.

    Raises:
        InvalidPlanError: meshes share some of their ranks only, or stages of one mesh disagree on a layout.
    """
    meshes: dict[Mesh, list[int]] = {}
    owner: dict[int, tuple[int, Mesh]] = {}
    lies = [(index, mesh) for index, stage in enumerate(plan.stages) for mesh in stage.meshes]
    for index, here in sorted(lies, key=lambda pair: pair[1] != plan.stages[pair[0]].mesh):
        meshes.setdefault(here, []).append(index)
        for device in here.devices:
            other, mesh = owner.setdefault(device, (index, here))
            if mesh != here:
                raise InvalidPlanError(
                    f"rank {device} holds stage {other} on mesh {mesh.shape} and stage {index} on mesh "
                    f"{here.shape} of {here.size} devices; give stages that share a rank one mesh"
                )
    return tuple(_holding(plan, mesh, tuple(sorted(stages))) for mesh, stages in meshes.items())


def _holding(plan: Plan, mesh: Mesh, stages: tuple[int, ...]) -> Holding:
    program = plan.program
    held = [(index, plan.stages[index]) for index in stages]
    stage_of = {segment: index for index, stage in held for segment in range(stage.first, stage.stop)}
    segments = tuple(sorted(stage_of))
    params = _agreed(held, "params")
    graded = {name for _, stage in held for name in trained_params(program, stage.first, stage.stop)}
    made = {name for segment in segments for name in program.segments[segment].outputs}
    counts = {term.denominator for term in program.loss if term.numerator in made and term.denominator is not None}
    used = {name for segment in segments for name in program.segments[segment].inputs}
    used |= {name for index in counts for name in program.denominators[index].inputs}
    buffers = tuple(
        name
        for name in program.buffers
        if len(plan.stages) == 1 or f"buffer:{name}" in used or program.buffer_updates.get(name) in made
    )
    written = tuple(name for name in buffers if program.buffer_updates.get(name) in made)
    return Holding(
        mesh,
        stages,
        segments,
        stage_of,
        params,
        _agreed(held, "batch"),
        buffers,
        written,
        trained=tuple(name for name in trained_params(program) if name in params),
        graded=tuple(name for name in program.params if name in graded),
    )


def _agreed(held: list[tuple[int, Stage]], what: str) -> dict:  # type: ignore[type-arg]
    """Layouts of all stages of a mesh; what several read lies there once."""
    found: dict[str, object] = {}
    for index, stage in held:
        for name, layout in getattr(stage, what).items():
            if found.setdefault(name, layout) != layout:
                raise InvalidPlanError(
                    f"stage {index} holds {name} as {layout}, another stage of its ranks as {found[name]}; they hold "
                    "it once: give both the same layouts"
                )
    return found


def routes(plan: Plan, held: tuple[Holding, ...]) -> tuple[GroupPath, ...]:
    """The ways microbatches take through the groups, in order of the first microbatch of each.

    Raises:
        InvalidPlanError: a microbatch of a stage is run by nobody who holds it, or a group runs nothing of a stage it
            holds.
    """
    if plan.schedule.num_replicas == 1:
        alone = tuple(next(g for g, each in enumerate(held) if s in each.stages) for s in range(len(plan.stages)))
        return (GroupPath(alone, tuple(range(plan.num_microbatches))),)
    group_of = {device: group for group, holding in enumerate(held) for device in holding.mesh.devices}
    runners = plan.schedule.runners()
    found: dict[tuple[int, ...], list[int]] = {}
    for m in range(plan.num_microbatches):
        groups = []
        for stage in range(len(plan.stages)):
            group = group_of.get(runners.get((stage, m), (-1,))[0])
            if group is None or stage not in held[group].stages:
                raise InvalidPlanError(
                    f"schedule {plan.schedule.name}: no rank that holds stage {stage} runs microbatch {m} of it"
                )
            groups.append(group)
        found.setdefault(tuple(groups), []).append(m)
    for group, holding in enumerate(held):
        idle = [stage for stage in holding.stages if all(groups[stage] != group for groups in found)]
        if idle:
            raise InvalidPlanError(
                f"schedule {plan.schedule.name}: rank {holding.mesh.devices[0]} holds stage {idle[0]} and runs no "
                "microbatch of it; take it from the stage's replicas"
            )
    return tuple(GroupPath(groups, tuple(micros)) for groups, micros in found.items())


def group_of_class(plan: Plan, held: tuple[Holding, ...], actions: tuple[str, ...]) -> int:
    """Which group a class of ranks with these actions belongs to.

    Args:
        plan: whose schedule has the class.
        held: what every group of ranks holds.
        actions: of the class.
    """
    for rank, of in enumerate(plan.schedule.rank_class):
        if plan.schedule.classes[of] == actions:
            return held.index(holding_of(held, rank))
    raise InvalidPlanError(f"schedule {plan.schedule.name}: no rank does {' '.join(actions[:4])} ...; leave it out")


def holding_of(held: tuple[Holding, ...], rank: int) -> Holding:
    """The group a rank belongs to.

    Raises:
        InvalidPlanError: it holds no stage.
    """
    for holding in held:
        if rank in holding.mesh.devices:
            return holding
    raise InvalidPlanError(f"rank {rank} holds no stage; give every rank of the cluster one")


def counted_here(program: Program, held: tuple[Holding, ...], holding: Holding) -> frozenset[str]:
    """The parameters and buffers that a group speaks for, of which it has the only or the first copy.

    That is: no group before it holds them, or, of buffers the model writes, it is the first that writes them.

    Args:
        program: of the plan.
        held: what every group of ranks holds.
        holding: what this one does.
    """
    before = held[: held.index(holding)]
    names = {*holding.params, *holding.buffers}.difference(*(each.params for each in before))
    written = {name for name in program.buffer_updates if name in holding.written}
    written = written.difference(*(each.written for each in before))
    theirs = {name for each in before for name in each.buffers} | {
        name for each in held if each != holding for name in each.written
    }
    return frozenset((names - theirs) | written)
