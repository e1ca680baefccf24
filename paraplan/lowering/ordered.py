"""A rank's program in the order of a memory schedule: another program, of the same kinds of instructions.

Actions are taken one by one. An op executed again makes its results under fresh names; views are made again, without
cost, by the block that needs them; a tensor freed right after an op that touches it is freed by that instruction, and
one freed later by a DROP. ACCUMULATE, UPDATE and DROP stay steps. Between them there is one block per CALL of the
given program, named after it: its instructions, and before and among them whatever is executed again for them. What
blocks leave to later ones goes through the outer namespace.

O and B become copies, as instructions: issued where the action is, waited for by the F of what leaves and by the first
reader of what comes back, at the latest at the step's end.

So whoever prices or runs the result knows nothing of schedules, and its peak is that of the actions to the byte: the
bytes alive change exactly where they run and free. Random ops draw the same numbers again, for their seed and index
are arguments (rank-dependent offsets become numbers, as there is one rank). Limits: one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paraplan.ir.execution.memory_actions import Act, MemAction
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import Instr, InstrKind, LocalValue, RankProgram, Step, StepKind
from paraplan.lowering.block_writer import BlockWriter, ValueNames
from paraplan.lowering.flat import FlatOp, FlatProgram, flatten
from paraplan.lowering.replay import check_actions
from paraplan.lowering.transfers.copies import dense_copy


def order_program(program: RankProgram, actions: Sequence[MemAction]) -> RankProgram:
    """The program with its instructions in the order of a memory schedule.

    Raises:
        InvalidPlanError: the schedule is not one of this program, or the program communicates.
    """
    flat = flatten(program)
    check_actions(flat, actions)
    order = _Order(program, flat, actions)
    for position, action in enumerate(actions):
        if action.act is Act.RUN:
            order.run(flat.ops[action.index], position)
        elif action.act is Act.FREE:
            order.free(flat.tensors[action.index])
        elif action.act is Act.OUT:
            order.out(flat.tensors[action.index], action.tier, position)
        else:
            order.back(flat.tensors[action.index], position)
    return order.finish()


class _Order(BlockWriter):
    """Takes actions one by one."""

    def __init__(self, program: RankProgram, flat: FlatProgram, actions: Sequence[MemAction]) -> None:
        super().__init__(program, flat)
        self.grads: dict[str, Name] = {}
        self.serves = _serves(flat, actions)
        self.actions = actions
        self.consumed: set[int] = set()  # storages an ACCUMULATE has let go of, whose F is still to come
        self.owner: dict[int, int] = {}  # per storage on a tier: the value that was copied, and which tier
        self.tier: dict[int, str] = {}
        self.leaving: dict[int, Name] = {}  # copies under way, copies there, copies back under way
        self.stored: dict[int, Name] = {}
        self.coming: dict[int, Name] = {}

    def run(self, op: FlatOp, position: int) -> None:
        """Execute an op."""
        step = self.program.steps[op.step]
        if step.kind is StepKind.CALL:
            if self.serves[position] != self.open.step:
                self._close()
            self.open.step = self.serves[position]
            self._emit(op.step, op.instr)
        elif step.kind is StepKind.ACCUMULATE:
            self._accumulate(step, op.step, position)
        else:
            self._update(step, op.step)

    def free(self, storage: int) -> None:
        """Give up a tensor: where it was last touched if that is here, else by a step of its own."""
        if storage in self.consumed:
            self.consumed.remove(storage)
            return
        if storage in self.leaving:
            self._leave(storage)
        if storage in self.coming:
            self._arrive(storage)
        here = self.open.touched.get(storage) == len(self.open.instrs) - 1 and self.open.instrs
        if not here:
            self._close()
        names = []
        for value in self.in_storage.pop(storage, []):
            name, outer = self.held.pop(value)
            if outer:
                names.append(name)
        if here:
            self.open.drops.update(dict.fromkeys(names))
        elif self.steps and self.steps[-1].kind is StepKind.DROP:
            self.steps[-1] = msgspec.structs.replace(self.steps[-1], drops=(*self.steps[-1].drops, *names))
        else:
            self._step(StepKind.DROP, self.open.step, drops=tuple(names))

    def out(self, storage: int, tier: str, position: int) -> None:
        """Begin to copy a tensor to a tier."""
        self._begin(position)
        if storage in self.coming:
            self._arrive(storage)
        if storage in self.leaving:
            self._leave(storage)
        if storage in self.stored:
            self._take(self.stored[storage], self._away(storage))
            self._lose(self.stored.pop(storage))
        self.tier[storage] = tier
        self.owner[storage] = next(value for value in self.in_storage[storage] if self.flat.values[value].solid)
        name = self._source(storage)
        issued = self._loosely(name.copied(tier), self._away(storage))
        self._copy("offload", name, tier, issued, storage)
        self.leaving[storage] = issued

    def back(self, storage: int, position: int) -> None:
        """Begin to copy a tensor back."""
        self._begin(position)
        there = self.stored[storage]
        away = self._away(storage)
        self._take(there, away)
        issued = self._loosely(there.coming(there.tier), msgspec.structs.replace(away, tier=""))
        self._copy("prefetch", there, self.tier[storage], issued, storage)
        self.coming[storage] = issued

    def _begin(self, position: int) -> None:
        if not self.open.instrs:
            self.open.step = self.serves[position]

    def _copy(self, target: str, source: Name, tier: str, out: Name, storage: int) -> None:
        self.open.touched[storage] = len(self.open.instrs)
        args = f"%{source}", f":{tier}"
        self.open.instrs.append(Instr(kind=InstrKind.COPY, target=target, args=args, outs=(str(out),)))

    def _wait(self, issued: Name, held: Name, out: Name, storage: int) -> None:
        self.open.touched[storage] = len(self.open.instrs)
        args = f"%{issued}", f"%{held}"
        self.open.instrs.append(Instr(kind=InstrKind.WAIT, target="wait", args=args, outs=(str(out),)))
        self._lose(issued)

    def _leave(self, storage: int) -> None:
        """Wait for a copy to a tier."""
        issued = self.leaving.pop(storage)
        self._take(issued, self._away(storage))
        name, tier = self._source(storage), self.tier[storage]
        lies = msgspec.structs.replace(self._away(storage), base=str(issued), storage_bytes=0)
        there = self._loosely(name.copied(tier).on(tier), lies)
        self._wait(issued, name, there, storage)
        self.stored[storage] = there

    def _arrive(self, storage: int) -> None:
        """Wait for a copy back: the value has a name again."""
        issued, there = self.coming.pop(storage), self.stored[storage]
        away = self._away(storage)
        self._take(there, away)
        self._take(issued, msgspec.structs.replace(away, tier=""))
        value = self.owner[storage]
        local = self.flat.values[value].local
        assert local is not None
        name = self._fresh(self.flat.values[value].label)
        self.open.values[str(name)] = msgspec.structs.replace(local, base=str(issued), storage_bytes=0)
        self.held[value] = ValueNames(name, False)
        self._holds(value)
        self.open.made.append(value)
        self._wait(issued, there, name, storage)

    def _there(self, value: int) -> None:
        storage = self.flat.values[value].storage
        if storage in self.coming:
            self._arrive(storage)
        super()._there(value)

    def _source(self, storage: int) -> Name:
        """The name of what is copied, in the block under way."""
        value = self.owner[storage]
        local = self.flat.values[value].local
        assert local is not None
        self._read(value, local)
        return self.held[value].name

    def _away(self, storage: int) -> LocalValue:
        """A tensor's copy on a tier, as it is issued; its base is its own name."""
        local = self.flat.values[self.owner[storage]].local
        assert local is not None
        return dense_copy(local, "", self.tier[storage])

    def _accumulate(self, step: Step, index: int, position: int) -> None:
        names = self.flat.outer[index]
        total, addend = names[step.args[0]], names[step.args[1]]
        outer = self._to_outer((total, addend))
        storage = self.flat.values[addend].storage
        kept = None if self._freed_next(storage, position) else self._alias(addend, index)
        self._step(StepKind.ACCUMULATE, index, args=tuple(outer))
        self.open.step = index
        if kept is not None:
            self.held[addend] = ValueNames(kept, True)
            return
        others = [self.held.pop(value) for value in self.in_storage.pop(storage)]
        rest = tuple(name for name, outside in others if outside and name != outer[1])
        if rest:
            self._step(StepKind.DROP, index, drops=rest)
        self.consumed.add(storage)

    def _alias(self, value: int, index: int) -> Name:
        """Another outer name of a value that has one: a view of all of it, made by a block of its own."""
        name, block = self.held[value].name, self.open
        local = self.flat.values[value].local
        assert local is not None
        alias = self._fresh(self.flat.values[value].label)
        block.step = index
        block.inputs[name] = None
        block.values = {
            str(name): msgspec.structs.replace(local, base=str(name)),
            str(alias): msgspec.structs.replace(local, base=str(name), storage_bytes=0),
        }
        block.instrs.append(Instr(target="aten.view.default", args=(f"%{name}", local.shape), outs=(str(alias),)))
        self._close(extra=(alias,))
        return alias

    def _freed_next(self, storage: int, position: int) -> bool:
        for action in self.actions[position + 1 :]:
            if action.act is not Act.FREE:
                return False
            if self.flat.tensors[action.index] == storage:
                return True
        return False

    def _update(self, step: Step, index: int) -> None:
        by_name = self.flat.outer[index]
        wanted = {param: by_name[name] for param, name in self.program.grads.items() if name in by_name}
        outer = self._to_outer(tuple(wanted.values()))
        self.grads = dict(zip(wanted, outer, strict=True))
        self._step(StepKind.UPDATE, index, args=step.args)
        self.open.step = index

    def finish(self) -> RankProgram:
        """The new program."""
        for storage in tuple(self.leaving):
            self._leave(storage)
        ends = dict.fromkeys((self.program.loss, *self.program.metrics.values()))
        results = [self.flat.results[name] for name in ends]
        self._to_outer(results)
        if self.loose:
            self._step(StepKind.DROP, self.open.step, drops=tuple(self.loose))
        called = {name: self.held[self.flat.results[name]].name for name in ends}
        return msgspec.structs.replace(
            self.program,
            blocks=self.blocks,
            steps=tuple(self.steps),
            loss=called[self.program.loss],
            metrics={name: called[outer] for name, outer in self.program.metrics.items()},
            grads=self.grads,
        )


def _serves(flat: FlatProgram, actions: Sequence[MemAction]) -> list[int]:
    """Per action, the step of the first op not yet executed that it or the next one like it executes."""
    done: set[int] = set()
    first = []
    for action in actions:
        fresh = action.act is Act.RUN and action.index not in done
        first.append(flat.ops[action.index].step if fresh else -1)
        done.update([action.index] if fresh else [])
    last = flat.ops[-1].step if flat.ops else 0
    for position in range(len(first) - 1, -1, -1):
        last = first[position] if first[position] >= 0 else last
        first[position] = last
    return first
