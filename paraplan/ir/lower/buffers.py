"""The steps of one rank, part by part: buffers the model writes get their new values once the step is through.

A buffer becomes, whole on every rank, the sum of what the microbatches say where that is partial, else what each of
them says. Where several groups of ranks write it (bidirectional pipelines), each has its own microbatches' sum: they
send it to each other and add in the order of the groups, so that the copies stay equal to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.lower.kind import Given
from paraplan.ir.lower.transfers import Message
from paraplan.ir.lower.updates import buffer_block, share_block
from paraplan.ir.lower.whole import whole_of
from paraplan.ir.mesh import Layout, Partial, R, Shard
from paraplan.ir.rank_program import Block, StepKind

if TYPE_CHECKING:
    from paraplan.ir.lower.program import RankSteps


def send_buffers(steps: RankSteps) -> list[tuple[Message, str]]:
    """Write this group's shares of what others have a share of, and their sending.

    Returns:
        The others' messages, with the outer names of what they bring.
    """
    coming = []
    for name, value in steps.program.buffer_updates.items():
        groups = _sharers(steps, value)
        if steps.group not in groups:
            continue
        spec, given, micros = steps.program.buffers[name], steps.made(value), _micros(steps, value)
        block = share_block(f"share.{name}", spec, given.layout, given.strides, len(micros), steps.extended)
        sources = {f"new{i}": f"{value}@{m}" for i, m in enumerate(micros)}
        share = f"new:{name}<{steps.group}"
        steps.add(StepKind.CALL, block, args=tuple(sources[local] for local in block.inputs), outs=(share,))
        for other in groups:
            if other != steps.group:
                steps.messages.send_now(_message(steps, name, steps.group, other), share, Given(_whole(steps)))
                coming.append((_message(steps, name, other, steps.group), f"new:{name}<{other}"))
    return coming


def write_buffers(steps: RankSteps) -> None:
    """Write the new values; shares of other groups are here."""
    made: dict[object, Block] = {}
    for name, value in steps.program.buffer_updates.items():
        if steps.group not in steps.lowered.groups_of(steps.lowered.maker[value]):
            continue
        shared = _sharers(steps, value)
        for group in shared:
            steps.add(StepKind.ACCUMULATE, args=(f"new:{name}", f"new:{name}<{group}"))
        names = [f"new:{name}"] if shared else [f"{value}@{m}" for m in _micros(steps, value)]
        spec, given = steps.program.buffers[name], Given(_whole(steps)) if shared else steps.made(value)
        if isinstance(given.layout[0], Shard):  # a row per sample
            names, given = [_gathered(steps, value)], whole_of(given)
        key = (spec, given, len(names))
        if key not in made:
            made[key] = buffer_block(
                f"buffer.{len(made)}", spec, given.layout, given.strides, len(names), steps.extended
            )  # fmt: skip
        sources = {"stored": f"buffer:{name}"} | {f"new{i}": each for i, each in enumerate(names)}
        steps.add(StepKind.CALL, made[key], args=tuple(sources[local] for local in made[key].inputs), outs=())


def _sharers(steps: RankSteps, value: str) -> tuple[int, ...]:
    """The groups that have a share of a value, where several have."""
    groups = steps.lowered.groups_of(steps.lowered.maker[value])
    layout = steps.lowered.part(steps.lowered.maker[value], groups[0]).given[value].layout
    return groups if len(groups) > 1 and isinstance(layout[0], Partial) else ()


def _micros(steps: RankSteps, value: str) -> tuple[int, ...]:
    """The microbatches of this group that say what the buffer becomes."""
    if value in steps.micro.after:
        return (steps.m,)
    micros = steps.lowered.microbatches_of(steps.lowered.maker[value], steps.group)
    return micros if isinstance(steps.made(value).layout[0], Partial) else micros[-1:]


def _gathered(steps: RankSteps, value: str) -> str:
    """The rows of all microbatches; its outer name."""
    if len(steps.lowered.routes) > 1:
        raise InvalidPlanError(
            f"{value}, which a buffer becomes, has a row per sample, and in schedule {steps.plan.schedule.name} "
            "several groups of ranks share the microbatches out; use the schedule gpipe or 1f1b"
        )
    return steps.gather(value)


def _whole(steps: RankSteps) -> Layout:
    return (R,) * len(steps.extended)


def _message(steps: RankSteps, name: str, source: int, target: int) -> Message:
    spec, whole = steps.program.buffers[name], _whole(steps)
    return steps.lowered.message(f"buffer:{name}:{source}>{target}", spec, whole, source, target, whole)
