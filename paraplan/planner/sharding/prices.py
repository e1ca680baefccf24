"""What options cost: seconds per stream, of one microbatch unless said otherwise.

Prices mirror what the lowering emits for an op or a change of layout, on local shapes; a price is one number
per stream (compute first, then one per link level), so that sums and bounds can be formed from the same parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paraplan.cost_models.costs import COMPUTE, Costs
from paraplan.ir.graph import Graph, Op
from paraplan.ir.mesh import Layout, local_shape
from paraplan.ir.reshard import Move, NoPath, reshard_path
from paraplan.ir.rules.dims import op_def
from paraplan.ir.rules.strategies import Strategy
from paraplan.ir.tensor import TensorSpec

Price = tuple[float, ...]
Dims = tuple[int, ...]


def add(*prices: Price) -> Price:
    """Sum, stream by stream."""
    return tuple(map(sum, zip(*prices, strict=True)))


def scale(price: Price, factor: float) -> Price:
    """Product with a number."""
    return tuple(part * factor for part in price)


@dataclass(frozen=True)
class Prices:
    """Prices on a mesh.

    Attributes:
        costs: op and collective times.
        extended: mesh shape with the microbatch axis in front.
    """

    costs: Costs
    extended: Dims
    _moves: dict[object, Price | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def streams(self) -> tuple[str, ...]:
        """Streams in price order."""
        return (COMPUTE, *dict.fromkeys(self.costs.comm_streams))

    @property
    def zero(self) -> Price:
        """The price of nothing."""
        return (0.0,) * len(self.streams)

    def _on(self, stream: str, seconds: float) -> Price:
        return tuple(seconds if name == stream else 0.0 for name in self.streams)

    def _local(self, spec: TensorSpec, layout: Layout) -> TensorSpec:
        return TensorSpec(spec.dtype, local_shape(spec.shape, layout, self.extended))

    def op(self, op: Op, graph: Graph, strategy: Strategy) -> Price:
        """An op under a strategy on the extended mesh, with the reduction the strategy asks for."""
        inputs = tuple(self._local(graph.values[n], lay) for n, lay in zip(op.tensors, strategy.inputs, strict=True))
        outputs = tuple(
            None if n is None or lay is None else self._local(graph.values[n], lay)
            for n, lay in zip(op.outs, strategy.computed, strict=True)
        )
        definition = op_def(op.target)
        total = self.zero
        if definition is None or definition.strides != "view":
            total = self._on(COMPUTE, self.costs.op_s(op.target, op.args, op.kwargs, inputs, outputs))
        for name, computed, final in zip(op.outs, strategy.computed, strategy.outputs, strict=True):
            if name is not None and computed is not None and final is not None and computed != final:
                moved = self.reshard(graph.values[name], computed, final)
                assert moved is not None
                total = add(total, moved)
        return total

    def reshard(self, spec: TensorSpec, source: Layout, target: Layout) -> Price | None:
        """A change of layout; None where there is no way."""
        if source == target:
            return self.zero
        key = (spec, source, target)
        if key not in self._moves:
            try:
                moves = reshard_path(spec.shape, source, target, self.extended, frozen=1)
                self._moves[key] = add(self.zero, *(self._move(spec, move) for move in moves))
            except NoPath:
                self._moves[key] = None
        return self._moves[key]

    def _move(self, spec: TensorSpec, move: Move) -> Price:
        before, after = self._local(spec, move.before), self._local(spec, move.after)
        n = self.extended[move.axis]
        if move.kind == "slice":
            return self._copy("paraplan.shard", before, after)
        if move.kind == "first_only":
            return self._copy("paraplan.first_only", before, after)
        stream = self.costs.comm_streams[move.axis - 1]
        sent = self._on(stream, self.costs.collective_s(move.kind, move.axis - 1, before.nbytes))
        extra = self.zero
        split = {"reduce_scatter": move.dim, "all_to_all": move.to_dim}.get(move.kind, 0)
        if split > 0 and math.prod(before.shape[:split]) > 1:
            extra = add(extra, self._copy("paraplan.stack", before, before))
        if move.kind in ("all_gather", "all_to_all") and move.dim > 0 and math.prod(after.shape[: move.dim]) > 1:
            stacked = (
                before
                if move.kind == "all_to_all"
                else TensorSpec(before.dtype, (n * before.shape[0], *before.shape[1:]))
            )
            extra = add(extra, self._copy("paraplan.unstack", stacked, after))
        return add(sent, extra)

    def _copy(self, target: str, before: TensorSpec, after: TensorSpec) -> Price:
        return self._on(COMPUTE, self.costs.op_s(target, ("%x",), {}, (before,), (after,)))

    def memory(self, read_bytes: int, write_bytes: int) -> Price:
        """A kernel that only moves bytes."""
        return self._on(COMPUTE, self.costs.memory_s(read_bytes, write_bytes))

    def moved(self, read_bytes: int, write_bytes: int) -> Price:
        """What more bytes add to such a kernel: no launch."""
        return self._on(COMPUTE, self.costs.memory_s(read_bytes, write_bytes) - self.costs.memory_s(0, 0))

    def nbytes(self, spec: TensorSpec, layout: Layout) -> int:
        """Local bytes."""
        return self._local(spec, layout).nbytes
