"""Emitting a phase's ops: those that run in chunks as loops, written out, between those that run whole.

A chunk of a value is cut from it where it is whole already, and what an op made of it otherwise. Chunks of a value that
something reads whole are written into a buffer as they are made; a sum over the dim grows in the first chunk's
result, in place, and is reduced over the mesh, if it is to be, once, when whole. Where an op that runs whole lies
between two that run in chunks (statistics of a batch), there are two loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from paraplan.ir.execution.offsets import parse_offset
from paraplan.ir.execution.rank_program import GROW, PUT, ROOM, Instr
from paraplan.ir.machine.mesh import Layout, Partial, Shard
from paraplan.ir.machine.reshard import Move, reshard_path
from paraplan.ir.model.graph import Arg, ArgKind, Graph, arg_kind
from paraplan.ir.model.program import HALVES
from paraplan.ir.model.strides import is_contiguous, is_dense
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.rewrites.chunks import Chunks
from paraplan.rules.strategies import AxisChoice, Strategy

EmitOp = Callable[[BlockEmitter, int, Strategy], None]
"""Emits an op of the graph, by its index, under a strategy."""


def emit_ops(
    emitter: BlockEmitter,
    graph: Graph,
    strategies: Sequence[Strategy],
    order: Sequence[int],
    chunks: Chunks,
    results: Iterable[str],
    late: Iterable[int] = (),
    emit: EmitOp | None = None,
) -> None:
    """Emit ops of a graph.

    Args:
        emitter: the block's.
        graph, strategies: whose ops, and what they do on the extended mesh.
        order: the ops, each after what it reads.
        chunks: which of them run in chunks.
        results: values the block hands on, whole.
        late: those of them that wait for their first reader.
        emit: how one is emitted, if not as it is.
    """
    one = emit or (lambda to, index, strategy: to.op(graph.ops[index], graph, strategy, index))
    if not any(chunks.of(index) for index in order):
        for index in order:
            one(emitter, index, strategies[index])
        return
    rounds = _rounds(graph, order, chunks, frozenset(late))
    loops = {index: rounds[index] for index in order if chunks.of(index)}
    whole = set(results)
    for index in order:
        for name in graph.ops[index].tensors:
            if index not in loops or not _made_beside(graph, loops, index, name):
                whole.add(name)
    for turn in range(1 + max(rounds.values())):
        for index in order:
            if rounds[index] == turn and index not in loops:
                one(emitter, index, strategies[index])
        inside = [index for index in order if loops.get(index) == turn]
        if inside:
            _Loop(emitter, graph, strategies, chunks, whole, one).write_out(inside)


def _made_beside(graph: Graph, loops: dict[int, int], reader: int, name: str) -> bool:
    """Whether a loop's op reads a chunk that the same loop has made."""
    return any(name in graph.ops[index].outs and loops[index] == loops[reader] for index in loops)


def _rounds(graph: Graph, order: Sequence[int], chunks: Chunks, late: frozenset[int]) -> dict[int, int]:
    """Per op, the loop it is in, or stands before."""
    made: dict[str, int] = {}
    found: dict[int, int] = {}
    for index in order:
        at = 0
        for name in graph.ops[index].tensors:
            if name in made:
                maker = made[name]
                after = chunks.of(maker) is not None and (chunks.of(index) is None or name not in chunks.positions)
                at = max(at, found[maker] + after)
        found[index] = at
        made.update((out, index) for out in graph.ops[index].outs if out is not None)
    for index in reversed(order):
        if index in late and chunks.of(index) is None:
            outs = set(graph.ops[index].outs)
            readers = [found[r] for r in order if r != index and not outs.isdisjoint(graph.ops[r].tensors)]
            found[index] = max(found[index], min(readers, default=found[index]))
    return found


@dataclass
class _Grown:
    """What the chunks of a value are gathered in so far, and how it lies: a sum before its reduction over the mesh."""

    local: str
    layout: Layout


