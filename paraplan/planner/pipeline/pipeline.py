"""From a plan of one stage to a pipeline: segments cut into stages, each on a mesh of its own, under a schedule.

The stages keep the plan's choices; every stage lies on a mesh of the plan's shape, over the next devices. Stages of an
interleaved schedule share the meshes of their positions; those of a bidirectional one lie on several meshes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paraplan.ir.errors import MixedSamples
from paraplan.ir.execution.schedule import Schedule, split_classes, spread
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.model.program import Program
from paraplan.ir.plan import KindChoice, Plan, Stage
from paraplan.rules.time_axis import program_micro, smallest_divisor


def cut_stages(
    program: Program, whole: Stage, bounds: Sequence[tuple[int, int]], meshes: Sequence[Mesh]
) -> tuple[Stage, ...]:
    """A stage of all segments, cut.

    Args:
        program: whose segments.
        whole: the stage.
        bounds: [first, stop) of every new one.
        meshes: of every new one, of the old one's shape.
    """
    return tuple(_cut(program, whole, *bound, mesh) for bound, mesh in zip(bounds, meshes, strict=True))


def _cut(program: Program, whole: Stage, first: int, stop: int, mesh: Mesh) -> Stage:
    chosen = whole.segment_choice[first - whole.first : stop - whole.first]
    used = tuple(dict.fromkeys(chosen))
    segments = program.segments[first:stop]
    params = {name for segment in segments for name in segment.params}
    batch = {name for segment in segments for name in segment.inputs} | _counted(program, first, stop)
    return Stage(
        first=first,
        stop=stop,
        mesh=mesh,
        choices=tuple(whole.choices[index] for index in used),
        segment_choice=tuple(used.index(index) for index in chosen),
        batch={name: layout for name, layout in whole.batch.items() if f"batch:{name}" in batch},
        params={name: layouts for name, layouts in whole.params.items() if name in params},
    )


def _counted(program: Program, first: int, stop: int) -> set[str]:
    """What the denominators of the loss terms made in some segments read."""
    made = {name for segment in program.segments[first:stop] for name in segment.outputs}
    needed = {term.denominator for term in program.loss if term.numerator in made and term.denominator is not None}
    return {name for index in needed for name in program.denominators[index].inputs}


def pipelined(
    plan: Plan,
    cluster: ClusterSpec,
    bounds: Sequence[tuple[int, int]],
    schedule: Schedule,
    holders: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """A plan of one stage as a pipeline; neither priced nor proved.

    Args:
        plan: of one stage, on a mesh of as many devices as a position has.
        cluster: of all positions.
        bounds: of the stages.
        schedule: of one rank per position.
        holders: the positions that hold each stage (see `schedules.problem.holders_of`); one by one where left out.
    """
    whole = plan.stages[0]
    at = holders or tuple((stage,) for stage in range(len(bounds)))
    stages = cut_stages(plan.program, whole, bounds, [whole.mesh] * len(bounds))
    return rescheduled(msgspec.structs.replace(plan, cluster=cluster, stages=stages), schedule, at)


def rescheduled(plan: Plan, schedule: Schedule, holders: Sequence[Sequence[int]]) -> Plan:
    """A pipeline's stages under a schedule, on the meshes of the positions that hold them; neither priced nor proved.

    Args:
        plan: the pipeline.
        schedule: of one rank per position.
        holders: the positions that hold each stage.
    """
    like = plan.stages[0].mesh
    size, num_positions = like.size, 1 + max(position for each in holders for position in each)
    meshes = [like.over(range(p * size, (p + 1) * size)) for p in range(num_positions)]
    return on_meshes(plan, schedule, holders, meshes)


def on_meshes(plan: Plan, schedule: Schedule, holders: Sequence[Sequence[int]], meshes: Sequence[Mesh]) -> Plan:
    """As `rescheduled`, on given meshes.

    Args:
        plan, schedule, holders: as there.
        meshes: per position; together all devices of the cluster, each once.
    """
    position_of = {device: position for position, mesh in enumerate(meshes) for device in mesh.devices}
    placed = spread(schedule, tuple(position_of[rank] for rank in range(len(position_of))))
    stages = tuple(
        msgspec.structs.replace(stage, mesh=meshes[each[0]], replicas=tuple(meshes[p] for p in each[1:]))
        for stage, each in zip(plan.stages, holders, strict=True)
    )
    return msgspec.structs.replace(
        plan,
        stages=stages,
        schedule=split_classes(placed, plan.cluster.device_kinds()),
        prediction=None,
        certificate=None,
    )


def activations_of(plan: Plan) -> tuple[dict[str, str], ...]:
    """Per segment, what becomes of values not simply kept for the backward."""
    return tuple(stage.choices[index].activations for stage in plan.stages for index in stage.segment_choice)


def with_activations(plan: Plan, fates: Sequence[dict[str, str]]) -> Plan:
    """A pipeline that does other things with its activations; neither priced nor proved.

    Args:
        plan: the pipeline.
        fates: per segment, as of `activations_of`.
    """
    stages = []
    for stage in plan.stages:
        own = list(zip(stage.segment_choice, fates[stage.first : stage.stop], strict=True))
        kinds: dict[tuple[int, tuple[tuple[str, str], ...]], KindChoice] = {}
        for index, fate in own:
            key = index, tuple(fate.items())
            kinds.setdefault(key, msgspec.structs.replace(stage.choices[index], activations=dict(fate)))
        number = {key: at for at, key in enumerate(kinds)}
        chosen = tuple(number[index, tuple(fate.items())] for index, fate in own)
        stages.append(msgspec.structs.replace(stage, choices=tuple(kinds.values()), segment_choice=chosen))
    return msgspec.structs.replace(plan, stages=tuple(stages), prediction=None, certificate=None)


def alone_note(plan: Plan) -> tuple[str, ...]:
    """Why a pipeline has one microbatch, where an op that mixes samples is why."""
    if len(plan.stages) == 1 or plan.num_microbatches > 1:
        return ()
    try:
        program_micro(plan.program, smallest_divisor(plan.program.batch_size))
    except MixedSamples as fault:
        return (f"stages wait for each other, for there is one microbatch: {fault}",)
    return ()
