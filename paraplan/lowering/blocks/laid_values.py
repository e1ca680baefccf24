"""Values of a block by name and layout: given, made, and moved to where they are asked for.

Asking for a value in a layout it is not in emits the moves of `ir.machine.reshard` once; later requests reuse the
result. A value that is copied back from a tier is waited for when it is first asked for.
"""

from __future__ import annotations

import math

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.machine.mesh import Layout, local_shape, padded_dims
from paraplan.ir.machine.reshard import Move, reshard_path
from paraplan.ir.model.strides import contiguous_strides
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.moves import LayoutMoves
from paraplan.lowering.transfers.copies import Copy, local_value

Dims = tuple[int, ...]


class LaidValues(LayoutMoves):
    """The part of `BlockEmitter` that knows values and their layouts, and emits what brings them to others.

    Args:
        mesh_shape: of the extended mesh.
        overwrites: as of `BlockEmitter`.

    Attributes:
        zeroed: (local value, dim) where padding is zero.
        filled: the values whose padding was set.
    """

    def __init__(self, mesh_shape: Dims, overwrites: bool) -> None:
        self.mesh_shape, self.overwrites = mesh_shape, overwrites
        self.values: dict[str, LocalValue] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.inputs: dict[str, None] = {}
        self.zeroed: set[tuple[str, int]] = set()
        self.filled: dict[tuple[str, int, float], str] = {}
        self._home: dict[str, Layout] = {}
        self._given: dict[str, LocalValue] = {}
        self._arriving: dict[str, Copy] = {}
        self._at: dict[tuple[str, Layout], str] = {}
        self._origin = -1

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
        self._given[name] = local_value(name, spec.dtype, shape, strides)
        known = known_as or name
        self.specs[known] = spec
        self._home[known] = layout
        self._at[known, layout] = name
        if zeros:
            self.zeroed.update((name, dim) for dim, _ in padded_dims(spec.shape, layout, self.mesh_shape))

    def arrive(self, name: str, spec: TensorSpec, layout: Layout, copy: Copy) -> None:
        """A value that is being copied back from a tier: waited for just before it is first read.

        Args:
            name: of the value.
            spec, layout: as for `give`.
            copy: that was issued.
        """
        local = copy.done
        self._given[local] = copy.arrived
        self._arriving[local] = copy
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
        for dim, axis in padded_dims(self.specs[name].shape, move.after, self.mesh_shape):
            if axis == move.axis or (local, dim) in self.zeroed:  # padding that the move added, or that was zero before
                self.zeroed.add((result, dim))
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

    def _use(self, local: str) -> str:
        if local in self._given and local not in self.values:
            self.values[local] = self._given[local]
            copy = self._arriving.get(local)
            if copy is None:
                self.inputs[local] = None
                return local
            for value in (copy.issued, copy.source):
                self.values[value.base] = value
                self.inputs[value.base] = None
            self._add(copy.wait)
        return local

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
        self.values[name] = local_value(name, dtype, shape, strides)

    def fresh(self, name: str, dtype: str, shape: Dims) -> None:
        """Declare a value with a contiguous storage of its own.

        Args:
            name: local.
            dtype, shape: of a rank's part.
        """
        self._fresh(name, dtype, shape, contiguous_strides(shape))
