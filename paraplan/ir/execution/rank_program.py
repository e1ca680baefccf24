"""What one rank executes: the single idea of the program.

`lowering` turns Program + Plan into a `RankProgram` per class of equal ranks. The simulator prices
exactly this; codegen emits exactly this; the recorder of a run is compared with exactly this.

A `Block` is the forward or the backward of one kind under one choice, lowered once however many segments
call it: instructions over named local values. `Step`s call blocks on values of an outer namespace.

Rank-dependent numbers (shard offsets) are strings in instruction arguments (see `ir.execution.offsets`).

Memory semantics, the same in simulator and runtime: a value holds its storage (`LocalValue.base` names the
value that owns it, views share it); a storage lives while any name in a block or in the outer namespace, or
a bundle of saved values, holds it. An instruction allocates its fresh outputs, then `frees` drop names.

A value may live on a *tier* outside of the device (`ir.machine.tiers`). Its bytes are counted there, by the same
rules, and never among the device's; only copies read it. Copies are issued and waited for as collectives are, on
streams of their own.
"""

from __future__ import annotations

from enum import Enum

from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.schedule import ActionKind, parse_action
from paraplan.ir.execution.streams import Channel
from paraplan.ir.model.graph import Arg, arg_text
from paraplan.ir.model.tensor import DTYPE_BYTES, TensorSpec
from paraplan.ir.process.memo import SESSION
from paraplan.ir.struct import Value

ROOM, PUT, GROW = "aten.empty.memory_format", "paraplan.put_", "paraplan.grow_"
"""What gathers chunks: a buffer, a chunk put into it, an addend of a sum. The last two write their first argument."""

SUM, SUMMED = "paraplan.linear_grad_weight_", "paraplan.linear_grad_weight"
"""A product that adds to the sum it is given first, in place; and the same that makes what is added."""

CAST_MANY, WRITE_MANY = "paraplan.cast_many", "paraplan.write_many"
"""What casts many tensors at once, and what writes many over others, which it may cast."""

MAGNITUDE = "paraplan.magnitude"
"""What measures a gradient: the sum of its squares and its largest absolute value."""


class LocalValue(Value, frozen=True, kw_only=True):
    """A value as one rank holds it.

    Attributes:
        dtype, shape, strides: local; strides in elements.
        base: name of the value whose storage it shares; its own name when it owns one. A block's input
            owns its storage as far as the block is concerned.
        storage_bytes: size of the owned storage, 0 for a view.
        tier: where that storage is: "" for the device, else one of `ir.machine.tiers.TIERS`.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    base: str
    storage_bytes: int
    tier: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        count = DTYPE_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


class InstrKind(Enum):
    """OP computes; COLLECTIVE issues communication, COPY a copy to or from a tier; WAIT makes their result usable."""

    OP = "op"
    COLLECTIVE = "collective"
    COPY = "copy"
    WAIT = "wait"


class Instr(Value, frozen=True, kw_only=True):
    """One instruction.

    Attributes:
        kind: see `InstrKind`.
        target: an op ("aten.mm.default", "paraplan.linear"), or a collective's name (`ir.machine.collectives`); for
            copies "offload" (makes a value on the tier), "prefetch" (makes one on the device), "bring" (the same while
            stores go the other way), "lift" (disk only: makes one in the host's memory), "store" (overwrites a value
            on the tier, what it issues is a view of that) and "keep" (the same while nothing comes the other way).
        args, kwargs: as in `ir.model.graph`, names local to the block. Collectives: ("%input", reduce op or ""), and
            four more where `Collective.uneven`. Copies: ("%input", ":tier"), and of "store" and "keep" the value
            overwritten. WAIT: ("%issued",), followed by the input of the collective or copy where that must live until
            then (not where `Collective.in_place`: it works on a copy, or on its input where what it issues is a view).
            What a block issued may be waited for in a later one.
        outs: names made. A WAIT's output is a view of what was issued.
        axis: mesh axis a collective runs over, and its WAIT; -1 otherwise.
        frees: names dropped afterwards.
        workspace_bytes: the most an op allocates and drops inside.
        kernel: as which kernel an op runs (`ir.machine.kernel_choice`); "" for the reference one, which runs anywhere.
        origin: index of the joint graph's op this serves; -1 for none.
        layout_change: whether it belongs to a change of layout, not to the op itself.
        work: (flops, bytes moved) where the user registered what the op costs; bytes -1 where only flops.
    """

    kind: InstrKind = InstrKind.OP
    target: str
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg] = {}
    outs: tuple[str | None, ...]
    axis: int = -1
    frees: tuple[str, ...] = ()
    workspace_bytes: int = 0
    kernel: str = ""
    origin: int = -1
    layout_change: bool = False
    work: tuple[float, float] | None = None

    @property
    def issues(self) -> bool:
        """Whether it begins what a WAIT ends."""
        return self.kind in (InstrKind.COLLECTIVE, InstrKind.COPY)

    @property
    def tier(self) -> str:
        """The tier a copy goes to or comes from; "" for all else."""
        return arg_text(str(self.args[1])) if self.kind is InstrKind.COPY else ""


class BlockRole(Enum):
    """What a block does: the phases of a segment kind, and what is done around segments."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUTS = "Bi"  # the first half of a backward: gradients of boundary inputs
    BACKWARD_WEIGHTS = "Bw"  # the second: gradients of parameters
    EVALUATION = "E"
    GATHER = "gather"  # parameters, and what the tail reads
    REDUCE = "reduce"  # gradients
    CAST = "cast"  # a gradient for its accumulator
    HOLD_CAST = "hold cast"  # a weight, once a step
    COUNT = "count"  # a denominator
    LOSS = "loss"  # and its gradient
    OUTPUT = "output"
    ZERO = "zero"  # a gradient nobody makes
    CUT = "cut"  # a microbatch's part of the tail's gradient
    SEND = "send"
    RECEIVE = "receive"
    BUFFER = "buffer"  # the new value of one
    WRITES = "writes"  # several parameters or buffers at once
    RESTORE = "restore"  # a stored copy from its updated state
    OFFLOAD = "offload"  # copies to a tier, and waits for them
    PREFETCH = "prefetch"  # copies back, and waits for them
    FETCH = "fetch"  # copies of parameters to the device, and waits for them
    BRING = "bring"  # copies of states to their update, and waits for them
    RECALL = "recall"  # copies of gradients to their update, and waits for them
    REORDERED = "reordered"  # what a memory schedule does beside a step that calls none
    STORE = "store"  # copies of states and gradients to where they live, and waits for them


