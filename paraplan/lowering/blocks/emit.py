"""Building one block: local ops and their memory; changes of layout are emitted by `moves`.

A `BlockEmitter` holds values by (name, layout). Asking for a value in a layout it is not in emits the moves
of `ir.machine.reshard` once; later requests reuse the result. Shapes follow from layouts, strides from
`ir.model.strides`; a reshape that cannot be a view becomes an explicit copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from paraplan.ir.execution.rank_program import Block, BlockRole, Instr, InstrKind, LocalValue
from paraplan.ir.machine.mesh import Layout, layout_text, local_shape, padded_dims
from paraplan.ir.machine.reshard import Move, reshard_path
from paraplan.ir.model.graph import Arg, Graph, Op, map_refs
from paraplan.ir.model.strides import (
    contiguous_strides,
    elementwise_strides,
    joined_strides,
    merges_batch,
    view_strides,
)
from paraplan.ir.model.tensor import DTYPE_BYTES, TensorSpec
from paraplan.lowering.blocks.emit_carried import emit_carried, row_major
from paraplan.lowering.blocks.expand import emit_expansion
from paraplan.lowering.blocks.finish import finish_block, split_block
from paraplan.lowering.blocks.moves import LayoutMoves
from paraplan.lowering.blocks.padding import fill_padding, keep_zeros
from paraplan.lowering.transfers.activation_offload import away_value
from paraplan.rules.carried_rules import local_args
from paraplan.rules.dims import op_def
from paraplan.rules.localise import expansion, local_context
from paraplan.rules.strategies import Strategy

Dims = tuple[int, ...]


class BlockEmitter(LayoutMoves):
    """Collects the instructions of one block on an extended mesh (axis 0: microbatches).

    `overwrites`: nobody else reads what the block is given, so all-reduces work in place. `zeroed` has (local value,
    dim) where padding is zero, `filled` the values whose padding was set.
    """

    def __init__(self, name: str, mesh_shape: Dims, role: BlockRole, kind: str = "", overwrites: bool = False) -> None:
        self.name, self.role, self.kind = name, role, kind
        self.mesh_shape = mesh_shape
        self.overwrites = overwrites
        self.values: dict[str, LocalValue] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.inputs: dict[str, None] = {}
        self._home: dict[str, Layout] = {}
        self._given: dict[str, LocalValue] = {}
        self._arriving: dict[str, tuple[LocalValue, LocalValue]] = {}
        self._at: dict[tuple[str, Layout], str] = {}
        self._instrs: list[Instr] = []
        self._origin = -1
        self.filled: dict[tuple[str, int, float], str] = {}
        self.zeroed: set[tuple[str, int]] = set()

    def give(
        self,
        name: str,
        spec: TensorSpec,
        layout: Layout,
        strides: Dims | None = None,
        known_as: str = "",
        zeros: bool = False,
    ) -> None:
        """A value the caller can bind as `name`; it becomes an input of the block only if read.

        Args:
            name: that it is bound as.
            spec: of the whole value.
            layout: that it has, on the extended mesh.
            strides: of a rank's part; None: row by row.
            known_as: what ops ask for it as; "" where that is its name.
            zeros: whether its padding is zero.
        """
        shape = local_shape(spec.shape, layout, self.mesh_shape)
        nbytes = math.prod(shape) * DTYPE_BYTES[spec.dtype]
        strides = contiguous_strides(shape) if strides is None else strides
        self._given[name] = LocalValue(dtype=spec.dtype, shape=shape, strides=strides, base=name, storage_bytes=nbytes)
        known = known_as or name
        self.specs[known] = spec
        self._home[known] = layout
        self._at[known, layout] = name
        if zeros:
            self.zeroed.update((name, dim) for dim, _ in padded_dims(spec.shape, layout, self.mesh_shape))

    def arrive(self, name: str, spec: TensorSpec, layout: Layout, parts: tuple[str, LocalValue, LocalValue]) -> None:
        """A value that is being copied back from a tier: waited for just before it is first read.

        Args:
            name: of the value.
            spec, layout: as for `give`.
            parts: see `away.AwayValue.returning`.
        """
        local, issued, held = parts
        self._given[local] = msgspec.structs.replace(issued, storage_bytes=0)
        self._arriving[local] = (issued, held)
        self.specs[name] = spec
        self._home[name] = layout
        self._at[name, layout] = local

    def rename(self, name: str, source: str, layout: Layout) -> None:
        """Declare that a value is another one, which is brought to a layout.

        Args:
            name: what it is declared as.
            source: the value that it is.
            layout: that it is brought to.
        """
        self.specs[name] = self.specs[source]
        self._home[name] = layout
        self._at[name, layout] = self.get(source, layout)

    def serves(self, origin: int) -> None:
        """What is emitted from here on serves this op of the joint graph."""
        self._origin = origin

    def home(self, name: str) -> Layout:
        """The layout a value was given or made in."""
        return self._home[name]

    def get(self, name: str, layout: Layout) -> str:
        """The local name of a value in a layout, moving it there first if need be."""
        found = self._at.get((name, layout))
        if found is None:
            source = self._home[name]
            found = self._use(self._at[name, source])
            for move in self.path(name, layout):
                found = self.move(name, found, move)
            self._at[name, layout] = found
        return self._use(found)

    def lean(self, name: str, layout: Layout) -> bool:
        """Whether a value lies in a layout already, in no more elements and bytes of storage than as it was made.

        The planner knows the elements alone, and prices what may be saved so (`planner.sharding.space.saved_as`).
        """
        found, home = self._at.get((name, layout)), self._home[name]
        if found is None:
            return False
        shape = self.specs[name].shape
        here, made = (math.prod(local_shape(shape, lies, self.mesh_shape)) for lies in (layout, home))
        return here <= made and self._stored_bytes(found) <= self._stored_bytes(self._at[name, home])

    def _stored_bytes(self, local: str) -> int:
        """Bytes of the storage a value lies in."""
        known = self.values | self._given if local not in self.values else self.values
        while local in known and known[local].base != local:
            local = known[local].base
        return known[local].storage_bytes if local in known else 0

    def move(self, name: str, local: str, move: Move) -> str:
        """Emit one move of a value; returns the local name of the result.

        Args:
            name: of the value.
            local: its name in the layout that the move begins with.
            move: along one axis.
        """
        result = self._move(name, local, move)
        keep_zeros(self, name, local, move, result)
        return result

    def path(self, name: str, layout: Layout, since: Layout | None = None) -> tuple[Move, ...]:
        """The moves that bring a value to a layout from another one, or from that it was given or made in.

        Args:
            name: of the value.
            layout: that it is to have.
            since: that it has; None: that it was given or made in.
        """
        return self._steps(name, since or self._home[name], layout)

    def _steps(self, name: str, before: Layout, after: Layout) -> tuple[Move, ...]:
        return reshard_path(self.specs[name].shape, before, after, self.mesh_shape, frozen=1)

    def _named(self, name: str) -> str:
        """What the block calls a value of the graph."""
        return name

    def _use(self, local: str) -> str:
        if local in self._given and local not in self.values:
            self.values[local] = self._given[local]
            parts = self._arriving.get(local, ())
            self.values.update((value.base, value) for value in parts)
            self.inputs.update(dict.fromkeys(value.base for value in parts) or {local: None})
            if parts:
                args = tuple("%" + value.base for value in parts)
                self._add(Instr(kind=InstrKind.WAIT, target="wait", args=args, outs=(local,)))
        return local

    def offload(self, local: str, tier: str) -> str:
        """Begin to copy a value to a tier; returns the local name of what is issued."""
        issued = away_value(local, self.values[local], tier)
        self.values[issued.base] = issued
        self._add(Instr(kind=InstrKind.COPY, target="offload", args=("%" + local, ":" + tier), outs=(issued.base,)))
        return issued.base

    def op(self, op: Op, graph: Graph, strategy: Strategy, origin: int) -> None:
        """Emit one op of the joint graph under a strategy.

        Args:
            op: of the graph.
            graph: a kind's, with specs of whole values.
            strategy: what it does; layouts are on the extended mesh.
            origin: the op's index in the graph.
        """
        self._origin = origin
        wanted = tuple(zip(op.tensors, strategy.inputs, strict=True))
        names = row_major(self, op, {key: self.get(*key) for key in wanted})
        names = fill_padding(self, op, graph, strategy, names)
        locals_: list[str | None] = []
        for out, layout, final in zip(op.outs, strategy.computed, strategy.outputs, strict=True):
            if out is None or layout is None or final is None:
                locals_.append(None)
                continue
            self.specs[out] = graph.values[out]
            named = self._named(out)
            locals_.append(named if layout == final else f"{named}@{layout_text(layout)}")
        inputs, outs = [names[key] for key in wanted], tuple(locals_)
        steps = expansion(op, graph.values, strategy, self.mesh_shape)
        if steps is not None:
            emit_expansion(self, steps, inputs, outs, strategy.ring_axis)
        else:
            specs = tuple(
                None if out is None or layout is None else self._local_spec(out, layout)
                for out, layout in zip(op.outs, strategy.computed, strict=True)
            )
            args, kwargs = self._local_args(op, graph, strategy, names)
            if op.rule is not None:
                emit_carried(self, op, args, kwargs, outs, specs, inputs)
            else:
                self.place(op.target, args, kwargs, outs, specs, inputs)
        for out, computed, final, local in zip(op.outs, strategy.computed, strategy.outputs, locals_, strict=True):
            if out is None or computed is None or final is None or local is None:
                continue
            self.adopt(out, graph.values[out], local, computed, final)

    def _local_spec(self, name: str, layout: Layout) -> TensorSpec:
        spec = self.specs[name]
        return TensorSpec(spec.dtype, local_shape(spec.shape, layout, self.mesh_shape))

    def _local_args(
        self, op: Op, graph: Graph, strategy: Strategy, names: dict[tuple[str, Layout], str]
    ) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
        queue = iter(zip(op.tensors, strategy.inputs, strict=True))

        def rename(_: str) -> str:
            return names[next(queue)]

        args = tuple(map_refs(arg, rename) for arg in op.args)
        kwargs = {key: map_refs(arg, rename) for key, arg in op.kwargs.items()}
        definition = op_def(op.target)
        if op.rule is not None:
            return local_args(op.rule, args, kwargs, strategy.inputs, self.mesh_shape)
        if definition is not None and definition.localise is not None:
            args = definition.localise(args, local_context(op, graph.values, strategy, self.mesh_shape))
        return args, kwargs

    def place(
        self,
        target: str,
        args: tuple[Arg, ...],
        kwargs: dict[str, Arg],
        outs: tuple[str | None, ...],
        specs: Sequence[TensorSpec | None],
        inputs: list[str],
    ) -> None:
        """Emit one local op.

        Args:
            target, args, kwargs: the instruction's.
            outs: local names of its results; None for an absent one.
            specs: their local specs.
            inputs: local names of the tensors among its arguments, in order.
        """
        definition = op_def(target)
        how = "contiguous" if definition is None else definition.strides
        if how == "view":
            assert outs[0] is not None and specs[0] is not None
            self.view(target, args, inputs[0], outs[0], specs[0].shape)
            return
        sources = [self.values[name] for name in inputs]
        for index, (local, spec) in enumerate(zip(outs, specs, strict=True)):
            if local is not None and spec is not None:
                self._fresh(local, spec.dtype, spec.shape, _fresh_strides(how, index, spec.shape, sources))
        workspace = 0
        if definition is not None and definition.workspace is not None:
            results = [None if local is None else self.values[local] for local in outs]
            workspace = definition.workspace(sources, results, args)
        self._add(
            Instr(target=target, args=args, kwargs=kwargs, outs=outs, workspace_bytes=workspace, origin=self._origin)
        )

    def view(
        self, target: str, args: tuple[Arg, ...], source: str, out: str, shape: Dims, change: bool = False
    ) -> None:
        """Emit a view, or the copy that a reshape must be.

        Args:
            target, args: of the view.
            source: local name of what it views.
            out: local name of the result.
            shape: of the result.
            change: whether it belongs to a change of layout.
        """
        value = self.values[source]
        strides = _view_result(target, args, value, shape)
        if strides is None:
            self._fresh(out, value.dtype, shape, contiguous_strides(shape))
            self._add(
                Instr(
                    target="paraplan.reshape_copy",
                    args=("%" + source, shape),
                    outs=(out,),
                    origin=self._origin,
                    layout_change=change,
                )
            )
            return
        self.values[out] = LocalValue(dtype=value.dtype, shape=shape, strides=strides, base=value.base, storage_bytes=0)
        self._add(Instr(target=target, args=args, outs=(out,), origin=self._origin, layout_change=change))

    def local(
        self,
        target: str,
        args: tuple[Arg, ...],
        out: str,
        dtype: str,
        shape: Dims,
        kwargs: dict[str, Arg] | None = None,
    ) -> str:
        """Emit an op outside the joint graph, with one fresh result: a cast lies as its input does, all else row by
        row.

        Args:
            target, args, kwargs: the op.
            out: local name of the result.
            dtype, shape: of the result.
        """
        source = self.values[str(args[0])[1:]] if target == "aten._to_copy.default" else None
        lies = contiguous_strides(shape) if source is None else elementwise_strides(shape, [(shape, source.strides)])
        self._fresh(out, dtype, shape, lies)
        self._add(
            Instr(target=target, args=args, kwargs=kwargs or {}, outs=(out,), origin=self._origin, layout_change=True)
        )
        return out

    def cast(self, local: str, dtype: str, out: str) -> str:
        """Emit a cast of a local value, which lies as it does.

        Args:
            local: name of what is cast.
            dtype: to which.
            out: local name of the result.
        """
        shape = self.values[local].shape
        return self.local("aten._to_copy.default", ("%" + local,), out, dtype, shape, {"dtype": ":" + dtype})

    def effect(self, target: str, args: tuple[Arg, ...]) -> None:
        """Emit an op that makes nothing (a write into an input)."""
        self._add(Instr(target=target, args=args, outs=(), origin=-1, layout_change=True))

    def define(self, name: str, spec: TensorSpec, layout: Layout) -> None:
        """Declare that a local value, which has the value's name, is that value in a layout.

        Args:
            name: of both.
            spec: of the whole value.
            layout: that it has.
        """
        self.specs[name] = spec
        self._home[name] = layout
        self._at[name, layout] = name

    def adopt(self, name: str, spec: TensorSpec, local: str, made: Layout, home: Layout) -> None:
        """Declare that a local value is a value in the layout it was made in, and bring it to another at once.

        Args:
            name: of the value.
            spec: of the whole value.
            local: name of what was made.
            made: layout it was made in.
            home: layout it is brought to.
        """
        self.specs[name], self._home[name] = spec, home
        for move in self._steps(name, made, home):
            local = self.move(name, local, move)
        self._at[name, home] = local

    def _fresh(self, name: str, dtype: str, shape: Dims, strides: Dims) -> None:
        nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
        self.values[name] = LocalValue(dtype=dtype, shape=shape, strides=strides, base=name, storage_bytes=nbytes)

    def fresh(self, name: str, dtype: str, shape: Dims) -> None:
        """Declare a value with a contiguous storage of its own.

        Args:
            name: local.
            dtype, shape: of a rank's part.
        """
        self._fresh(name, dtype, shape, contiguous_strides(shape))

    def add_many(self, target: str, args: tuple[Arg, ...], outs: Sequence[str]) -> None:
        """Emit an op outside the joint graph whose results are declared already.

        Args:
            target, args: the op.
            outs: local names of its results.
        """
        self._add(Instr(target=target, args=args, outs=tuple(outs), origin=self._origin, layout_change=True))

    def _add(self, instr: Instr) -> None:
        self._instrs.append(instr)

    def _unique(self, stem: str) -> str:
        count = 0
        while f"{stem}~{count}" in self.values:
            count += 1
        return f"{stem}~{count}"

    def finish(self, outputs: Sequence[str | None], saved: Sequence[str]) -> Block:
        """The block: collectives issued early and waited late, values freed at their last use."""
        return finish_block(
            self.name, tuple(self.inputs), tuple(outputs), tuple(saved), self.values, self._instrs, self.role, self.kind
        )

    def parted(self, outputs: Sequence[str | None]) -> tuple[Block | None, ...]:
        """The block in parts between which other work can come (see `finish.split_block`)."""
        return split_block(self.name, tuple(self.inputs), tuple(outputs), self.values, self._instrs, self.role)


def _fresh_strides(how: str, index: int, shape: Dims, inputs: list[LocalValue]) -> Dims:
    """How the index-th fresh output lies; attention keeps heads last in all but a mask's gradient (the fourth)."""
    lie = [(value.shape, value.strides) for value in inputs]
    orders = {"elementwise": lie, "elementwise_reversed": lie[::-1], "elementwise_second": [*lie[1:], *lie[:1]]}
    if how in orders:
        return elementwise_strides(shape, orders[how])
    if how == "joined":
        return joined_strides(shape, lie)
    if how == "attention" and len(shape) == 4 and index < 3:
        _, h, s, e = shape
        return (s * h * e, e, h * e, 1)
    return contiguous_strides(shape)


def _view_result(target: str, args: tuple[Arg, ...], value: LocalValue, shape: Dims) -> Dims | None:
    """Strides of a view's result; None where only a copy will do."""
    if target == "aten.permute.default":
        return tuple(value.strides[int(dim) % len(shape)] for dim in args[1])
    if target == "paraplan.mergeable":
        return value.strides if merges_batch(value.shape, value.strides) else None
    if target == "aten.expand.default":
        lead = len(shape) - len(value.shape)
        tail = zip(value.shape, value.strides, shape[lead:], strict=True)
        return (0,) * lead + tuple(0 if size == 1 and out != 1 else stride for size, stride, out in tail)
    if target == "aten.slice.Tensor":
        dim, step = int(args[1]) % len(shape), int(args[4]) if len(args) > 4 else 1
        return tuple(stride * step if index == dim else stride for index, stride in enumerate(value.strides))
    if target == "aten.select.int":
        dim = int(args[1]) % len(value.shape)
        return value.strides[:dim] + value.strides[dim + 1 :]
    return view_strides(value.shape, value.strides, shape)
