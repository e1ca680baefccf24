"""The tail of a program: segments that run once a step, on the whole batch (see `rules.time_axis`).

    F of every microbatch, of the segments before the tail
    gather     what the tail reads is put together: rows one after another, partial sums added
    tail       forward, once
    tail       backward, once
    cut        each microbatch's part of the gradients, before its backward
    B of every microbatch

So in the stage that holds the tail every forward precedes every backward. The tail's segments are lowered as those of a
step of one microbatch. On a mesh, rows are gathered whole: the rows of a rank's shards of all microbatches do not
follow each other in the batch.

Names: of M microbatches, `<value>@<M>` is of the whole batch, as is its gradient `d:<value>@<M>`.
"""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.rank_program import GROW, PUT, ROOM, Block, BlockRole
from paraplan.ir.execution.schedule import Action, ActionKind, Schedule, parse_action
from paraplan.ir.machine.mesh import Layout, Partial, R, Shard, gathered
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.blocks.forward import Given, unshared

Dims = tuple[int, ...]
_BACKWARD = (ActionKind.B, ActionKind.I)


def whole_of(given: Given) -> Given:
    """The layout and strides of a value gathered over all microbatches; its own where all have the same."""
    return given if given.layout[0] == R else Given(gathered(given.layout))


def gather_block(name: str, spec: TensorSpec, given: Given, extended: Dims) -> Block:
    """The whole of a value from what the microbatches say, inputs `x<m>`; see `whole_of` for its layout.

    Args:
        name: of the block.
        spec: of the value, global.
        given: the layout and strides microbatches give it in.
        extended: shape of the mesh, the microbatch axis first.
    """
    emitter = BlockEmitter(name, extended, BlockRole.GATHER)
    first, count = given.layout[0], extended[0]
    wanted = (first, *whole_of(given).layout[1:])
    for m in range(count):
        emitter.give(f"x{m}", spec, given.layout, given.strides)
    parts = [emitter.get(f"x{m}", wanted) for m in range(count)]
    shape = emitter.values[parts[0]].shape
    if isinstance(first, Shard):
        room = tuple(size * count if at == first.dim else size for at, size in enumerate(shape))
        whole = emitter.local(ROOM, (room,), "whole", spec.dtype, room, {"dtype": ":" + spec.dtype})
        for m, part in enumerate(parts):
            emitter.add_many(PUT, ("%" + whole, "%" + part, first.dim, m * shape[first.dim]), ())
    elif isinstance(first, Partial) and first.op == "sum":
        whole = emitter.copy_rows(parts[0], "whole")
        for part in parts[1:]:
            emitter.add_many(GROW, ("%" + whole, "%" + part), ())
    else:
        whole = parts[0]
        for m, part in enumerate(parts[1:]):
            whole = emitter.local("aten.maximum.default", ("%" + whole, "%" + part), f"most{m}", spec.dtype, shape)
    return emitter.finish((whole,), ())


def cut_block(name: str, spec: TensorSpec, given: Given, part: Layout, extended: Dims) -> Block:
    """A microbatch's part, in a storage of its own, of a gradient of the whole batch; input `x`.

    Args:
        name: of the block.
        spec: of the gradient, global.
        given: the layout and strides it is there in.
        part: the layout of the part.
        extended: shape of the mesh, the microbatch axis first.
    """
    emitter = BlockEmitter(name, extended, BlockRole.CUT)
    emitter.give("x", spec, given.layout, given.strides)
    return emitter.finish(unshared(emitter, (emitter.get("x", part),)), ())


class Turn:
    """When a rank runs the tail: after which forward and before which backward of the stage that holds it.

    Args:
        schedule: its name, for messages.
        stage: that holds the tail.
        why: the op that asks for one.
        actions: of the rank.
    Raises:
        InvalidPlanError: a backward precedes a forward.
    """

    def __init__(self, schedule: str, stage: int, why: str, actions: Sequence[Action]) -> None:
        own = [action for action in actions if action.stage == stage]
        forwards = [place for place, action in enumerate(own) if action.kind is ActionKind.F]
        backwards = [place for place, action in enumerate(own) if action.kind in _BACKWARD]
        if forwards and backwards and forwards[-1] > backwards[0]:
            raise InvalidPlanError(
                f"schedule {schedule}: {own[backwards[0]]} comes before {own[forwards[-1]]}, but {why} reads all "
                f"microbatches, so that in stage {stage} every forward has to come before every backward; use the "
                "schedule gpipe"
            )
        self.last = own[forwards[-1]].microbatch if forwards else -1
        self.first = {action.kind: action.microbatch for action in reversed(own)}
        self.stage = stage

    def ends(self, stage: int, m: int) -> bool:
        """Whether the tail's forward follows this forward."""
        return (stage, m) == (self.stage, self.last)

    def begins(self, stage: int, m: int, kind: ActionKind) -> bool:
        """Whether the tail's backward, or half of it, precedes this one.

        Args:
            stage, m: whose backward, and the microbatch.
            kind: of action: the whole backward or a half.
        """
        return stage == self.stage and self.first.get(kind) == m


def takes_turns(schedule: Schedule, stage: int) -> bool:
    """Whether one group of ranks runs a stage, and all forwards of it precede its backwards."""
    if schedule.num_replicas > 1:
        return False
    try:
        for texts in schedule.classes:
            Turn(schedule.name, stage, "", tuple(map(parse_action, texts)))
    except InvalidPlanError:
        return False
    return True