BACKWARDS = frozenset({BlockRole.BACKWARD, BlockRole.BACKWARD_INPUTS, BlockRole.BACKWARD_WEIGHTS})


class Block(Value, frozen=True, kw_only=True):
    """Straight-line local code.

    Attributes:
        name: a label, e.g. "k2.0.F".
        role: what it does.
        kind: the segment kind, or denominator ("den0"), whose ops its instructions serve; "" for none.
        inputs: names bound by the caller, in order.
        outputs: names returned, in order (None: absent).
        saved: names kept for the block's backward; a backward block takes them first among its inputs.
        values: every name's local value.
        instrs: in order. Inputs and values not returned or saved are freed at their last use.
    """

    name: str
    role: BlockRole
    kind: str = ""
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    saved: tuple[str, ...]
    values: dict[str, LocalValue]
    instrs: tuple[Instr, ...]


def in_place(block: Block, instr: Instr) -> bool:
    """Whether a collective overwrites its input: what it issues then owns no storage."""
    issued = instr.outs[0]
    return instr.kind is InstrKind.COLLECTIVE and issued is not None and block.values[issued].base != issued


PIECES = frozenset({"paraplan.linear_into_", "paraplan.linear_rows"})
"""What products in pieces become."""


def is_compiled(block: Block) -> bool:
    """Whether a block is one of those given to torch.compile: a segment's forward or backward, whole, without copies to
    or from a tier and waits for them (no compiler sees threads and files), or products in pieces (compiled wrong)."""
    copies = any(i.kind is InstrKind.COPY or (i.kind is InstrKind.WAIT and i.axis < 0) for i in block.instrs)
    pieces = any(i.target in PIECES for i in block.instrs)
    return block.role in (BlockRole.FORWARD, BlockRole.BACKWARD) and not copies and not pieces


class StepKind(Enum):
    """What a step does to the outer namespace."""

    CALL = "call"
    ACCUMULATE = "accumulate"
    DROP = "drop"
    UPDATE = "update"
    UPDATED = "updated"
    SEND = "send"
    RECV = "recv"
    AWAIT = "await"


MESSAGES = frozenset({StepKind.SEND, StepKind.RECV, StepKind.AWAIT})


class StagedUpdate(Value, frozen=True, kw_only=True):
    """An update of states that were brought there for it.

    Attributes:
        tier: where it is done: "" for the device, or a memory of the host.
        state_bytes: of the optimizer's states that it reads and writes, parameters apart.
        workspace_bytes: the most it allocates and drops inside.
    """

    tier: str
    state_bytes: int
    workspace_bytes: int


