"""What is alive on a rank at one instant of its step: every storage, who made it and who reads it next.

The instant is a step of the program and an instruction of its block. The account is `MemoryWalk`'s and `MemoryBlock`'s,
which have the bytes; this keeps the storages behind them, so the bytes of what is alive at a trace's peak add up to the
peak, and those of any instant to what the simulator has there. What has no storage of its own counts as one line each:
the optimizer's states and the workspace of what runs.

Limits: as `memory`'s. A reader is the next instruction that names the tensor or a view of it, be it a copy or a wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paraplan.cost_models.simulator.block_replay import MemoryBlock
from paraplan.cost_models.simulator.live_bytes import MemoryWalk
from paraplan.cost_models.simulator.step_memory import HeldTensor, StepMemory, Storage
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import BACKWARDS, RankProgram, Step, StepKind
from paraplan.ir.model.graph import refs

Place = tuple[int, int]
"""(step, instruction of its block); -1 for a step that is no call, and for before the step."""

BEFORE: Place = (-1, -1)
STATES, WORKSPACE = "optimizer states", "workspace"
"""What `Alive.name` calls bytes without a tensor."""


@dataclass
class Alive:
    """A storage that is alive.

    Attributes:
        name: what its owner is called by the block that makes it; the text of an outer name where none does.
        nbytes, tier: of the storage.
        dtype, shape: of the tensor that owns it; "" for bytes without one.
        names: outer names that hold it, or will after the running call.
        maker: where it was made; BEFORE for what is there before the step.
        out: which output of its maker.
        reader: where it is read next, the running instruction included; None: not again in this step.
        backward: whether a block of the backward is given it in a later step than its maker's, now or later.
    """

    name: str
    nbytes: int
    tier: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    names: tuple[Name, ...] = ()
    maker: Place = BEFORE
    out: int = 0
    reader: Place | None = None
    backward: bool = False


@dataclass
class _Census:
    """A walk that remembers who made what."""

    program: RankProgram
    walk: MemoryWalk = field(init=False)
    made: dict[Storage, tuple[str, Place, int]] = field(default_factory=dict)
    uses: dict[str, _Uses] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.walk = MemoryWalk(self.program)

    def holders(self) -> dict[Storage, list[Name]]:
        """Outer names of every storage."""
        found: dict[Storage, list[Name]] = {}
        for name, held in self.walk.outer.items():
            found.setdefault(held.storage, []).append(name)
        return found

    def advance(self, index: int) -> StepMemory:
        """Take a step and note what it made."""
        step = self.program.steps[index]
        memory = self.walk.advance(step)
        if step.kind is StepKind.CALL:
            block = self.walk.blocks[step.block]
            makers = self.used(step.block).makers
            bound = dict(zip(step.outs, block.results, strict=True))  # of a name given twice, the last
            for name, local in bound.items():
                if name is not None and local is not None and (owner := block.owners[local]) in makers:
                    instr, out = makers[owner]
                    self.made.setdefault(self.walk.outer[name].storage, (owner, (index, instr), out))
        elif memory.made:
            for name in step.outs:
                if name is not None:
                    self.made.setdefault(self.walk.outer[name].storage, (str(name), (index, -1), 0))
        return memory

    def used(self, block: str) -> _Uses:
        """Makers and readers inside a block."""
        if block not in self.uses:
            self.uses[block] = _Uses.of(self.walk.blocks[block])
        return self.uses[block]

    def alive(self, storage: Storage, names: list[Name], held: HeldTensor) -> Alive:
        """A storage of the outer namespace."""
        name, place, out = self.made.get(storage, (str(names[0]), BEFORE, 0))
        if place[1] >= 0:
            value = self.walk.blocks[self.program.steps[place[0]].block].block.values[name]
            dtype, shape = value.dtype, value.shape
        else:
            dtype, shape = held.dtype, held.shape
        return Alive(name, storage.nbytes, storage.tier, dtype, shape, tuple(names), place, out)


@dataclass
class _Uses:
    """Per owner of a storage in a block: (instruction, output) that makes it, and instructions that name it."""

    makers: dict[str, tuple[int, int]]
    readers: dict[str, list[int]]

    @staticmethod
    def of(block: MemoryBlock) -> _Uses:
        makers: dict[str, tuple[int, int]] = {}
        readers: dict[str, list[int]] = {}
        for index, instr in enumerate(block.block.instrs):
            for name in refs((instr.args, tuple(instr.kwargs.values()))):
                readers.setdefault(block.owners[name], []).append(index)
            for position, out in enumerate(instr.outs):
                if out is not None and block.owners[out] == out:
                    makers[out] = (index, position)
        return _Uses(makers, readers)


def alive_at(program: RankProgram, place: Place) -> tuple[Alive, ...]:
    """Everything alive at an instant, tiers included, in the order it came to be.

    Args:
        program: what the rank runs.
        place: a step, and an instruction of its block whose results and workspace then exist, but nothing it frees has
            gone; -1 for a call: before it. Of SEND, RECV and UPDATE: what they make exists. BEFORE: before the step.
    Raises:
        CostModelError: the program names what does not exist.
    """
    at, inside = place
    census = _Census(program)
    for index in range(max(at, 0)):
        census.advance(index)
    found: dict[Storage, Alive] = {
        storage: census.alive(storage, names, census.walk.outer[names[0]])
        for storage, names in census.holders().items()
        if storage.nbytes
    }
    states = [(tier, program.update_bytes(tier)[0]) for tier in ("", *program.update_tiers)]
    extra = [Alive(STATES, size, tier) for tier, size in states if size]
    inner: list[Alive] = []
    begun = max(at, 0)
    if at >= 0 and (inside >= 0 or program.steps[at].kind is not StepKind.CALL):
        found, inner, workspace, tier = _running(census, place, found)
        begun = at + 1
        if workspace:
            extra.append(Alive(WORKSPACE, workspace, tier, maker=place))
    _find_readers(census, begun, found)
    order = sorted((*found.values(), *inner), key=lambda each: each.maker)
    return (*order, *extra)


def _running(
    census: _Census, place: Place, before: dict[Storage, Alive]
) -> tuple[dict[Storage, Alive], list[Alive], int, str]:
    """Take the step in which the instant is: storages it leaves or found, those that end in it, workspace, its tier."""
    at, inside = place
    step = census.program.steps[at]
    given = _given(census, step)
    memory = census.advance(at)
    if step.kind is not StepKind.CALL:
        found = dict(before)
        for storage, names in census.holders().items():
            if storage not in found and storage.nbytes:
                found[storage] = census.alive(storage, names, census.walk.outer[names[0]])
        _read_by_step(step, at, found, given)
        if step.kind is not StepKind.UPDATE:
            return found, [], 0, ""
        tier = census.program.update_tier(step)
        return found, [], census.program.update_workspace(step), tier
    block, uses = census.walk.blocks[step.block], census.used(step.block)
    made, ended = block.ends(memory.args, tuple(name is not None for name in step.outs))
    passed = set(given)
    dead = {given[index] for index, last in ended.items() if last < inside}
    found = {}
    for storage, each in before.items():
        gone = storage not in passed and set(each.names) <= set(step.drops)
        if storage not in dead and not gone:
            found[storage] = each
    for index, storage in enumerate(given):
        if storage in found:
            _read(found[storage], uses, block.block.inputs[index], at, inside)
            found[storage].backward = found[storage].backward or census.program.role_of(step) in BACKWARDS
    left = {made_by[0]: storage for storage, made_by in census.made.items() if made_by[1][0] == at}
    holders = census.holders()
    inner: list[Alive] = []
    for owner, (instr, out) in uses.makers.items():
        value = block.block.values[owner]
        if instr > inside or not value.storage_bytes or made.get(owner, inside) < inside:
            continue
        by = tuple(holders[left[owner]]) if owner in left else ()
        each = Alive(owner, value.storage_bytes, value.tier, value.dtype, value.shape, by, (at, instr), out)
        _read(each, uses, owner, at, inside)
        if owner in left:
            found[left[owner]] = each
        else:
            inner.append(each)
    return found, inner, block.block.instrs[inside].workspace_bytes, ""


def _given(census: _Census, step: Step) -> list[Storage]:
    """Storages of a step's arguments that there are; an UPDATE reads the gradients too."""
    names = (*step.args, *(census.program.grads.values() if step.kind is StepKind.UPDATE else ()))
    return [census.walk.outer[name].storage for name in names if name in census.walk.outer]


