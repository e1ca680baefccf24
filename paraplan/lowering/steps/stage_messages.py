"""The steps of one rank, part by part: messages to and from the ranks of other stages.

A value is brought to the layout it travels in, made contiguous, and sent; it is held until the message is through. Of
the messages of one value (one per microbatch) as many are under way as there are stages between its ends, so that a
rank waits for none that the pipeline lets lie. Receives are posted where the schedule says, or where the value is
needed; and earlier where a later message of the same ranks is awaited earlier, for messages between two ranks keep
their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import msgspec

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import Block, BlockRole, PeerTransfer, RankProgram, Step, StepKind
from paraplan.ir.execution.streams import Channel
from paraplan.ir.machine.mesh import R
from paraplan.ir.model.strides import is_contiguous
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.blocks.forward import Given
from paraplan.lowering.stage_blocks import PlanBlocks
from paraplan.lowering.steps.step_writer import StepWriter
from paraplan.lowering.transfers.crossings import Crossing
from paraplan.lowering.transfers.mesh_transfers import Ends, Message, ends_of

Dims = tuple[int, ...]


NameOf = Callable[[str, int], Name]
"""(value, group of ranks that sends it) -> its outer name."""


class StageMessages:
    """Writes the steps that send and receive.

    Args:
        blocks: of the plan.
        group: of the rank.
        writer: of its steps.

    Attributes:
        transfers: of the messages written so far.
    """

    def __init__(self, blocks: PlanBlocks, group: int, writer: StepWriter) -> None:
        self._blocks, self._group, self._writer = blocks, group, writer
        self._m = blocks.plan.num_shares
        self.transfers: dict[str, PeerTransfer] = {}
        self._made: dict[object, Block | None] = {}
        self._posted: dict[tuple[str, int], list[Name]] = {}
        self._flying: dict[str, list[list[tuple[Name, str, int]]]] = {}
        self._ends_of: dict[str, Ends] = {}

    def sent_by(self, crossings: Iterable[Crossing], stage: int) -> list[Crossing]:
        """What this rank sends once it has run a stage."""
        return [each for each in crossings if each.begin == stage and each.message.source == self._group]

    def _due(self, crossings: Iterable[Crossing], stage: int) -> list[Crossing]:
        return [each for each in crossings if each.end == stage and each.message.target == self._group]

    def post(self, crossings: Iterable[Crossing], stage: int, m: int, name_of: NameOf) -> None:
        """Begin to receive what a stage needs for a microbatch.

        Args:
            crossings: values that go from stage to stage.
            stage, m: that reads them, and the microbatch.
            name_of: the outer name of a value.
        """
        for each in self._due(crossings, stage):
            self.receive(each.message, name_of(each.value, each.message.source), m)

    def arrive(self, crossings: Iterable[Crossing], stage: int, m: int, name_of: NameOf) -> list[tuple[str, Name]]:
        """Wait for what a stage needs for a microbatch; (value, outer name) of each.

        Args:
            crossings, stage, m, name_of: as of `post`.
        """
        found = []
        for each in self._due(crossings, stage):
            name = name_of(each.value, each.message.source)
            self.arrived(each.message, name, m)
            found.append((each.value, name))
        return found

    def receive(self, message: Message, name: Name, m: int = -1) -> None:
        """Begin to receive a message as an outer name, unless that is done.

        Args:
            message: to receive.
            name: that it becomes.
            m: the microbatch; -1 for none.
        """
        if (message.name, m) in self._posted:
            return
        whole = self._is_whole(message)
        keys = self._keys(message, sends=False)
        names = [name if whole else name.part(index) for index in range(len(keys))]
        for key, out in zip(keys, names, strict=True):
            self._writer.add(StepKind.RECV, outs=(out,), microbatch=m, transfer=key)
        self._posted[message.name, m] = names

    def arrived(self, message: Message, name: Name, m: int = -1) -> None:
        """Wait for a message and bring it to the layout it is wanted in.

        Args:
            message, name, m: as of `receive`.
        """
        self.receive(message, name, m)
        names = self._posted.pop((message.name, m))
        for key, part in zip(self._keys(message, sends=False), names, strict=True):
            self._writer.add(StepKind.AWAIT, args=(part,), microbatch=m, transfer=key)
        block = self._joining(message)
        if block is not None:
            bound = dict(zip(block.inputs, names, strict=True))
            self._writer.call(block, tuple(bound.values()), (name,), m)

    def _is_whole(self, message: Message) -> bool:
        """Whether one part is all there is to receive, in the layout it is to have."""
        return len(self._keys(message, sends=False)) == 1 and message.received == message.wanted

    def send(self, crossing: Crossing, name: Name, given: Given, m: int) -> None:
        """Send a value, once all but so many of its messages before are through.

        Args:
            crossing: the value's way.
            name: of the value.
            given: the layout and strides it is there in.
            m: the microbatch.
        """
        flying = self._flying.setdefault(crossing.message.name, [])
        while len(flying) >= max(1, abs(crossing.end - crossing.begin)):
            self._await(flying.pop(0))
        self.send_now(crossing.message, name, given, m)

    def send_now(self, message: Message, name: Name, given: Given, m: int = -1) -> None:
        """Send a value.

        Args:
            message: to send.
            name: of the value.
            given: the layout and strides it is there in.
            m: the microbatch; -1 for none.
        """
        block = self._packing(message, given)
        if block is not None:
            packed = name.packed(message.target)
            self._writer.call(block, (name,), (packed,), m)
            name = packed
        parts = []
        for index, key in enumerate(self._keys(message, sends=True)):
            part = name.part_for(message.target, index) if self.transfers[key].starts else None
            self._writer.add(StepKind.SEND, args=(name,), outs=(part,), microbatch=m, transfer=key)
            parts.append((part or name, key, m))
        self._flying.setdefault(message.name, []).append(parts)

    def sent(self, message: Message) -> None:
        """Wait until all of a message that was sent is through."""
        flying = self._flying.get(message.name, [])
        while flying:
            self._await(flying.pop(0))

    def drain(self) -> None:
        """Wait until everything is sent."""
        for flying in self._flying.values():
            while flying:
                self._await(flying.pop(0))

    def _await(self, parts: Iterable[tuple[Name, str, int]]) -> None:
        for name, key, m in parts:
            self._writer.add(StepKind.AWAIT, args=(name,), microbatch=m, transfer=key)

    def _keys(self, message: Message, sends: bool) -> list[str]:
        """The keys of a message's transfers at this end."""
        ends = self._ends(message)
        transfers = ends.sends if sends else ends.receives
        keys = [message.name if len(transfers) == 1 else f"{message.name}#{i}" for i in range(len(transfers))]
        self.transfers.update(zip(keys, transfers, strict=True))
        return keys

    def _ends(self, message: Message) -> Ends:
        if message.name not in self._ends_of:
            held = self._blocks.held
            meshes, m = (held[message.source].mesh, held[message.target].mesh), self._m if message.of_microbatch else 1
            self._ends_of[message.name] = ends_of(message, *meshes, m)
        return self._ends_of[message.name]

    def _extended(self, message: Message) -> Dims:
        return (self._m if message.of_microbatch else 1, *self._blocks.held[self._group].mesh.shape)

    def _packing(self, message: Message, given: Given) -> Block | None:
        """What brings a value to the layout it travels in, contiguous; None where it is so already."""
        key = (message.spec, given, message.sent, message.of_microbatch)
        if key not in self._made:
            emitter = BlockEmitter(f"send.{len(self._made)}", self._extended(message), BlockRole.SEND)
            emitter.give("value", message.spec, given.layout, given.strides)
            local = emitter.get("value", message.sent)
            value = emitter.values[local]
            if not is_contiguous(value.shape, value.strides):
                local = emitter.copy_rows(local, "sent")
            self._made[key] = None if local == "value" else emitter.finish((local,), ())
        return self._made[key]

    def _joining(self, message: Message) -> Block | None:
        """What makes one value of the parts of a message, in some layout; None where it is so already."""
        key = (message.spec, message.sent, message.received, message.wanted, message.source, message.of_microbatch)
        if key in self._made:
            return self._made[key]
        emitter = BlockEmitter(f"receive.{len(self._made)}", self._extended(message), BlockRole.RECEIVE)
        ends = self._ends(message)
        if len(ends.receives) == 1:
            emitter.give("part0", message.spec, message.received, known_as="value")
        else:
            _join(emitter, message, ends.receives[0], ends.pieces)
        local = emitter.get("value", message.wanted)
        self._made[key] = None if local == "part0" else emitter.finish((local,), ())
        return self._made[key]


