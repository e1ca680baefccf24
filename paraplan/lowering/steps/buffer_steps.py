"""The steps of one rank, part by part: buffers the model writes get their new values once the step is through.

A buffer becomes, whole on every rank, the sum of what the microbatches say where that is partial, else what each of
them says. Where several groups of ranks write it (bidirectional pipelines), each has its own microbatches' sum: they
send it to each other, and to groups that only read it, and add in the order of the groups, so that the copies stay
equal to the bit. Where each microbatch is a batch by itself (`Program.apart`) buffers are written after each forward
instead, as the next one reads them.
"""

from __future__ import annotations

from collections.abc import Callable

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import StepKind
from paraplan.ir.execution.schedule import ActionKind, parse_action
from paraplan.ir.machine.mesh import Layout, Partial, R, Shard
from paraplan.lowering.blocks.forward import Given
from paraplan.lowering.blocks.small_blocks import buffer_block, share_block
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.steps.stage_messages import StageMessages
from paraplan.lowering.steps.step_writer import StepWriter
from paraplan.lowering.steps.whole_batch import whole_of
from paraplan.lowering.transfers.mesh_transfers import Message


class BufferSteps:
    """Writes the steps of buffers.

    Args:
        rank, writer: whose steps are written.
        messages: to and from other groups.
        gather: puts together what the microbatches say of a value; gives the outer name of the whole.
    """

    def __init__(
        self, rank: RankGroup, writer: StepWriter, messages: StageMessages, gather: Callable[[str], Name]
    ) -> None:
        self._rank, self._writer, self._messages, self._gather = rank, writer, messages, gather
        self._program, self._group = rank.program, rank.group

    def send(self) -> list[tuple[Message, Name]]:
        """Write this group's shares of what others need a share of, and their sending.

        Returns:
            The others' messages, with the outer names of what they bring.
        """
        coming = []
        for name, value in self._program.buffer_updates.items():
            sources, targets = self._exchanged(name, value)
            if self._group in sources:
                spec, (names, given) = self._program.buffers[name], self._news(value)
                block = share_block(f"share.{name}", spec, given.layout, given.strides, len(names), self._rank.extended)
                new = {f"new{i}": each for i, each in enumerate(names)}
                share = outer_names.new_buffer(name).of_group(self._group)
                self._writer.call(block, tuple(new[local] for local in block.inputs), (share,))
                for other in targets:
                    if other != self._group:
                        self._messages.send_now(self._message(name, self._group, other), share, Given(self._whole()))
            if self._group in targets:
                others = [group for group in sources if group != self._group]
                new_value = outer_names.new_buffer(name)
                coming += [(self._message(name, other, self._group), new_value.of_group(other)) for other in others]
        return coming

    def write(self, after: tuple[int, int] | None = None) -> None:
        """Write the new values; shares of other groups are here.

        `after`: only what this stage makes of this microbatch, where each is a batch by itself.
        """
        for name, value in self._program.buffer_updates.items():
            elsewhere = after is not None and self._rank.lowered.maker[value] != after[0]
            if name not in self._rank.holding.buffers or elsewhere:
                continue
            sources, targets = self._exchanged(name, value)
            shared = sources if self._group in targets else ()
            new_value = outer_names.new_buffer(name)
            for group in shared:
                self._writer.add(StepKind.ACCUMULATE, args=(new_value, new_value.of_group(group)))
            names, given = ([new_value], Given(self._whole())) if shared else self._news(value)
            if after is not None:
                names = [outer_names.value(value, after[1])]
            spec = self._program.buffers[name]
            block = self._writer.cache.get(
                "buffer.", buffer_block, spec, given.layout, given.strides, len(names), self._rank.extended
            )
            new = {"stored": outer_names.buffer(name)} | {f"new{i}": each for i, each in enumerate(names)}
            self._writer.call(block, tuple(new[local] for local in block.inputs), ())

    def check_apart(self) -> None:
        """Whether buffers may be written after each forward.

        Raises:
            InvalidPlanError: a backward reads what one held, or several groups of ranks read and write it.
        """
        written = {outer_names.buffer(name) for name in self._rank.holding.written}
        for name, value in self._program.buffer_updates.items():
            groups = {*self._rank.lowered.groups_of(self._rank.lowered.maker[value])}
            groups |= {group for group, each in enumerate(self._rank.lowered.held) if name in each.buffers}
            if len(groups) > 1:
                raise InvalidPlanError(
                    f"buffer {name} is written once a microbatch, and {len(groups)} groups of ranks read or write it; "
                    "use a schedule that keeps a stage in one group (gpipe, 1f1b), and stages that keep the buffer in "
                    "one"
                )
        for step in self._writer.steps:
            read = sorted(map(str, written & set(step.args)))
            if read and step.action and parse_action(step.action).kind is not ActionKind.F:
                raise InvalidPlanError(
                    f"segment {step.segment}: the backward of a microbatch reads {read[0]} as it was "
                    "before later microbatches wrote it; plan without per_microbatch"
                )

    def _exchanged(self, name: str, value: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The groups whose shares a buffer's new value is the sum of, and those that get them.

        Where several groups write it, each of their own microbatches, and where one only reads it. A group that knows
        it whole gets nothing.
        """
        blocks = self._rank.lowered
        groups = blocks.groups_of(blocks.maker[value])
        layout = blocks.part(blocks.maker[value], groups[0]).given[value].layout
        sources = groups if isinstance(layout[0], Partial) else groups[:1]
        readers = [group for group, each in enumerate(blocks.held) if name in each.buffers and group not in groups]
        targets = tuple(sorted({*sources, *readers}))
        return (sources, targets) if len(targets) > 1 else ((), ())

    def _news(self, value: str) -> tuple[list[Name], Given]:
        """The outer names of what a buffer becomes the sum of, as this group makes it, and their layout and strides."""
        given = self._rank.made(value)
        if isinstance(given.layout[0], Shard):  # a row per sample
            return [self._gathered(value)], whole_of(given)
        return [outer_names.value(value, m) for m in self._micros(value)], given

    def _micros(self, value: str) -> tuple[int, ...]:
        """The microbatches of this group that say what the buffer becomes."""
        if value in self._rank.micro.after:
            return (self._rank.m,)
        micros = self._rank.lowered.microbatches_of(self._rank.lowered.maker[value], self._group)
        return micros if isinstance(self._rank.made(value).layout[0], Partial) else micros[-1:]

    def _gathered(self, value: str) -> Name:
        """The rows of all microbatches; its outer name."""
        if len(self._rank.lowered.routes) > 1:
            raise InvalidPlanError(
                f"{value}, which a buffer becomes, has a row per sample, and in schedule "
                f"{self._rank.plan.schedule.name} several groups of ranks share the microbatches out; use the schedule "
                "gpipe or 1f1b"
            )
        return self._gather(value)

    def _whole(self, group: int | None = None) -> Layout:
        held = self._rank.lowered.held[self._group if group is None else group]
        return (R,) * (1 + len(held.mesh.shape))

    def _message(self, name: str, source: int, target: int) -> Message:
        spec, whole, there = self._program.buffers[name], self._whole(source), self._whole(target)
        return self._rank.lowered.message(f"buffer:{name}:{source}>{target}", spec, whole, source, target, there)