def _read(each: Alive, uses: _Uses, owner: str, at: int, start: int) -> None:
    """Note the first instruction from `start` on that reads a storage."""
    index = next((index for index in uses.readers.get(owner, ()) if index >= start), None)
    if index is not None and (each.reader is None or (at, index) < each.reader):
        each.reader = (at, index)


def _read_by_step(step: Step, at: int, found: dict[Storage, Alive], given: list[Storage]) -> None:
    """Note what a step that is no call reads: an ACCUMULATE that only moves does not."""
    if step.kind is StepKind.DROP or (step.kind is StepKind.ACCUMULATE and len(given) < len(step.args)):
        return
    for storage in given:
        each = found.get(storage)
        if each is not None and each.reader is None:
            each.reader = (at, -1)


def _find_readers(census: _Census, begin: int, found: dict[Storage, Alive]) -> None:
    """Take the rest of the step, noting who reads what is alive."""
    program = census.program
    for index in range(begin, len(program.steps)):
        step = program.steps[index]
        outer = census.walk.outer
        if step.kind is StepKind.CALL:
            uses, back = census.used(step.block), program.role_of(step) in BACKWARDS
            inputs = census.walk.blocks[step.block].block.inputs
            for name, local in zip(step.args, inputs, strict=True):
                each = found.get(outer[name].storage)
                if each is not None and local in uses.readers:
                    _read(each, uses, local, index, 0)
                    each.backward = each.backward or (back and each.maker[0] < index)
        else:
            _read_by_step(step, index, found, _given(census, step))
        census.advance(index)
