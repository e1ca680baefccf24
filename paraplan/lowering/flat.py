"""A rank's program as ops, storages and values: what a memory schedule numbers, and what can be put in another order.

Blocks are laid end to end in the order of the steps. An instruction that makes a storage, writes into one or needs
workspace is an op; so are the ACCUMULATEs that add, and the UPDATE. An instruction that only makes views is none: views
belong to the storage they lie in. Storages that outlive the step on both sides (parameters, states, buffers, the batch)
are the base; the others are its *tensors*, numbered in the order they come into being.

What is written in place must not be made again: the maker of an accumulator that grows, and every op that read a
storage before it was overwritten and is needed after. Limits: one
device that keeps everything on itself (collectives and copies are refused).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.memory_actions import Actions, MemAction, free, run
from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.names import inside, saved
from paraplan.ir.execution.rank_program import MESSAGES, Instr, InstrKind, LocalValue, RankProgram, Step, StepKind
from paraplan.ir.execution.schedule import ActionKind
from paraplan.ir.model.graph import refs, writes_first
from paraplan.ir.model.storages import BEGIN, BlockStorages

GIVEN = -1
"""The maker of what is there before the step."""


@dataclass(frozen=True)
class FlatOp:
    """Something executed.

    Attributes:
        name: its target; "accumulate" and "update" for those steps.
        step, instr: its place in the program; instr is -1 for what is no block's.
        reads, makes, writes: storages read (and there before), made, and written in place (also among `reads` unless
            no op depends on what they held).
        workspace_bytes: the most it allocates and drops inside.
        repeatable: whether it may be executed more than once.
        backward: whether it belongs to the backward.
    """

    name: str
    step: int
    instr: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    workspace_bytes: int
    repeatable: bool
    backward: bool


@dataclass(frozen=True)
class FlatStorage:
    """Bytes with a maker (an op, or GIVEN); `kept`: alive after the step; `tensor`: its number, -1 in the base."""

    nbytes: int
    maker: int
    kept: bool
    tensor: int


@dataclass(frozen=True)
class FlatValue:
    """A tensor lying in a storage.

    Attributes:
        storage: which.
        local: how it lies; None where no block has seen it.
        step, instr: the instruction that makes it; (-1, -1) for what is given.
        solid: whether that instruction makes a storage; what it does not, only views, can be made again at will.
        label: its outer name where it has one, else what that would be.
    """

    storage: int
    local: LocalValue | None
    step: int
    instr: int
    solid: bool
    label: Name


@dataclass(frozen=True)
class FlatProgram:
    """A program flattened.

    Attributes:
        ops, storages, values: by number.
        tensors: per tensor, its storage.
        names: per CALL, what its local names stand for; empty of other steps.
        outer: per other step, what its outer names stand for; empty of a CALL.
        given, results: outer names before and after the step, likewise.
        base_bytes: always there.
        actions: the program's own order, each tensor freed where the program lets go of it.
    """

    ops: tuple[FlatOp, ...]
    storages: tuple[FlatStorage, ...]
    values: tuple[FlatValue, ...]
    tensors: tuple[int, ...]
    names: tuple[dict[str, int], ...]
    outer: tuple[dict[Name, int], ...]
    given: dict[Name, int]
    results: dict[Name, int]
    base_bytes: int
    actions: Actions


def flatten(program: RankProgram) -> FlatProgram:
    """A rank's program as ops and storages.

    Raises:
        InvalidPlanError: the program communicates.
    """
    walk = _Walk(program)
    for index, step in enumerate(program.steps):
        walk.take(index, step)
    return walk.finish()


class _Storage:
    """Bytes with a number; `names` counts the outer names that hold them."""

    def __init__(self, number: int, nbytes: int, maker: int) -> None:
        self.number, self.nbytes, self.maker, self.names = number, nbytes, maker, 0


class _Walk:
    """The outer namespace while the steps are taken in order."""

    def __init__(self, program: RankProgram) -> None:
        self.program = program
        self.blocks = {name: BlockStorages(block) for name, block in program.blocks.items()}
        self.storages: list[_Storage] = []
        self.values: list[FlatValue] = []
        self.labels: list[Name] = []
        self.outer: dict[Name, int] = {}
        self.names: list[dict[str, int]] = []
        self.read: list[dict[Name, int]] = []
        self.ops: list[FlatOp] = []
        self.actions: list[MemAction] = []
        self.index = 0
        for name, value in program.outer.items():
            self._bind(name, self._value(self._storage(value.nbytes, GIVEN), None, -1, True, name))
        self.given = dict(self.outer)

    def take(self, index: int, step: Step) -> None:
        """One step."""
        self.index = index
        if step.kind in MESSAGES:
            raise InvalidPlanError(
                f"step {index} ({step.action}): {step.kind.value} is a message; memory is planned for one device"
            )
        if step.kind is StepKind.CALL:
            self._call(step)
        elif step.kind is StepKind.ACCUMULATE:
            self._accumulate(step)
        else:
            grads = [name for name in self.program.grads.values() if name in self.outer]
            self._takes({}, {name: self.outer[name] for name in grads} if step.kind is StepKind.UPDATE else {})
            if step.kind is StepKind.UPDATE:
                self._update()
            for name in step.drops:
                self._give_up(name)

    def _takes(self, names: dict[str, int], read: dict[Name, int]) -> None:
        self.names.append(names)
        self.read.append(read)

    def _storage(self, nbytes: int, maker: int) -> _Storage:
        self.storages.append(_Storage(len(self.storages), nbytes, maker))
        return self.storages[-1]

    def _value(self, storage: _Storage, local: LocalValue | None, instr: int, solid: bool, label: Name) -> int:
        step = -1 if instr < 0 else self.index
        self.values.append(FlatValue(storage.number, local, step, instr, solid, label))
        self.labels.append(label)
        return len(self.values) - 1

    def _of(self, value: int) -> _Storage:
        return self.storages[self.values[value].storage]

    def _bind(self, name: Name, value: int) -> None:
        self._of(value).names += 1
        if name in self.outer:
            self._give_up(name)
        self.outer[name] = value
        self.labels[value] = name

    def _give_up(self, name: Name) -> None:
        storage = self._of(self.outer.pop(name))
        storage.names -= 1
        if not storage.names:
            self.actions.append(free(storage.number))

    def _op(self, name: str, instr: int, reads: list[int], makes: list[int], writes: list[int], workspace: int) -> None:
        backward = self.program.steps[self.index].phase is ActionKind.B
        there = tuple(sorted(set(reads) - set(makes)))
        self.ops.append(FlatOp(name, self.index, instr, there, tuple(makes), tuple(writes), workspace, True, backward))
        self.actions.append(run(len(self.ops) - 1))

    def _call(self, step: Step) -> None:
        block = self.blocks[step.block]
        names = {name: self.outer[arg] for name, arg in zip(block.block.inputs, step.args, strict=True)}
        self._takes(names, {})
        held = {name: self._of(value) for name, value in names.items()}
        for given in step.drops:
            storage = self._of(self.outer.pop(given))
            storage.names -= 1
            if not storage.names and storage not in held.values():
                self.actions.append(free(storage.number))
        taken = [(out, name) for out, name in zip(step.outs, block.results, strict=True) if out is not None and name]
        ends = _Ends(block, held, {block.owners[name] for _, name in taken})
        self.actions += map(free, ends.after(BEGIN))
        for index, instr in enumerate(block.block.instrs):
            self._instr(step, block, instr, index, held, names)
            self.actions += map(free, ends.after(index))
        self.actions += map(free, ends.after(len(block.block.instrs)))
        for _, name in taken:
            held[block.owners[name]].names += 1
        for out, name in taken:
            self._bind(out, names[name])
            held[block.owners[name]].names -= 1

    def _instr(
        self,
        step: Step,
        block: BlockStorages,
        instr: Instr,
        index: int,
        held: dict[str, _Storage],
        names: dict[str, int],
    ) -> None:
        where = f"step {self.index} ({step.action}), block {step.block}[{index}]: {instr.target}"
        if instr.kind is not InstrKind.OP:
            raise InvalidPlanError(
                f"{where} communicates or copies; memory is planned for the program of one device that keeps everything"
            )
        owners = block.owners
        reads = [held[owners[name]].number for name in refs((instr.args, tuple(instr.kwargs.values())))]
        for owner, nbytes in block.fresh[index]:
            held[owner] = self._storage(nbytes, len(self.ops))
        makes = [held[owner].number for owner, _ in block.fresh[index]]
        m = max(step.microbatch, 0)
        for out in instr.outs:
            if out is not None:
                label = saved(step.segment, out, m) if step.segment >= 0 else inside(step.block, out, m)
                names[out] = self._value(held[owners[out]], block.block.values[out], index, bool(makes), label)
        effect = not any(instr.outs)  # paraplan.write: into its first argument
        if writes_first(instr.target) and not effect:
            raise InvalidPlanError(f"{where} writes in place what it also returns; such a program is not put in order")
        if makes or effect or instr.workspace_bytes:
            self._op(instr.target, index, reads, makes, reads[:1] if effect else [], instr.workspace_bytes)

    def _accumulate(self, step: Step) -> None:
        total, addend = step.args
        moved = total not in self.outer
        self._takes({}, {name: self.outer[name] for name in step.args if name in self.outer})
        if moved:
            self._bind(total, self.outer[addend])
        else:
            into = self._of(self.outer[total]).number
            self._op("accumulate", -1, [into, self._of(self.outer[addend]).number], [], [into], 0)
        for name in dict.fromkeys((addend, *step.drops)):
            self._give_up(name)

    def _update(self) -> None:
        grads = [self._of(value).number for value in self.read[-1].values()]
        written = [
            self._of(self.outer[name]).number
            for name, value in self.program.outer.items()
            if name in self.outer and value.role in (Role.PARAMETER, Role.STATE)
        ]
        self._op("update", -1, grads, [], written, self.program.update_workspace_bytes)

    def finish(self) -> FlatProgram:
        """Storages that were there before and are after it become the base."""
        alive = {self.values[value].storage for value in self.outer.values()}
        fixed = {s.number for s in self.storages if s.maker == GIVEN and s.number in alive}
        tensors = tuple(storage.number for storage in self.storages if storage.number not in fixed)
        number = {storage: place for place, storage in enumerate(tensors)}
        once = frozenset(self._not_again(alive))
        ops = tuple(
            FlatOp(
                op.name,
                op.step,
                op.instr,
                op.reads,
                op.makes,
                op.writes,
                op.workspace_bytes,
                index not in once,
                op.backward,
            )
            for index, op in enumerate(self.ops)
        )
        storages = tuple(
            FlatStorage(s.nbytes, s.maker, s.number in alive, number.get(s.number, -1)) for s in self.storages
        )
        values = tuple(
            FlatValue(value.storage, value.local, value.step, value.instr, value.solid, label)
            for value, label in zip(self.values, self.labels, strict=True)
        )
        base_bytes = self.program.optimizer_bytes + sum(self.storages[storage].nbytes for storage in fixed)
        actions = tuple(a if a.act.value == "R" else free(number[a.index]) for a in self.actions)
        return FlatProgram(
            ops,
            storages,
            values,
            tensors,
            tuple(self.names),
            tuple(self.read),
            self.given,
            dict(self.outer),
            base_bytes,
            actions,
        )

    def _not_again(self, alive: set[int]) -> Iterator[int]:
        """Ops that must not be executed twice: also what makes a thing left behind, lest it be made after an update."""
        once = {self.storages[storage].maker for storage in alive} - {GIVEN}
        writers = [(at, op) for at, op in enumerate(self.ops) if op.writes]
        for at, op in writers:
            once |= {at, *(self.storages[storage].maker for storage in op.writes)} - {GIVEN}
        yield from once
        for at, op in writers:
            needed = {storage for later in self.ops[at + 1 :] for storage in later.reads}
            for index in range(at - 1, -1, -1):
                if index not in once and not needed.isdisjoint(self.ops[index].makes):
                    needed.update(self.ops[index].reads)
                    if not set(op.writes).isdisjoint(self.ops[index].reads):
                        yield index


class _Ends:
    """Where a call lets go of the storages it holds; `held` grows while its instructions are taken."""

    def __init__(self, block: BlockStorages, held: dict[str, _Storage], kept: set[str]) -> None:
        self.held, self.kept = held, kept
        end = len(block.block.instrs)
        results = {block.owners[name] for name in block.results if name is not None} - kept
        self.at: dict[int, list[str]] = {}
        for owner in dict.fromkeys(block.owners.values()):
            last = end if owner in results else block.last_hold[owner]
            self.at.setdefault(min(last, end), []).append(owner)
        inputs = frozenset(block.block.inputs)
        self.gone = {held[owner].number for owner in kept if owner in inputs}

    def after(self, instr: int) -> Iterator[int]:
        """Storages that die after an instruction."""
        for owner in self.at.get(instr, ()):
            storage = self.held[owner]
            later = any(self.held.get(o) is storage for at, owners in self.at.items() if at > instr for o in owners)
            if owner not in self.kept and not storage.names and not later and storage.number not in self.gone:
                self.gone.add(storage.number)
                yield storage.number
