"""The steps of one rank, part by part: buffers the model writes get their new values once the step is through.

A buffer becomes, whole on every rank, the sum of what the microbatches say where that is partial, else what each of
them says. Where several groups of ranks write it (bidirectional pipelines), each has its own microbatches' sum: they
send it to each other, and to groups that only read it, and add in the order of the groups, so that the copies stay
equal to the bit. Where each microbatch is a batch by itself (`Program.apart`) buffers are written after each forward
instead, as the next one reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paraplan.ir import names as outer_names
from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.lower.kind import Given
from paraplan.ir.lower.transfers import Message
from paraplan.ir.lower.updates import buffer_block, share_block
from paraplan.ir.lower.whole import whole_of
from paraplan.ir.mesh import Layout, Partial, R, Shard
from paraplan.ir.names import Name
from paraplan.ir.rank_program import Block, StepKind
from paraplan.ir.schedule import ActionKind, parse_action

if TYPE_CHECKING:
    from paraplan.ir.lower.program import RankSteps


def send_buffers(steps: RankSteps) -> list[tuple[Message, Name]]:
    """Write this group's shares of what others need a share of, and their sending.

    Returns:
        The others' messages, with the outer names of what they bring.
    """
    coming = []
    for name, value in steps.program.buffer_updates.items():
        sources, targets = _exchanged(steps, name, value)
        if steps.group in sources:
            spec, (names, given) = steps.program.buffers[name], _news(steps, value)
            block = share_block(f"share.{name}", spec, given.layout, given.strides, len(names), steps.extended)
            new = {f"new{i}": each for i, each in enumerate(names)}
            share = outer_names.new_buffer(name).of_group(steps.group)
            steps.add(StepKind.CALL, block, args=tuple(new[local] for local in block.inputs), outs=(share,))
            for other in targets:
                if other != steps.group:
                    steps.messages.send_now(_message(steps, name, steps.group, other), share, Given(_whole(steps)))
        if steps.group in targets:
            others = [group for group in sources if group != steps.group]
            new_value = outer_names.new_buffer(name)
            coming += [(_message(steps, name, other, steps.group), new_value.of_group(other)) for other in others]
    return coming


def write_buffers(steps: RankSteps, after: tuple[int, int] | None = None) -> None:
    """Write the new values; shares of other groups are here.

    `after`: only what this stage makes of this microbatch, where each is a batch by itself.
    """
    made: dict[object, Block] = {}
    for name, value in steps.program.buffer_updates.items():
        if name not in steps.holding.buffers or (after is not None and steps.lowered.maker[value] != after[0]):
            continue
        sources, targets = _exchanged(steps, name, value)
        shared = sources if steps.group in targets else ()
        new_value = outer_names.new_buffer(name)
        for group in shared:
            steps.add(StepKind.ACCUMULATE, args=(new_value, new_value.of_group(group)))
        names, given = ([new_value], Given(_whole(steps))) if shared else _news(steps, value)
        if after is not None:
            names = [outer_names.value(value, after[1])]
        spec = steps.program.buffers[name]
        key = (spec, given, len(names))
        if key not in made:
            made[key] = buffer_block(
                f"buffer.{len(made)}", spec, given.layout, given.strides, len(names), steps.extended
            )  # fmt: skip
        new = {"stored": outer_names.buffer(name)} | {f"new{i}": each for i, each in enumerate(names)}
        steps.add(StepKind.CALL, made[key], args=tuple(new[local] for local in made[key].inputs), outs=())


def check_apart(steps: RankSteps) -> None:
    """Whether buffers may be written after each forward.

    Raises:
        InvalidPlanError: a backward reads what one held, or several groups of ranks read and write it.
    """
    written = {outer_names.buffer(name) for name in steps.holding.written}
    for name, value in steps.program.buffer_updates.items():
        groups = {*steps.lowered.groups_of(steps.lowered.maker[value])}
        groups |= {group for group, each in enumerate(steps.lowered.held) if name in each.buffers}
        if len(groups) > 1:
            raise InvalidPlanError(
                f"buffer {name} is written once a microbatch, and {len(groups)} groups of ranks read or write it; use "
                "a schedule that keeps a stage in one group (gpipe, 1f1b), and stages that keep the buffer in one"
            )
    for step in steps.steps:
        read = sorted(map(str, written & set(step.args)))
        if read and step.action and parse_action(step.action).kind is not ActionKind.F:
            raise InvalidPlanError(
                f"segment {step.segment}: the backward of a microbatch reads {read[0]} as it was "
                "before later microbatches wrote it; plan without per_microbatch"
            )


def _exchanged(steps: RankSteps, name: str, value: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The groups whose shares a buffer's new value is the sum of, and those that get them: where several groups write
    it, each of their own microbatches, and where one only reads it. A group that knows it whole gets nothing."""
    blocks = steps.lowered
    groups = blocks.groups_of(blocks.maker[value])
    layout = blocks.part(blocks.maker[value], groups[0]).given[value].layout
    sources = groups if isinstance(layout[0], Partial) else groups[:1]
    readers = [group for group, each in enumerate(blocks.held) if name in each.buffers and group not in groups]
    targets = tuple(sorted({*sources, *readers}))
    return (sources, targets) if len(targets) > 1 else ((), ())


def _news(steps: RankSteps, value: str) -> tuple[list[Name], Given]:
    """The outer names of what a buffer becomes the sum of, as this group makes it, and their layout and strides."""
    given = steps.made(value)
    if isinstance(given.layout[0], Shard):  # a row per sample
        return [_gathered(steps, value)], whole_of(given)
    return [outer_names.value(value, m) for m in _micros(steps, value)], given


def _micros(steps: RankSteps, value: str) -> tuple[int, ...]:
    """The microbatches of this group that say what the buffer becomes."""
    if value in steps.micro.after:
        return (steps.m,)
    micros = steps.lowered.microbatches_of(steps.lowered.maker[value], steps.group)
    return micros if isinstance(steps.made(value).layout[0], Partial) else micros[-1:]


def _gathered(steps: RankSteps, value: str) -> Name:
    """The rows of all microbatches; its outer name."""
    if len(steps.lowered.routes) > 1:
        raise InvalidPlanError(
            f"{value}, which a buffer becomes, has a row per sample, and in schedule {steps.plan.schedule.name} "
            "several groups of ranks share the microbatches out; use the schedule gpipe or 1f1b"
        )
    return steps.gather(value)


def _whole(steps: RankSteps, group: int | None = None) -> Layout:
    held = steps.lowered.held[steps.group if group is None else group]
    return (R,) * (1 + len(held.mesh.shape))


def _message(steps: RankSteps, name: str, source: int, target: int) -> Message:
    spec, whole, there = steps.program.buffers[name], _whole(steps, source), _whole(steps, target)
    return steps.lowered.message(f"buffer:{name}:{source}>{target}", spec, whole, source, target, there)
