"""A rank's program in the order of a memory schedule: another program, of the same kinds of instructions.

Actions are taken one by one. An op executed again makes its results under fresh names; views are made again, without
cost, by the block that needs them; a tensor freed right after an op that touches it is freed by that instruction, and
one freed later by a DROP. ACCUMULATE, UPDATE and DROP stay steps. Between them there is one block per CALL of the
given program, named after it: its instructions, and before and among them whatever is executed again for them. What
blocks leave to later ones goes through the outer namespace.

So whoever prices or runs the result knows nothing of schedules, and its peak is that of the actions to the byte: the
bytes alive change exactly where they run and free. Random ops draw the same numbers again, for their seed and index
are arguments (rank-dependent offsets become numbers, as there is one rank). Limits: one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paraplan.ir.graph import Arg, map_refs, refs
from paraplan.ir.lower.finish import with_frees
from paraplan.ir.lower.flat import FlatOp, FlatProgram, flatten
from paraplan.ir.lower.replay import check_actions
from paraplan.ir.memory_actions import Act, MemAction
from paraplan.ir.rank_program import Block, Instr, LocalValue, RankProgram, Step, StepKind, offset_value


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
        else:
            order.free(flat.tensors[action.index])
    return order.finish()


class _Held(NamedTuple):
    """What a value is called: `outer` if that name is of the outer namespace, else of the block under way."""

    name: str
    outer: bool


class _Open:
    """A block under way.

    Attributes:
        step: the given program's, after which it is called.
        instrs, values: so far.
        inputs, drops: outer names it reads, and those of them (or sharing their storage) that it is given.
        touched: per storage, the last instruction that touches it.
        made: values it has given a name, in order.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.instrs: list[Instr] = []
        self.values: dict[str, LocalValue] = {}
        self.inputs: dict[str, None] = {}
        self.drops: dict[str, None] = {}
        self.touched: dict[int, int] = {}
        self.made: list[int] = []


