"""Which ops of a kind run in chunks: a dim sharded over an axis in time, inside one segment.

A `Split` cuts a dim of one op in c. Its results then exist a chunk at a time, and every op that can compute its
share from them does, forward and backward, as the rules of its named dims say: microbatches in small
(`rules.time_axis`). A result that keeps the dim is made chunk by chunk; one that lacks it (a weight's gradient, a
sum over the batch) is added up, and is whole after the last chunk. Ops that need to see several chunks (statistics of
the batch, a change of layout of the dim that is cut) stay whole and read whole values.

A chunk is a block of what a rank holds: the axis in time is inside those of the mesh. Therefore nothing is sent
because of it, offsets of random numbers and positions stay those of the whole, and results are those of the whole up
to the order of sums.

Source: micro-tensors of TSplit (Nie et al. 2022), chunked linear-cross-entropy (Hsu et al. 2024, "Liger Kernel"), both
as one case of a sharding rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.machine.mesh import Layout, P, Partial, Placement, R, Shard, local_shape, padded_dims
from paraplan.ir.machine.reshard import reshard_path
from paraplan.ir.model.graph import Op, Phase
from paraplan.ir.model.program import Program, SegmentKind
from paraplan.ir.plan import Split
from paraplan.rules.strategies import AxisChoice, Strategy, axis_choices, dims_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chunks:
    """What is cut, and how.

    Attributes:
        count: chunks.
        choices: per op of the joint graph, what it does along the axis in time; None where it runs whole.
        positions: value -> position of the dim of it that is cut.
    """

    count: int = 1
    choices: tuple[AxisChoice | None, ...] = ()
    positions: dict[str, int] = field(default_factory=dict)

    def of(self, index: int) -> AxisChoice | None:
        """What an op does along the axis; None where it runs whole."""
        return self.choices[index] if self.choices else None


WHOLE = Chunks()
"""Nothing is cut."""


def chunks_of(kind: SegmentKind, split: Split, strategies: Sequence[Strategy], mesh_shape: Shape) -> Chunks:
    """What runs in chunks.

    Args:
        kind: whose ops.
        split: where the cut begins.
        strategies: of every op, on the extended mesh.
        mesh_shape: of the extended mesh.
    Raises:
        InvalidPlanError: the op has no such dim, or its share does not divide.
    """
    cut = _Cut(kind, split.chunks, strategies, mesh_shape)
    ops = kind.graph.ops
    where = f"kind {kind.name}: cannot split op {split.op} along {split.dim!r} in {split.chunks}"
    if split.chunks < 2 or not 0 <= split.op < len(ops) or ops[split.op].phase is not Phase.FORWARD:
        raise InvalidPlanError(f"{where}: a split names an op of the forward and at least 2 chunks")
    first = next((c for c in axis_choices(dims_of(ops[split.op], kind.graph.values)) if c.dim == split.dim), None)
    if first is None or split.dim not in cut.chunkable(split.op):
        has = ", ".join(cut.chunkable(split.op)) or "none"
        raise InvalidPlanError(
            f"{where}: {ops[split.op].target} ({kind.graph.source_of(ops[split.op])}) can be cut so along: {has}"
        )
    return cut.follow(split.op, first)


def chunkable_dims(
    kind: SegmentKind, op: int, chunks: int, strategies: Sequence[Strategy], mesh_shape: Shape
) -> tuple[str, ...]:
    """The dims of an op that may be cut in so many chunks and leave results that have the dim.

    Args:
        kind: whose op.
        op: its index in the joint graph.
        chunks: how many.
        strategies: of every op, on the extended mesh.
        mesh_shape: of the extended mesh.
    Returns:
        Names of dims in the order of the op's choices; of an op of the backward too, though a split begins with none.
    """
    return _Cut(kind, chunks, strategies, mesh_shape).chunkable(op)


def gradients_known(program: Program, segment: int) -> bool:
    """Whether every gradient a segment's backward is given is one of the loss' numerators', known beforehand."""
    of = program.segments[segment]
    numerators = {term.numerator for term in program.loss}
    pairs = zip(program.kinds[of.kind].tangents, of.outputs, strict=True)
    return all(out in numerators for tangent, out in pairs if tangent is not None)


