"""Building one block: local ops and their memory; changes of layout are emitted by `moves`.

Values are held by (name, layout) (`laid_values`). Shapes follow from layouts, strides from `ir.model.strides`; a
reshape that cannot be a view becomes an explicit copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.ir.execution.rank_program import Block, BlockRole, Instr, LocalValue
from paraplan.ir.machine.mesh import Layout, layout_text, local_shape
from paraplan.ir.model.graph import Arg, Graph, Op, map_refs
from paraplan.ir.model.strides import (
    contiguous_strides,
    elementwise_strides,
    joined_strides,
    merges_batch,
    view_strides,
)
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.emit_carried import emit_carried, row_major
from paraplan.lowering.blocks.expand import emit_expansion
from paraplan.lowering.blocks.finish import finish_block, split_block
from paraplan.lowering.blocks.laid_values import LaidValues
from paraplan.lowering.blocks.padding import fill_padding
from paraplan.lowering.transfers.copies import Copy, local_value
from paraplan.rules.carried_rules import local_args
from paraplan.rules.dims import op_def
from paraplan.rules.localise import expansion, local_context
from paraplan.rules.strategies import Strategy

Dims = tuple[int, ...]


class BlockEmitter(LaidValues):
    """Collects the instructions of one block on an extended mesh (axis 0: microbatches).

    `overwrites`: nobody else reads what the block is given, so all-reduces work in place.
    """

    def __init__(self, name: str, mesh_shape: Dims, role: BlockRole, kind: str = "", overwrites: bool = False) -> None:
        super().__init__(mesh_shape, overwrites)
        self.name, self.role, self.kind = name, role, kind
        self._instrs: list[Instr] = []

    def _named(self, name: str) -> str:
        """What the block calls a value of the graph."""
        return name

    def offload(self, local: str, tier: str) -> Copy:
        """Begin to copy a value to a tier."""
        value = self.values[local]
        copy = Copy.offload(local_value(local, value.dtype, value.shape, value.strides), tier)
        self.values[copy.issued.base] = copy.issued
        self._add(copy.issue)
        return copy

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
            emit_expansion(self, steps, inputs, outs)
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

    def split(self, outputs: Sequence[str | None]) -> tuple[Block | None, ...]:
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