class _Order:
    """Writes the steps of the new program."""

    def __init__(self, program: RankProgram, flat: FlatProgram, actions: Sequence[MemAction]) -> None:
        self.program, self.flat = program, flat
        self.held = {value: _Held(name, True) for name, value in flat.given.items()}
        self.in_storage: dict[int, list[int]] = {}
        for value in self.held:
            self._holds(value)
        self.used = dict.fromkeys(flat.given, 0)
        self.steps: list[Step] = []
        self.blocks: dict[str, Block] = {}
        self.grads: dict[str, str] = {}
        self.serves = _serves(flat, actions)
        self.actions = actions
        self.consumed: set[int] = set()  # storages an ACCUMULATE has let go of, whose F is still to come
        self.open = _Open(0)

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

    def _holds(self, value: int) -> None:
        self.in_storage.setdefault(self.flat.values[value].storage, []).append(value)

    def _name(self, value: int) -> str:
        """A value's name in the block under way; views are made if need be."""
        self._there(value)
        name, outer = self.held[value]
        if outer:
            self.open.inputs[name] = None
        return name

    def _there(self, value: int) -> None:
        if value not in self.held:
            of = self.flat.values[value]
            assert not of.solid, f"{of.label} is read and not there"
            self._emit(of.step, of.instr)

    def _emit(self, step: int, at: int) -> None:
        """An instruction of the given program, over the names that values have now."""
        names, instr = self.flat.names[step], self.program.blocks[self.program.steps[step].block].instrs[at]
        microbatch = max(self.program.steps[step].microbatch, 0)
        for local in refs((instr.args, tuple(instr.kwargs.values()))):
            self._read(names[local], self.program.blocks[self.program.steps[step].block].values[local])
        coordinates = (0,) * len(self.program.mesh_shape)

        def argument(arg: Arg) -> Arg:
            return _numbers(map_refs(arg, lambda local: self.held[names[local]].name), coordinates, microbatch)

        args = tuple(argument(arg) for arg in instr.args)
        kwargs = {key: argument(arg) for key, arg in instr.kwargs.items()}
        index = len(self.open.instrs)
        for local in refs((instr.args, tuple(instr.kwargs.values()))):
            self.open.touched[self.flat.values[names[local]].storage] = index
        outs = tuple(None if out is None else self._make(names[out], index) for out in instr.outs)
        kind = self.program.steps[step].block.split(".")[0]
        own = kind == self.program.steps[self.open.step].block.split(".")[0]
        self.open.instrs.append(
            msgspec.structs.replace(
                instr, args=args, kwargs=kwargs, outs=outs, frees=(), origin=instr.origin if own else -1
            )
        )

    def _read(self, value: int, local: LocalValue) -> None:
        name = self._name(value)
        if name not in self.open.values:  # an input of this block, which owns its storage there
            self.open.values[name] = msgspec.structs.replace(local, base=name)

    def _make(self, value: int, index: int) -> str | None:
        """The name of a result; None for a view that is there already."""
        of = self.flat.values[value]
        self.open.touched[of.storage] = index
        if value in self.held:
            return None
        assert of.local is not None
        count = self.used[of.label] = self.used.get(of.label, -1) + 1
        name = f"{of.label}'{count}" if count else of.label
        here = [self.held[other].name for other in self.in_storage.get(of.storage, ())]
        base = next((other for other in here if other in self.open.values), name)
        self.open.values[name] = msgspec.structs.replace(of.local, base=base)
        self.held[value] = _Held(name, False)
        self._holds(value)
        self.open.made.append(value)
        return name

    def _to_outer(self, values: Sequence[int]) -> list[str]:
        """End the block under way such that values have outer names; views of them are made if need be."""
        for value in values:
            self._there(value)
        self._close(frozenset(values))
        return [self.held[value].name for value in values]

    def _close(self, wanted: frozenset[int] = frozenset(), extra: Sequence[str] = ()) -> None:
        """Call the block under way; views nobody asked for are forgotten."""
        done, self.open = self.open, _Open(self.open.step)
        if not done.instrs:
            return
        outs = [*extra]
        for value in done.made:
            if value not in self.held:
                continue
            of, name = self.flat.values[value], self.held[value].name
            if value in wanted or of.solid:
                outs.append(name)
                self.held[value] = _Held(name, True)
            else:
                del self.held[value]
                self.in_storage[of.storage].remove(value)
        step = self.program.steps[done.step]
        block = Block(
            name=self._block_name(step.block or step.kind.value, done.step),
            inputs=tuple(done.inputs),
            outputs=tuple(outs),
            saved=(),
            values=done.values,
            instrs=with_frees(set(outs), done.instrs),
        )
        self.blocks[block.name] = block
        self._step(
            StepKind.CALL, done.step, block=block.name, args=block.inputs, outs=block.outputs, drops=tuple(done.drops)
        )

    def _block_name(self, stem: str, step: int) -> str:
        name = f"{stem}@{step}"
        count = self.used[name] = self.used.get(name, -1) + 1
        return f"{name}'{count}" if count else name

    def _step(self, kind: StepKind, like: int, **fields: object) -> None:
        of = self.program.steps[like]
        self.steps.append(
            Step(kind=kind, action=of.action, microbatch=of.microbatch, segment=of.segment, **fields)  # type: ignore[arg-type]
        )

    def _accumulate(self, step: Step, index: int, position: int) -> None:
        names = self.flat.names[index]
        total, addend = names[step.args[0]], names[step.args[1]]
        outer = self._to_outer((total, addend))
        storage = self.flat.values[addend].storage
        kept = "" if self._freed_next(storage, position) else self._alias(addend, index)
        self._step(StepKind.ACCUMULATE, index, args=tuple(outer))
        self.open.step = index
        if kept:
            self.held[addend] = _Held(kept, True)
            return
        others = [self.held.pop(value) for value in self.in_storage.pop(storage)]
        rest = tuple(name for name, outside in others if outside and name != outer[1])
        if rest:
            self._step(StepKind.DROP, index, drops=rest)
        self.consumed.add(storage)

    def _alias(self, value: int, index: int) -> str:
        """Another outer name of a value that has one: a view of all of it, made by a block of its own."""
        name, block = self.held[value].name, self.open
        local = self.flat.values[value].local
        assert local is not None
        self.used[name] = self.used.get(name, 0) + 1
        alias = f"{name}'{self.used[name]}"
        block.step = index
        block.inputs[name] = None
        block.values = {
            name: msgspec.structs.replace(local, base=name),
            alias: msgspec.structs.replace(local, base=name, storage_bytes=0),
        }
        block.instrs.append(Instr(target="aten.view.default", args=("%" + name, local.shape), outs=(alias,)))
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
        by_name = self.flat.names[index]
        wanted = {param: by_name[name] for param, name in self.program.grads.items() if name in by_name}
        outer = self._to_outer(tuple(wanted.values()))
        self.grads = dict(zip(wanted, outer, strict=True))
        self._step(StepKind.UPDATE, index, args=step.args)
        self.open.step = index

    def finish(self) -> RankProgram:
        """The new program."""
        ends = {self.program.loss, *self.program.metrics.values()}
        results = [self.flat.results[name] for name in ends]
        self._to_outer(results)
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


def _numbers(arg: Arg, coordinates: tuple[int, ...], microbatch: int) -> Arg:
    """An argument with its offsets worked out."""
    if isinstance(arg, str):
        return offset_value(arg, coordinates, microbatch) if arg.startswith("#") else arg
    if isinstance(arg, tuple):
        return tuple(_numbers(item, coordinates, microbatch) for item in arg)
    return arg