class Step(Value, frozen=True, kw_only=True):
    """One step of a rank's program; names are of the outer namespace.

    CALL: run `block` on `args` (bound in order) giving `outs`; names in `drops` are given up by the outer
        namespace as the call begins (so that the block can free them at their last use). Saved values of a
        forward block come after its outputs in `outs`.
    ACCUMULATE: args = (accumulator, addend): the accumulator becomes the addend where it does not exist
        yet (a move: no time, no memory), else grows by it in place; the addend's name is dropped.
    DROP: names in `drops` are given up.
    UPDATE: the optimizer's update of the parameters in `args`, all on one tier, where it is done; with `staged`, of
        copies of them that were brought there, where `drops` are gradients that were too and are then given up; with
        `late`, begun with gradients held since the step before, to be done by the host beside what follows.
    UPDATED: wait for what a late UPDATE began; `drops`, the gradients it used, are then given up.
    SEND: begin to send `args[0]` as the message (`transfer`, `microbatch`); where `outs` has a name, the part of it
        that is sent is copied there first. What is sent is left alone until an AWAIT of it.
    RECV: allocate `outs[0]` and begin to receive the message into it; its values are there after an AWAIT of it.
    AWAIT: wait until the message in `args[0]` has been sent or received; names in `drops` are then given up.

    Messages between two ranks in one direction are sent and received in the same order.

    Attributes:
        action: the schedule's action it belongs to, e.g. "0F1".
        microbatch: -1 outside of microbatches; gives "m" in offsets.
        segment: whose instance it is; -1 for none.
        transfer: of SEND, RECV and AWAIT, a key of the program's `transfers`.
        staged: of an UPDATE of states that are elsewhere between steps.
        late: of an UPDATE, see there.
    """

    kind: StepKind
    action: str
    block: str = ""
    args: tuple[Name, ...] = ()
    outs: tuple[Name | None, ...] = ()
    drops: tuple[Name, ...] = ()
    microbatch: int = -1
    segment: int = -1
    transfer: str = ""
    staged: StagedUpdate | None = None
    late: bool = False

    @property
    def phase(self) -> ActionKind:
        """The kind of its action."""
        return _phase(self.action)


@SESSION.cached()
def _phase(action: str) -> ActionKind:
    return parse_action(action).kind


class PeerTransfer(Value, frozen=True, kw_only=True):
    """A message between ranks of two meshes, one per microbatch.

    Attributes:
        message: its name, the same at both ends; with the microbatch and both ranks it is one message.
        dtype, shape: of what is sent, local; always contiguous.
        peers: per place in the rank's mesh, the rank at the other end; -1 for none, and then nothing is moved.
        starts: per place, where in the value the part that is sent begins; empty where all of it is.
        channel: between the meshes; its messages keep their order.
        sends: whether this end sends.
    """

    message: str
    dtype: str
    shape: tuple[int, ...]
    peers: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...] = ()
    channel: Channel
    sends: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return TensorSpec(self.dtype, self.shape).nbytes


class OuterValue(Value, frozen=True, kw_only=True):
    """A value of the outer namespace that exists before the step begins, or that UPDATE works on.

    Attributes:
        role: what it is.
        source: the parameter's, input's or buffer's name in the program; a seed's segment number as text.
        dtype, shape: local.
        layout: text form, on the stage's mesh.
        nbytes: bytes it owns; 0 for a view of another one.
        tier: where those are (see `LocalValue`).
    """

    role: Role
    source: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    nbytes: int
    tier: str = ""


class OutputPlace(Value, frozen=True, kw_only=True):
    """Where an evaluation leaves something the model returns.

    Attributes:
        names: outer names of its local values; one per microbatch where they differ.
        spec: global.
        layout: of those values, text form; the first placement is that along the microbatches.
    """

    names: tuple[Name, ...]
    spec: TensorSpec
    layout: str


class RankProgram(Value, frozen=True, kw_only=True):
    """All a rank does in one step.

    Attributes:
        mesh_axes, mesh_shape: of the rank's stages.
        num_microbatches: extent of "m" in offsets.
        blocks: by name.
        outer: values alive before the step, by outer name.
        steps: in order.
        loss: outer name of the loss, whole on every rank, after the last step.
        metrics: likewise of each of several losses, unweighted, by name.
        outputs: what the model returns beside them (evaluations only), by name.
        grads: parameter name -> outer name of its gradient in the state layout after the last step.
        optimizer_bytes: bytes of optimizer state, and of gradients of earlier steps where they are added up, that the
            rank keeps on its device beside those of `outer`.
        update_workspace_bytes: the most the update there allocates and drops inside.
        update_tiers: per tier on which parameters are updated, the same two. Steps with `staged` have their own.
        transfers: messages to and from ranks of other meshes.
    """

    mesh_axes: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    num_microbatches: int
    blocks: dict[str, Block]
    outer: dict[Name, OuterValue]
    steps: tuple[Step, ...]
    loss: Name
    metrics: dict[str, Name] = {}
    outputs: dict[str, OutputPlace] = {}
    grads: dict[str, Name]
    optimizer_bytes: int
    update_workspace_bytes: int
    update_tiers: dict[str, tuple[int, int]] = {}
    transfers: dict[str, PeerTransfer] = {}

    def role_of(self, step: Step) -> BlockRole | None:
        """What the block of a CALL does; None for other steps."""
        return self.blocks[step.block].role if step.kind is StepKind.CALL else None

    def update_tier(self, step: Step) -> str:
        """Where an UPDATE is done."""
        if step.staged is not None:
            return step.staged.tier
        return self.outer[step.args[0]].tier if step.args else ""

    def update_workspace(self, step: Step) -> int:
        """The most an UPDATE allocates and drops inside."""
        return self.update_bytes(self.update_tier(step))[1] if step.staged is None else step.staged.workspace_bytes

    def update_bytes(self, tier: str) -> tuple[int, int]:
        """Bytes of optimizer state kept on a tier, and of the update's workspace there."""
        return self.update_tiers.get(tier, (0, 0)) if tier else (self.optimizer_bytes, self.update_workspace_bytes)