class _Cut:
    """Follows a cut through a kind's ops."""

    def __init__(self, kind: SegmentKind, count: int, strategies: Sequence[Strategy], mesh_shape: Shape) -> None:
        self.graph, self.count, self.strategies, self.mesh_shape = kind.graph, count, strategies, mesh_shape
        self.outputs_of = {t: out for t, out in zip(kind.tangents, kind.outputs, strict=True) if t is not None}
        self.positions: dict[str, int] = {}
        self.home: dict[str, Layout] = {}

    def chunkable(self, op: int) -> tuple[str, ...]:
        """The dims an op may begin with."""
        found = axis_choices(dims_of(self.graph.ops[op], self.graph.values))
        return tuple(c.dim for c in found if any(isinstance(out, Shard) for out in c.outputs) and self.runs(op, c))

    def follow(self, seed: int, first: AxisChoice) -> Chunks:
        """The cut from its first op on."""
        found: list[AxisChoice | None] = []
        for index, op in enumerate(self.graph.ops):
            for tangent in op.tensors:
                out = self.outputs_of.get(tangent)
                if out in self.positions:
                    self.positions[tangent] = self.positions[out]
            choice = first if index == seed else self._choice(index, op)
            found.append(choice)
            for out, layout in zip(op.outs, self.strategies[index].outputs, strict=True):
                if out is not None and layout is not None:
                    self.home[out] = layout
            if choice is not None:
                for out, place in zip(op.outs, choice.outputs, strict=True):
                    if out is not None and isinstance(place, Shard):
                        self.positions[out] = place.dim
        return Chunks(self.count, tuple(found), self.positions)

    def _choice(self, index: int, op: Op) -> AxisChoice | None:
        have: list[Placement] = [Shard(dim=self.positions[n]) if n in self.positions else R for n in op.tensors]
        if all(place == R for place in have):
            return None
        best: tuple[int, AxisChoice] | None = None
        for choice in axis_choices(dims_of(op, self.graph.values)):
            pairs = tuple(zip(have, choice.inputs, strict=True))
            fits = all(h == need or (h == R and isinstance(need, Shard)) for h, need in pairs)
            if not fits or not self.runs(index, choice):
                continue
            effort = sum(h != need for h, need in pairs)
            if best is None or effort < best[0]:
                best = effort, choice
        return None if best is None else best[1]

    def runs(self, index: int, choice: AxisChoice) -> bool:
        """Whether an op can do this, given how its values lie."""
        op, strategy, values = self.graph.ops[index], self.strategies[index], self.graph.values
        if not choice.dim or strategy.ring_axis >= 0:
            return False
        places = [(n, p, lay) for n, p, lay in zip(op.tensors, choice.inputs, strategy.inputs, strict=True)]
        for out, place, layout in zip(op.outs, choice.outputs, strategy.computed, strict=True):
            if out is not None and place is not None and layout is not None:
                places.append((out, place, layout))
        for name, place, layout in places:
            if isinstance(place, Shard) and not self._divides(values[name].shape, place.dim, layout):
                return False
            if isinstance(place, Partial) and (name in op.tensors or place != P or values[name].dtype == "bool"):
                return False
        return self._dim_divides(op, choice.dim, strategy) and self._stays(op, choice, strategy)

    def _divides(self, shape: Shape, position: int, layout: Layout) -> bool:
        padded = [each for each, _ in padded_dims(shape, layout, self.mesh_shape)]
        return position not in padded and local_shape(shape, layout, self.mesh_shape)[position] % self.count == 0

    def _dim_divides(self, op: Op, dim: str, strategy: Strategy) -> bool:
        """Where a value's dim is several named ones merged, the leading one must divide too."""
        dims = dims_of(op, self.graph.values)
        size = dims.sizes[dim]
        having = [(names, lay) for names, lay in zip(dims.inputs, strategy.inputs, strict=True) if dim in names]
        if not having:
            return False
        names, layout = having[0]
        for place, ranks in zip(layout, self.mesh_shape, strict=True):
            if place == Shard(dim=names.index(dim)):
                size, over = divmod(size, ranks)
                if over:
                    return False
        return size % self.count == 0

    def _stays(self, op: Op, choice: AxisChoice, strategy: Strategy) -> bool:
        """Whether no change of layout on the way in, or of what stays cut on the way out, touches the dim cut."""
        moved = [
            (name, place, self.home[name], layout)
            for name, place, layout in zip(op.tensors, choice.inputs, strategy.inputs, strict=True)
            if name in self.positions and name in self.home
        ]
        for out, place, before, after in zip(op.outs, choice.outputs, strategy.computed, strategy.outputs, strict=True):
            if out is not None and place is not None and before is not None and after is not None:
                moved.append((out, place, before, after))
        for name, place, before, after in moved:
            if isinstance(place, Shard) and before != after:
                shape = self.graph.values[name].shape
                path = reshard_path(shape, before, after, self.mesh_shape, frozen=1)
                if any(place.dim in (move.dim, move.to_dim) for move in path):
                    return False
        return True