def _join(emitter: BlockEmitter, message: Message, part: PeerTransfer, counts: Dims) -> None:
    """Lay the parts of a message side by side, the last dim first, as `value`."""
    shape, dtype = part.shape, part.dtype
    spec, whole = TensorSpec(dtype, shape), (R,) * len(emitter.mesh_shape)
    row = []
    for index in range(math.prod(counts)):
        emitter.give(f"part{index}", spec, whole)
        row.append(emitter.get(f"part{index}", whole))
    for dim in reversed(range(len(shape))):
        n = counts[dim]
        if n == 1:
            continue
        shape = (*shape[:dim], n * shape[dim], *shape[dim + 1 :])
        groups = [row[at : at + n] for at in range(0, len(row), n)]
        names = ["value"] if len(groups) == 1 else [f"joined{dim}.{index}" for index in range(len(groups))]
        row = [
            emitter.local("aten.cat.default", (tuple("%" + each for each in parts), dim), out, dtype, shape)
            for parts, out in zip(groups, names, strict=True)
        ]
    emitter.define("value", message.spec, message.received)


def in_order(built: Mapping[tuple[str, ...], RankProgram]) -> dict[tuple[str, ...], RankProgram]:
    """The programs with receives posted in the order of their sends, each as late as that and its own place allow.

    Raises:
        InvalidPlanError: a message is sent and not received, or received and not sent.
    """
    sent: dict[Channel, list[tuple[str, int]]] = {}
    for program in built.values():
        orders: dict[Channel, list[tuple[str, int]]] = {}
        for step in program.steps:
            if step.kind is StepKind.SEND:
                transfer = program.transfers[step.transfer]
                key = (transfer.message, step.microbatch)
                order = orders.setdefault(transfer.channel, [])
                if not order or order[-1] != key:
                    order.append(key)
        for channel, order in orders.items():
            if sent.setdefault(channel, order) != order:
                raise InvalidPlanError(
                    f"ranks of one mesh send in different orders over {channel}; give them the same schedule"
                )
    return {actions: _reordered(program, sent) for actions, program in built.items()}


