"""A rank's peak taken apart: what everything alive at that instant is for, to the byte.

Every storage of `live_storages` has one role, found from what holds it (parameters, gradients, the batch), from who
made it (a message, a collective, an op of the forward or the backward) and from who reads it (an activation is saved
if the backward reads it in a later step). The roles' bytes add up to the simulator's peak. Tiers stand beside it.

Limits: bytes are those asked for. What CUDA's caching allocator adds in rounding is said beside (`rounding_bytes`); its
segments, fragmentation and the context are not known here (a plan's `reserve` is room for them).
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

from paraplan.cost_models.constants import CUDA_BLOCK_BYTES
from paraplan.cost_models.simulator.live_storages import STATES, WORKSPACE, Alive, Place, alive_at
from paraplan.cost_models.simulator.rank_trace import RankTrace
from paraplan.ir.execution.name import Name, Role, Transit
from paraplan.ir.execution.rank_program import BACKWARDS, MESSAGES, BlockRole, Instr, InstrKind, RankProgram, Step
from paraplan.ir.model.graph import Op, Phase, refs
from paraplan.ir.model.program import Program
from paraplan.ir.model.sources import graph_of_block
from paraplan.ir.struct import Value


class BytesRole(Enum):
    """What bytes are for, in the order they are told."""

    PARAMETERS = "parameters"
    GATHERED = "gathered parameters"
    MASTERS = "master and updated copies"
    STATES = "optimizer states"
    GRADIENTS = "gradients"
    SAVED = "saved activations"
    FETCHED = "activations brought back"
    RECOMPUTED = "recomputed activations"
    BOUNDARY = "values between segments"
    BOUNDARY_GRADIENTS = "gradients between segments"
    FORWARD = "activations not saved"
    BACKWARD = "gradients of activations"
    HALVES = "held for the weights' gradients"
    MESSAGES = "messages between stages"
    COMMUNICATION = "communication buffers"
    WORKSPACE = "workspace of the running op"
    BATCH = "batch"
    BUFFERS = "buffers and seeds"
    OTHER = "other values"


_BEFORE = {
    Role.PARAMETER: BytesRole.PARAMETERS,
    Role.STATE: BytesRole.MASTERS,
    Role.SLOTS: BytesRole.STATES,
    Role.LATE: BytesRole.GRADIENTS,
    Role.WAITING: BytesRole.GRADIENTS,
    Role.BATCH: BytesRole.BATCH,
    Role.BUFFER: BytesRole.BUFFERS,
    Role.SEED: BytesRole.BUFFERS,
    Role.LOSS_SCALE: BytesRole.BUFFERS,
}
"""Of what is there before the step."""
_MADE = {
    Role.ACCUMULATOR: BytesRole.GRADIENTS,
    Role.GRADIENT: BytesRole.GRADIENTS,
    Role.TIED: BytesRole.GRADIENTS,
    Role.GATHERED: BytesRole.GATHERED,
    Role.FETCHED: BytesRole.GATHERED,
    Role.HELD: BytesRole.GATHERED,
    Role.UNDER_WAY: BytesRole.COMMUNICATION,
    Role.VALUE_GRADIENT: BytesRole.BOUNDARY_GRADIENTS,
    Role.PARAMETER: BytesRole.PARAMETERS,
    Role.STATE: BytesRole.MASTERS,
    Role.BUFFER: BytesRole.BUFFERS,
    Role.SLOTS: BytesRole.STATES,
    Role.LATE: BytesRole.GRADIENTS,
    Role.WAITING: BytesRole.GRADIENTS,
    Role.MAGNITUDE: BytesRole.GRADIENTS,
    Role.HALF: BytesRole.HALVES,
}
"""Of what the step makes."""
_HELD = frozenset(
    {
        BytesRole.GRADIENTS,
        BytesRole.GATHERED,
        BytesRole.COMMUNICATION,
        BytesRole.PARAMETERS,
        BytesRole.MASTERS,
        BytesRole.STATES,
        BytesRole.BUFFERS,
    }
)
_BUNDLE = "paraplan.pack"
_ACTIVATIONS = frozenset(
    {BytesRole.SAVED, BytesRole.RECOMPUTED, BytesRole.FORWARD, BytesRole.BACKWARD, BytesRole.HALVES}
)


class RoleBytes(Value, frozen=True, kw_only=True):
    """Bytes of one role.

    Attributes:
        role: which.
        kind: of activations, the segment kind whose they are, by number; -1 for none.
        tier: "" for the device.
        nbytes: all of them.
        count: how many storages.
    """

    role: BytesRole
    kind: int
    tier: str
    nbytes: int
    count: int


class Tensor(Value, frozen=True, kw_only=True):
    """A storage alive at the peak.

    Attributes:
        name: what holds it; of activations, and of what no outer name holds, what the block that made it calls it.
        holder: that, where it is an outer name, as blocks of a memory schedule have them.
        others: how many more outer names hold it, a bundle's parts for example.
        role, kind, tier, nbytes: as in `RoleBytes`.
        dtype, shape: local.
        maker, reader: (step, instruction) in the program; a step of -1: there before the step; no reader: not again.
        out: which output of its maker.
    """

    name: str
    holder: Name | None
    others: int
    role: BytesRole
    kind: int
    tier: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    maker: Place
    reader: Place | None
    out: int


class Peak(Value, frozen=True, kw_only=True):
    """A rank class at the instant of its peak.

    Attributes:
        nbytes: the trace's peak; what `roles` have on the device adds up to it.
        place: (step, instruction) of the instant.
        at_s: when that step has ended.
        roles: bytes by role, kind and tier.
        tensors: of the device and of tiers, the largest first.
        rounding_bytes: what CUDA's caching allocator adds for these tensors, each rounded up to blocks; 0 on CPU.
    """

    nbytes: int
    place: Place
    at_s: float
    roles: tuple[RoleBytes, ...]
    tensors: tuple[Tensor, ...]
    rounding_bytes: int


def peak_of(program: RankProgram, trace: RankTrace, model: Program, backend: str = "cpu") -> Peak:
    """The peak of a rank class, taken apart.

    Args:
        program: what it runs.
        trace: of that.
        model: the program it was lowered from.
        backend: of the device: "cuda" has an allocator that rounds.
    Raises:
        CostModelError: the program names what does not exist.
    """
    place = (trace.peak_step, trace.peak_instr)
    roles = _Roles(program, model)
    told = [(roles.of(each), each) for each in alive_at(program, place)]
    sizes: Counter[tuple[BytesRole, int, str]] = Counter()
    counts: Counter[tuple[BytesRole, int, str]] = Counter()
    for (role, kind), each in told:
        sizes[role, kind, each.tier] += each.nbytes
        counts[role, kind, each.tier] += 1
    order = [*BytesRole]
    tensors = [(role, kind, each) for (role, kind), each in told if each.dtype]
    ranked = sorted(tensors, key=lambda item: (-item[2].nbytes, item[2].maker, item[2].name))
    return Peak(
        nbytes=trace.peak_bytes,
        place=place,
        at_s=next((point.end_s for point in trace.memory if point.step == place[0]), 0.0),
        roles=tuple(
            RoleBytes(role=key[0], kind=key[1], tier=key[2], nbytes=sizes[key], count=counts[key])
            for key in sorted(sizes, key=lambda key: (key[2], order.index(key[0]), key[1]))
        ),
        tensors=tuple(_tensor(*item) for item in ranked),
        rounding_bytes=sum(-each.nbytes % CUDA_BLOCK_BYTES for _, _, each in tensors if not each.tier)
        if backend == "cuda"
        else 0,
    )


def _tensor(role: BytesRole, kind: int, each: Alive) -> Tensor:
    held = bool(each.names) and role not in _ACTIVATIONS
    holder = next((name for name in each.names if held or str(name) == each.name), None)
    return Tensor(
        name=each.name if holder is None else str(holder),
        holder=holder,
        others=len(each.names) - 1 if held else 0,
        role=role,
        kind=kind,
        tier=each.tier,
        nbytes=each.nbytes,
        dtype=each.dtype,
        shape=each.shape,
        maker=each.maker,
        reader=each.reader,
        out=each.out,
    )


class _Roles:
    """Finds roles."""

    def __init__(self, program: RankProgram, model: Program) -> None:
        self.program, self.model, self.graphs = program, model, graph_of_block(model)

    def of(self, each: Alive) -> tuple[BytesRole, int]:
        """A storage's role, and the kind whose activation it is."""
        if not each.dtype:
            return {STATES: BytesRole.STATES, WORKSPACE: BytesRole.WORKSPACE}[each.name], -1
        for name in each.names:
            if name in self.program.outer:
                return _BEFORE[name.role], -1
        at, instr = each.maker
        step = self.program.steps[at] if at >= 0 else None
        if step is None:
            return BytesRole.OTHER, -1
        kind = self.model.segments[step.segment].kind if step.segment >= 0 else -1
        if step.kind in MESSAGES:
            return BytesRole.MESSAGES, -1
        held = self._held(each)
        if held in _HELD:
            return held, -1
        role = self._made(each, step, self.program.blocks[step.block].instrs[instr], held)
        return role, -1 if role in (BytesRole.COMMUNICATION, BytesRole.GATHERED, BytesRole.OTHER) else kind

    def _held(self, each: Alive) -> BytesRole | None:
        """What the names that hold it say; a plain one is a value that a segment hands on."""
        for name in each.names:
            if name.role in _MADE:
                return _MADE[name.role]
            if name.role is Role.VALUE and name.transit is Transit.NONE:
                return BytesRole.BOUNDARY
        return None

    def _made(self, each: Alive, step: Step, instr: Instr, held: BytesRole | None) -> BytesRole:
        """What its maker says, where its holders leave it open."""
        does = self.program.role_of(step)
        backward = does in BACKWARDS
        if instr.kind is InstrKind.COPY and (step.segment < 0 or does is BlockRole.FETCH):
            return BytesRole.MASTERS if step.segment < 0 else BytesRole.GATHERED
        if instr.kind is InstrKind.COPY:
            return BytesRole.SAVED if each.tier else BytesRole.FETCHED
        if held is not None and step.segment >= 0:
            return held
        if each.backward and not backward and step.segment >= 0:
            return BytesRole.SAVED
        if instr.kind is InstrKind.COLLECTIVE or instr.target == _BUNDLE:
            return BytesRole.GATHERED if self._moves_parameter(step, instr) else BytesRole.COMMUNICATION
        op = self._op(step, instr)
        if step.segment < 0:
            return BytesRole.OTHER
        if op is None:
            return BytesRole.BACKWARD if backward else BytesRole.FORWARD
        if op.phase is Phase.BACKWARD:
            return BytesRole.BACKWARD
        return BytesRole.RECOMPUTED if backward else BytesRole.FORWARD

    def _op(self, step: Step, instr: Instr) -> Op | None:
        """The joint graph's op an instruction serves."""
        graph = self.graphs(self.program.blocks[step.block])
        return graph.ops[instr.origin] if graph is not None and 0 <= instr.origin < len(graph.ops) else None

    def _moves_parameter(self, step: Step, instr: Instr) -> bool:
        """Whether a collective is given a parameter as it is stored."""
        inputs = self.program.blocks[step.block].inputs
        given = dict(zip(inputs, step.args, strict=True))
        names = [given[name] for name in refs(instr.args) if name in given]
        return any(name in self.program.outer and name.role is Role.PARAMETER for name in names)
