"""Changes of layout in a block: collectives, cuts, and the copies that bring chunks of any dim to dim 0 and back.

Collectives gather, scatter and exchange along dim 0 of contiguous values; `paraplan.stack` lays the chunks of another
dim one after another along dim 0 first, `paraplan.unstack` does the inverse afterwards, and both are views where
nothing but ones leads the dim. Where blocks are padded, a cut and `stack` pad with zeros, and `unstack` (or a slice of
the view) drops the padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from paraplan.ir.execution.rank_program import Instr, InstrKind, LocalValue
from paraplan.ir.machine.collectives import COLLECTIVES, Collective
from paraplan.ir.machine.mesh import layout_text, local_shape
from paraplan.ir.machine.reshard import FIRST_ONLY, SLICE, Move
from paraplan.ir.model.strides import contiguous_strides, is_contiguous
from paraplan.ir.model.tensor import TensorSpec
from paraplan.rules.localise import axis_key

if TYPE_CHECKING:
    from paraplan.ir.model.graph import Arg

Dims = tuple[int, ...]


class _Exchange(NamedTuple):
    """A collective over a mesh axis; `more`: its further arguments, `change`: it changes a value's layout."""

    collective: Collective
    axis: int
    reduction: str
    change: bool
    in_place: bool = False
    more: tuple[Arg, ...] = ()


