"""A rank's program as ops and storages: the memory problem of what would be executed.

Blocks are laid end to end in the order of the steps. A tensor is a storage: views are folded into the value that owns
it, and instructions that only make views vanish. Storages that outlive the step on both sides (parameters, states,
buffers, the optimizer's) are `base_bytes`; those there before it that the program gives up are given; those it leaves
behind are kept. The update is one op that reads all gradients.

What is written in place must not be made again: the maker of an accumulator that grows, and every op that read a
parameter or buffer before it was overwritten and is needed after. Limits: one device (a collective of one rank is
nothing; others are refused).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paraplan.cost_models.blocks import BEGIN, MemoryBlock
from paraplan.cost_models.costs import Costs
from paraplan.cost_models.simulate import RankEngine
from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.graph import refs
from paraplan.ir.rank_program import Instr, InstrKind, RankProgram, Step, StepKind
from paraplan.planner.memory.problem import GIVEN, MemOp, MemoryProblem, MemTensor
from paraplan.planner.memory.schedule import Actions, MemAction, free, run


@dataclass(frozen=True)
class Flattened:
    """A program flattened.

    Attributes:
        problem: its ops and storages.
        actions: the program's own order, each storage freed where the program lets go of it.
        places: per op, (step, instruction) of the program; the instruction is -1 for what is no block's.
    """

    problem: MemoryProblem
    actions: Actions
    places: tuple[tuple[int, int], ...]


def flatten(program: RankProgram, costs: Costs) -> Flattened:
    """The memory problem of a rank's program, timed as the simulator times it.

    Raises:
        InvalidPlanError: the program communicates.
    """
    walk = _Walk(program, costs)
    for index, step in enumerate(program.steps):
        walk.take(index, step)
    return walk.finish()


class _Storage:
    """Bytes with a number; `names` counts the outer names that hold them."""

    def __init__(self, number: int, nbytes: int, maker: int) -> None:
        self.number, self.nbytes, self.maker, self.names = number, nbytes, maker, 0


class _Walk:
    """The outer namespace while the steps are taken in order."""

    def __init__(self, program: RankProgram, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.engine = RankEngine(program, costs)
        self.blocks = {name: MemoryBlock(block) for name, block in program.blocks.items()}
        self.storages: list[_Storage] = []
        self.outer: dict[str, _Storage] = {}
        self.ops: list[MemOp] = []
        self.places: list[tuple[int, int]] = []
        self.actions: list[MemAction] = []
        self.writes: list[tuple[int, int]] = []  # (op, storage it overwrites)
        self.index = 0
        for name, value in program.outer.items():
            self._bind(name, self._storage(value.nbytes, GIVEN))

    def take(self, index: int, step: Step) -> None:
        """One step, and what the simulator takes it to last."""
        self.index = index
        before = self.engine.time.end_s
        if step.kind is not StepKind.CALL:
            self.engine.advance()
        seconds = self.engine.time.end_s - before
        if step.kind is StepKind.CALL:
            self._call(step)
            self.engine.advance()
        elif step.kind is StepKind.ACCUMULATE:
            self._accumulate(step, seconds)
        else:
            if step.kind is StepKind.UPDATE:
                self._update(seconds)
            for name in step.drops:
                self._give_up(name)

    def _storage(self, nbytes: int, maker: int) -> _Storage:
        self.storages.append(_Storage(len(self.storages), nbytes, maker))
        return self.storages[-1]

    def _bind(self, name: str, storage: _Storage) -> None:
        storage.names += 1
        if name in self.outer:
            self._give_up(name)
        self.outer[name] = storage

    def _give_up(self, name: str) -> None:
        storage = self.outer.pop(name)
        storage.names -= 1
        if not storage.names:
            self.actions.append(free(storage.number))

    def _op(self, name: str, seconds: float, reads: list[int], makes: list[int], place: int, workspace: int) -> None:
        backward = "B" in self.program.steps[self.index].action
        there = tuple(sorted(set(reads) - set(makes)))
        self.ops.append(MemOp(name, seconds, there, tuple(makes), workspace, backward=backward))
        self.places.append((self.index, place))
        self.actions.append(run(len(self.ops) - 1))

    def _call(self, step: Step) -> None:
        block = self.blocks[step.block]
        local = {name: self.outer[arg] for name, arg in zip(block.block.inputs, step.args, strict=True)}
        inputs = frozenset(local)
        for name in step.drops:
            storage = self.outer.pop(name)
            storage.names -= 1
            if not storage.names and storage not in local.values():
                self.actions.append(free(storage.number))
        taken = [(out, name) for out, name in zip(step.outs, block.results, strict=True) if out and name]
        kept = {block.owners[name] for _, name in taken}
        held = {block.owners[name] for name in block.results if name is not None} - kept
        ends: dict[int, list[str]] = {}
        for owner in dict.fromkeys(block.owners.values()):
            last = len(block.block.instrs) if owner in held else block.last_hold[owner]
            ends.setdefault(min(last, len(block.block.instrs)), []).append(owner)
        stays = {id(local[owner]) for owner in kept if owner in inputs}
        dead: set[int] = set()

        def let_go(instr: int) -> None:
            for owner in ends.get(instr, ()):
                storage = local[owner]
                later = any(local.get(o) is storage for at, owners in ends.items() if at > instr for o in owners)
                if owner not in kept and not storage.names and not later and id(storage) not in stays | dead:
                    dead.add(id(storage))
                    self.actions.append(free(storage.number))

        let_go(BEGIN)
        for index, instr in enumerate(block.block.instrs):
            self._instr(step, block, instr, index, local)
            let_go(index)
        let_go(len(block.block.instrs))
        for out, name in taken:
            local[block.owners[name]].names += 1
            if out in self.outer:
                self._give_up(out)
            self.outer[out] = local[block.owners[name]]

    def _instr(self, step: Step, block: MemoryBlock, instr: Instr, index: int, local: dict[str, _Storage]) -> None:
        if instr.kind is not InstrKind.OP:
            raise InvalidPlanError(
                f"step {self.index} ({step.action}), block {step.block}[{index}]: {instr.target} communicates "
                "or copies; memory is planned for the program of one device that keeps everything"
            )
        owners = block.owners
        reads = [local[owners[name]].number for name in refs((instr.args, tuple(instr.kwargs.values())))]
        seconds = self.costs.instr_s(block.block, instr)
        makes = []
        for owner, nbytes in block.fresh[index]:
            local[owner] = self._storage(nbytes, len(self.ops))
            makes.append(local[owner].number)
        effect = not any(instr.outs)
        if not makes and not effect and not seconds and not instr.workspace_bytes:
            return  # only views
        if effect:  # paraplan.write: into its first argument
            self.writes.append((len(self.ops), reads[0]))
        self._op(instr.target, seconds, reads, makes, index, instr.workspace_bytes)

    def _accumulate(self, step: Step, seconds: float) -> None:
        total, addend = step.args
        if total not in self.outer:
            self._bind(total, self.outer[addend])
        else:
            into = self.outer[total].number
            self.writes.append((len(self.ops), into))
            self._op("accumulate", seconds, [into, self.outer[addend].number], [], -1, 0)
        for name in dict.fromkeys((addend, *step.drops)):
            self._give_up(name)

    def _update(self, seconds: float) -> None:
        grads = [self.outer[name].number for name in self.program.grads.values() if name in self.outer]
        for value in self.program.outer:
            if value in self.outer and self.program.outer[value].role in ("param", "state"):
                self.writes.append((len(self.ops), self.outer[value].number))
        self._op("update", seconds, grads, [], -1, self.program.update_workspace_bytes)

    def finish(self) -> Flattened:
        """The problem: storages that were there before and are after it become the base."""
        alive = {storage.number for storage in self.outer.values()}
        base = [storage for storage in self.storages if storage.maker == GIVEN and storage.number in alive]
        fixed = {storage.number for storage in base}
        number = {
            storage.number: place for place, storage in enumerate(s for s in self.storages if s.number not in fixed)
        }
        once = frozenset(self._not_again())
        ops = tuple(
            MemOp(op.name, op.time_s, tuple(number[t] for t in op.reads if t in number),
                  tuple(number[t] for t in op.makes), op.workspace_bytes, index not in once, op.backward)
            for index, op in enumerate(self.ops)
        )  # fmt: skip
        tensors = tuple(MemTensor(s.nbytes, s.maker, s.number in alive) for s in self.storages if s.number in number)
        base_bytes = self.program.optimizer_bytes + sum(storage.nbytes for storage in base)
        actions = tuple(a if a.act.value == "R" else free(number[a.index]) for a in self.actions)
        return Flattened(MemoryProblem(ops, tensors, base_bytes), actions, tuple(self.places))

    def _not_again(self) -> Iterator[int]:
        """Ops that must not be executed twice: also what makes a thing left behind, lest it be made after an update."""
        once = {storage.maker for storage in self.outer.values() if storage.maker != GIVEN}
        written: dict[int, set[int]] = {}
        for at, storage in self.writes:
            once |= {at} | {self.storages[storage].maker} - {GIVEN}
            written.setdefault(at, set()).add(storage)
        yield from once
        for at, storages in written.items():
            needed = {tensor for op in self.ops[at + 1 :] for tensor in op.reads}
            for index in range(at - 1, -1, -1):
                if index not in once and not needed.isdisjoint(self.ops[index].makes):
                    needed.update(self.ops[index].reads)
                    if not storages.isdisjoint(self.ops[index].reads):
                        yield index