class _Loop:
    """The chunks of a run of ops, one after another."""

    def __init__(
        self,
        emitter: BlockEmitter,
        graph: Graph,
        strategies: Sequence[Strategy],
        chunks: Chunks,
        whole: set[str],
        one: EmitOp,
    ) -> None:
        self.emitter, self.graph, self.strategies, self.chunks = emitter, graph, strategies, chunks
        self.whole, self.one = whole, one
        self.grown: dict[str, _Grown] = {}

    def write_out(self, ops: Sequence[int]) -> None:
        """Emit the ops once a chunk; what is whole afterwards is the emitter's."""
        for chunk in range(self.chunks.count):
            inside = ChunkEmitter(self.emitter, self.graph, self.chunks, chunk)
            for index in ops:
                choice = self.chunks.of(index)
                assert choice is not None
                self.one(inside, index, in_chunks(self.strategies[index], choice))
                self.emitter.serves(index)
                for out, place in zip(self.graph.ops[index].outs, choice.outputs, strict=True):
                    if out is not None and isinstance(place, Partial):
                        self._add(inside, out)
                    elif out is not None and out in self.whole:
                        self._put(inside, out)
        for index in ops:
            self.emitter.serves(index)
            for out, final in zip(self.graph.ops[index].outs, self.strategies[index].outputs, strict=True):
                if out in self.grown and out is not None and final is not None:
                    grown, spec = self.grown[out], self.graph.values[out]
                    self.emitter.adopt(out, spec, self._gathered(out, grown.local, spec.dtype), grown.layout, final)

    def _add(self, inside: ChunkEmitter, out: str) -> None:
        """One more addend of a sum; sums of halves are kept in float32."""
        part, home = inside.get(out, inside.home(out)), inside.home(out)[:-1]
        value = self.emitter.values[part]
        if out in self.grown:
            self.emitter.add_many(GROW, ("%" + self.grown[out].local, "%" + part), ())
            return
        if value.base != part or not is_contiguous(value.shape, value.strides):
            part = self.emitter.copy_rows(part, self.emitter._unique(f"{out}^own"))
        if value.dtype in HALVES.values():
            part = self._cast(part, out, "float32")
        self.grown[out] = _Grown(part, home)

    def _gathered(self, out: str, local: str, dtype: str) -> str:
        """A name for what was gathered that nothing reads before the last chunk: a collective would at once."""
        value = self.emitter.values[local]
        if value.dtype != dtype:
            return self._cast(local, out, dtype)
        name = self.emitter._unique(f"{out}^all")
        self.emitter.view("aten.view.default", ("%" + local, value.shape), local, name, value.shape)
        return name

    def _cast(self, local: str, out: str, dtype: str) -> str:
        return self.emitter.cast(local, dtype, self.emitter._unique(f"{out}^{dtype}"))

    def _put(self, inside: ChunkEmitter, out: str) -> None:
        """One more chunk of a value that is read whole."""
        home = inside.home(out)
        part, position = inside.get(out, home), self.chunks.positions[out]
        shape = self.emitter.values[part].shape
        if out not in self.grown:
            room = tuple(size * self.chunks.count if at == position else size for at, size in enumerate(shape))
            dtype = self.graph.values[out].dtype
            local = self.emitter.local(
                ROOM,
                (room,),
                self.emitter._unique(f"{out}^room"),
                dtype,
                room,
                {"dtype": ":" + dtype},
            )
            self.grown[out] = _Grown(local, home[:-1])
        args = ("%" + self.grown[out].local, "%" + part, position, inside.chunk * shape[position])
        self.emitter.add_many(PUT, args, ())


def in_chunks(strategy: Strategy, choice: AxisChoice) -> Strategy:
    """A strategy with the axis in time behind the others; a sum over it is not reduced yet."""

    def behind(layouts: tuple[Layout | None, ...]) -> tuple[Layout | None, ...]:
        return tuple(
            None if layout is None or place is None else (*layout, place)
            for layout, place in zip(layouts, choice.outputs, strict=True)
        )

    inputs = tuple((*layout, place) for layout, place in zip(strategy.inputs, choice.inputs, strict=True))
    computed, outputs = behind(strategy.computed), behind(strategy.outputs)
    kept = tuple(
        before if isinstance(place, Partial) else after
        for place, before, after in zip(choice.outputs, computed, outputs, strict=True)
    )
    return Strategy(strategy.key, inputs, computed, kept)


class ChunkEmitter(BlockEmitter):
    """Emits ops of one chunk into another emitter's block, on its mesh and one more axis."""

    def __init__(self, whole: BlockEmitter, graph: Graph, chunks: Chunks, chunk: int) -> None:
        super().__init__(whole.name, (*whole.mesh_shape, chunks.count), whole.role, whole.kind)
        self.parent, self.graph, self.chunks, self.chunk = whole, graph, chunks, chunk
        self.values, self.inputs, self._instrs = whole.values, whole.inputs, whole._instrs
        self.filled, self.zeroed = whole.filled, whole.zeroed
        self.specs = dict(graph.values)
        self._key = str(len(whole.mesh_shape) - 1)

    def get(self, name: str, layout: Layout) -> str:
        """A chunk of a value; or all of it, where it is not cut."""
        if (name, layout) in self._at or name in self._home:
            return super().get(name, layout)
        *rest, place = layout
        local = self.parent.get(name, tuple(rest))
        if isinstance(place, Shard):
            local = self._slice(local, place.dim)
        self._at[name, layout] = local
        return local

    def _slice(self, local: str, dim: int) -> str:
        """A view where it is dense; else a copy, for some kernels (a layer norm's backward) ignore strides."""
        value = self.values[local]
        length = value.shape[dim] // self.chunks.count
        part = tuple(length if at == dim else size for at, size in enumerate(value.shape))
        out, start = self._unique(f"{local}/{self.chunk}"), self.chunk * length
        if not is_dense(part, value.strides):
            return self.local("paraplan.shard", ("%" + local, dim, length, start), out, value.dtype, part)
        self.view("aten.slice.Tensor", ("%" + local, dim, start, start + length, 1), local, out, part, change=True)
        return out

    def _named(self, name: str) -> str:
        return f"{name}/{self.chunk}"

    def _steps(self, name: str, before: Layout, after: Layout) -> tuple[Move, ...]:
        *rest, place = before
        path = reshard_path(self.specs[name].shape, tuple(rest), after[:-1], self.mesh_shape[:-1], frozen=1)
        return tuple(
            Move(m.kind, m.axis, m.dim, m.to_dim, (*m.before, place), (*m.after, place), m.reduction) for m in path
        )

    def _add(self, instr: Instr) -> None:
        args = tuple(self._placed(arg) for arg in instr.args)
        kwargs = {key: self._placed(arg) for key, arg in instr.kwargs.items()}
        self._instrs.append(msgspec.structs.replace(instr, args=args, kwargs=kwargs))

    def _placed(self, arg: Arg) -> Arg:
        """An argument with the coordinate along the axis in time filled in."""
        if isinstance(arg, (tuple, list)):
            return tuple(self._placed(item) for item in arg)
        if arg_kind(arg) is not ArgKind.OFFSET:
            return arg
        terms = parse_offset(arg)
        fixed = sum(step for key, step in terms if key == self._key) * self.chunk
        rest = [f"{key}:{step}" for key, step in terms if key != self._key]
        return "#" + ",".join([*rest, *([f"+:{fixed}"] if fixed else [])])
