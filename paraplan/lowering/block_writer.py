"""Blocks written in another order than the program's: names, views and what crosses from block to block.

`BlockWriter` keeps, per value of the flat program, what it is called now, and the block under way. Views are made
again by the block that needs them and forgotten at its end; what instructions made goes on through the outer
namespace. `loose` are names that stand for no value of the program: copies on tiers, and those under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.offsets import offset_value
from paraplan.ir.execution.rank_program import Block, BlockRole, Instr, LocalValue, RankProgram, Step, StepKind
from paraplan.ir.model.graph import Arg, ArgKind, arg_kind, map_refs, refs
from paraplan.lowering.blocks.finish import with_frees
from paraplan.lowering.flat import FlatProgram


class ValueNames(NamedTuple):
    """What a value is called, in blocks by the name's text; `outer` if the outer namespace has it, and not only the
    block under way."""

    name: Name
    outer: bool


class Open:
    """A block under way.

    Attributes:
        step: the given program's, after which it is called.
        instrs, values: so far.
        inputs, drops: outer names it reads, and those of them (or sharing their storage) that it is given.
        touched: per storage, the last instruction that touches it.
        made, loose: values and loose names it has made, in order.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.instrs: list[Instr] = []
        self.values: dict[str, LocalValue] = {}
        self.inputs: dict[Name, None] = {}
        self.drops: dict[Name, None] = {}
        self.touched: dict[int, int] = {}
        self.made: list[int] = []
        self.loose: list[Name] = []


class BlockWriter:
    """Writes blocks and steps over the values of a flat program.

    Attributes:
        held, in_storage: what values are called, and which of a storage have a name.
        loose: loose names alive, and whether they are outer ones.
        steps, blocks: so far.
        open: the block under way.
    """

    def __init__(self, program: RankProgram, flat: FlatProgram) -> None:
        self.program, self.flat = program, flat
        self.held = {value: ValueNames(name, True) for name, value in flat.given.items()}
        self.in_storage: dict[int, list[int]] = {}
        for value in self.held:
            self._holds(value)
        self.loose: dict[Name, bool] = {}
        self.used = dict.fromkeys(flat.given, 0)
        self.called: Counter[str] = Counter()  # blocks
        self.steps: list[Step] = []
        self.blocks: dict[str, Block] = {}
        self.open = Open(0)

    def _holds(self, value: int) -> None:
        self.in_storage.setdefault(self.flat.values[value].storage, []).append(value)

    def _name(self, value: int) -> str:
        """A value's name in the block under way; views are made if need be."""
        self._there(value)
        name, outer = self.held[value]
        if outer:
            self.open.inputs[name] = None
        return str(name)

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
            return _numbers(map_refs(arg, lambda local: str(self.held[names[local]].name)), coordinates, microbatch)

        args = tuple(argument(arg) for arg in instr.args)
        kwargs = {key: argument(arg) for key, arg in instr.kwargs.items()}
        index = len(self.open.instrs)
        for local in refs((instr.args, tuple(instr.kwargs.values()))):
            self.open.touched[self.flat.values[names[local]].storage] = index
        outs = tuple(None if out is None else self._make(names[out], index) for out in instr.outs)
        own = self._kind(step) == self._kind(self.open.step)
        self.open.instrs.append(
            msgspec.structs.replace(
                instr, args=args, kwargs=kwargs, outs=outs, frees=(), origin=instr.origin if own else -1
            )
        )

    def _kind(self, step: int) -> str:
        """The kind whose ops a step's block serves."""
        name = self.program.steps[step].block
        return self.program.blocks[name].kind if name else ""

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
        name = self._fresh(of.label)
        here = [str(self.held[other].name) for other in self.in_storage.get(of.storage, ())]
        base = next((other for other in here if other in self.open.values), str(name))
        self.open.values[str(name)] = msgspec.structs.replace(of.local, base=base)
        self.held[value] = ValueNames(name, False)
        self._holds(value)
        self.open.made.append(value)
        return str(name)

    def _to_outer(self, values: Sequence[int]) -> list[Name]:
        """End the block under way such that values have outer names; views of them are made if need be."""
        for value in values:
            self._there(value)
        self._close(frozenset(values))
        return [self.held[value].name for value in values]

    def _close(self, wanted: frozenset[int] = frozenset(), extra: Sequence[Name] = ()) -> None:
        """Call the block under way; views nobody asked for are forgotten."""
        done, self.open = self.open, Open(self.open.step)
        if not done.instrs:
            return
        outs = [*extra]
        for value in done.made:
            if value not in self.held:
                continue
            of, name = self.flat.values[value], self.held[value].name
            if value in wanted or of.solid:
                outs.append(name)
                self.held[value] = ValueNames(name, True)
            else:
                del self.held[value]
                self.in_storage[of.storage].remove(value)
        for name in done.loose:
            if name in self.loose:
                outs.append(name)
                self.loose[name] = True
        step, results = self.program.steps[done.step], tuple(map(str, outs))
        like = self.program.blocks.get(step.block)
        block = Block(
            name=self._block_name(step.block or step.kind.value, done.step),
            role=BlockRole.REORDERED if like is None else like.role,
            kind="" if like is None else like.kind,
            inputs=tuple(map(str, done.inputs)),
            outputs=results,
            saved=(),
            values=done.values,
            instrs=with_frees(set(results), done.instrs),
        )
        self.blocks[block.name] = block
        args, drops = tuple(done.inputs), tuple(done.drops)
        self._step(StepKind.CALL, done.step, block=block.name, args=args, outs=tuple(outs), drops=drops)

    def _block_name(self, stem: str, step: int) -> str:
        name = f"{stem}@{step}"
        count = self.called[name]
        self.called[name] += 1
        return f"{name}'{count}" if count else name

    def _fresh(self, label: Name) -> Name:
        """A name nothing else has."""
        count = self.used[label] = self.used.get(label, -1) + 1
        return label.again(count) if count else label

    def _loosely(self, label: Name, local: LocalValue) -> Name:
        """A loose name made by the block under way; a base of "" stands for itself."""
        name = self._fresh(label)
        self.open.values[str(name)] = msgspec.structs.replace(local, base=local.base or str(name))
        self.open.loose.append(name)
        self.loose[name] = False
        return name

    def _take(self, name: Name, local: LocalValue) -> None:
        """A loose name as an input of the block under way, unless that makes it."""
        if self.loose[name]:
            self.open.inputs[name] = None
            self.open.values.setdefault(str(name), msgspec.structs.replace(local, base=str(name)))

    def _lose(self, name: Name) -> None:
        """The block under way is the last to need a loose name."""
        if self.loose.pop(name):
            self.open.drops[name] = None

    def _step(self, kind: StepKind, like: int, **fields: object) -> None:
        of = self.program.steps[like]
        self.steps.append(
            Step(kind=kind, action=of.action, microbatch=of.microbatch, segment=of.segment, **fields)  # type: ignore[arg-type]
        )


def _numbers(arg: Arg, coordinates: tuple[int, ...], microbatch: int) -> Arg:
    """An argument with its offsets worked out."""
    if arg_kind(arg) is ArgKind.OFFSET:
        return offset_value(arg, coordinates, microbatch)
    if isinstance(arg, tuple):
        return tuple(_numbers(item, coordinates, microbatch) for item in arg)
    return arg