def _reordered(program: RankProgram, sent: Mapping[Channel, list[tuple[str, int]]]) -> RankProgram:
    """The program with its receives in order."""
    places: dict[Channel, dict[tuple[str, int], list[int]]] = {}
    for position, step in enumerate(program.steps):
        if step.kind is StepKind.RECV:
            transfer = program.transfers[step.transfer]
            found = places.setdefault(transfer.channel, {})
            found.setdefault((transfer.message, step.microbatch), []).append(position)
    moved: dict[int, list[int]] = {}
    for channel, messages in places.items():
        order = sent.get(channel, [])
        lost = messages.keys() ^ set(order)
        if lost:
            name, m = min(lost)
            side = "received" if (name, m) in messages else "sent"
            raise InvalidPlanError(f"message {name} of microbatch {m} is only {side}; the schedule lacks its other end")
        latest = len(program.steps)
        for key in reversed(order):
            latest = min(latest, messages[key][0])
            moved.setdefault(latest, [])[:0] = messages[key]
    taken = {position for positions in moved.values() for position in positions}
    steps: list[Step] = []
    for position, step in enumerate(program.steps):
        for source in moved.get(position, ()):
            steps.append(msgspec.structs.replace(program.steps[source], action=step.action))
        if position not in taken:
            steps.append(step)
    return msgspec.structs.replace(program, steps=tuple(steps))