class LayoutMoves:
    """The part of `BlockEmitter` that emits moves and exchanges."""

    mesh_shape: Dims
    overwrites: bool
    values: dict[str, LocalValue]
    specs: dict[str, TensorSpec]
    _origin: int

    if TYPE_CHECKING:

        def local(
            self,
            target: str,
            args: tuple[Arg, ...],
            out: str,
            dtype: str,
            shape: Dims,
            kwargs: dict[str, Arg] | None = None,
        ) -> str:
            """Emit an op with one fresh result."""

        def view(
            self, target: str, args: tuple[Arg, ...], source: str, out: str, shape: Dims, change: bool = False
        ) -> None:
            """Emit a view."""

        def fresh(self, name: str, dtype: str, shape: Dims) -> None:
            """Declare a value."""

        def _add(self, instr: Instr) -> None: ...

        def _unique(self, stem: str) -> str: ...

    def _move(self, name: str, local: str, move: Move) -> str:
        """Emit one move; returns the local name of the result."""
        stem = f"{name}@{layout_text(move.after)}"
        value = self.values[local]
        after = local_shape(self.specs[name].shape, move.after, self.mesh_shape)
        n = self.mesh_shape[move.axis]
        if move.kind == SLICE:
            start = f"#{axis_key(move.axis)}:{after[move.dim]}"
            return self.local(
                "paraplan.shard",
                ("%" + local, move.dim, after[move.dim], start),
                self._unique(stem),
                value.dtype,
                after,
            )
        if move.kind == FIRST_ONLY:
            return self.local(
                "paraplan.first_only",
                ("%" + local, f"#{axis_key(move.axis)}:1"),
                self._unique(stem),
                value.dtype,
                after,
            )
        split = move.split_dim
        pads = split >= 0 and n * after[split] != value.shape[split]
        if not pads and not is_contiguous(value.shape, value.strides):
            local = self.copy_rows(local, self._unique(stem))
        if split >= 0:
            local = self._stack(local, stem, n, split, after[split])
        exchanged = self.exchange(move, local, stem, self.overwrites)
        joins = move.collective is not None and move.collective.joins
        return self._unstack(exchanged, stem, n, move.dim, after) if joins else exchanged

    def _stack(self, local: str, stem: str, n: int, dim: int, block: int) -> str:
        """Blocks along `dim` laid one after another along dim 0; a view where nothing but ones leads."""
        value = self.values[local]
        pads = n * block != value.shape[dim]
        if dim == 0 and not pads:
            return local
        first, *rest = (block if i == dim else size for i, size in enumerate(value.shape))
        shape = (n * first, *rest)
        out = self._unique(stem)
        if pads:
            return self.local("paraplan.stack", ("%" + local, n, dim, block), out, value.dtype, shape)
        if math.prod(value.shape[:dim]) == 1:
            self.view("aten.view.default", ("%" + local, shape), local, out, shape, change=True)
            return out
        return self.local("paraplan.stack", ("%" + local, n, dim), out, value.dtype, shape)

    def _unstack(self, local: str, stem: str, n: int, dim: int, after: Dims) -> str:
        """The inverse: blocks along dim 0 laid side by side along `dim`, without their padding."""
        value = self.values[local]
        block = value.shape[0] // n if dim == 0 else value.shape[dim]
        pads = n * block != after[dim]
        if dim == 0 and not pads:
            return local
        out = self._unique(stem)
        if math.prod(after[:dim]) != 1:
            args = ("%" + local, n, dim, *((after[dim],) if pads else ()))
            return self.local("paraplan.unstack", args, out, value.dtype, after)
        if dim > 0:
            joined = (*after[:dim], n * block, *after[dim + 1 :])
            self.view("aten.view.default", ("%" + local, joined), local, out, joined, change=True)
        if pads:
            local, out = (out, self._unique(stem)) if dim > 0 else (local, out)
            self.view("aten.slice.Tensor", ("%" + local, dim, 0, after[dim], 1), local, out, after, change=True)
        return out

    def copy_rows(self, local: str, out: str) -> str:
        """Emit a copy of a value, row-major in a storage of its own; returns `out`, its local name."""
        value = self.values[local]
        return self.local("paraplan.reshape_copy", ("%" + local, value.shape), out, value.dtype, value.shape)

    def exchange(self, move: Move, local: str, stem: str, in_place: bool = False) -> str:
        """Emit a move's collective of a contiguous value; returns the local name of its result.

        Args:
            move: with a collective.
            local: name of the contiguous value.
            stem: of the result's name.
            in_place: whether one that can may overwrite the value.
        """
        assert move.collective is not None, move
        done = self._unique(stem)
        issued = self._unique(stem + "!")
        shape = move.collective.result_shape(self.values[local].shape, self.mesh_shape[move.axis])
        how = _Exchange(move.collective, move.axis - 1, move.reduction, change=True, in_place=in_place)
        self._exchange(how, local, issued, done, shape)
        return done

    def step(
        self, target: str, sources: Sequence[str], more: tuple[Arg, ...], out: str, shape: Dims, axis: int
    ) -> None:
        """Emit a collective of an expansion: its first source is sent.

        Args:
            target: the collective.
            sources: local names; those after the first say how.
            more: further arguments, which say how.
            out, shape: local name and shape of the result.
            axis: of the mesh.
        """
        value, local = self.values[sources[0]], sources[0]
        if not is_contiguous(value.shape, value.strides):
            local = self.copy_rows(local, self._unique(out))
        how = (*("%" + source for source in sources[1:]), *more)
        collective = COLLECTIVES[target]
        exchange = _Exchange(collective, axis, collective.reduction, change=False, more=how)
        self._exchange(exchange, local, out + "!", out, shape)

    def _exchange(
        self,
        how: _Exchange,
        local: str,
        issued: str,
        done: str,
        shape: Dims,
    ) -> None:
        """A collective of a contiguous value and its wait, which holds its inputs where they are read until then."""
        collective = how.collective
        dtype = self.values[local].dtype
        self.fresh(issued, dtype, shape)
        self.values[done] = LocalValue(
            dtype=dtype, shape=shape, strides=contiguous_strides(shape), base=issued, storage_bytes=0
        )
        if how.in_place and collective.in_place:
            self.values[issued] = msgspec.structs.replace(
                self.values[issued], base=self.values[local].base, storage_bytes=0
            )
        held = () if collective.in_place else ("%" + local, *(arg for arg in how.more if isinstance(arg, str)))
        for kind, name, args, out in (
            (InstrKind.COLLECTIVE, collective.name, ("%" + local, ":" + how.reduction, *how.more), issued),
            (InstrKind.WAIT, "wait", ("%" + issued, *held), done),
        ):
            instr = Instr(kind=kind, target=name, args=args, outs=(out,), axis=how.axis, origin=self._origin)
            self._add(msgspec.structs.replace(instr, layout_change=how.change))
