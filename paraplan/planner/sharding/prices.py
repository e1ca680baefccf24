"""What options cost: seconds per stream, of one microbatch unless said otherwise.

Prices mirror what the lowering emits for an op or a change of layout, on local shapes; a price is one number
per stream (compute first, then one per link level), so that sums and bounds can be formed from the same parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paraplan.cost_models.communication.collectives import input_bytes_of
from paraplan.cost_models.costs import Costs
from paraplan.ir.execution.streams import COMPUTE, IN, OUT, Stream, copy_stream, update_stream
from paraplan.ir.machine.collectives import COLLECTIVES
from paraplan.ir.machine.mesh import Layout, R, S, local_shape
from paraplan.ir.machine.reshard import SLICE, Move, ReshardTable, reshard_table
from paraplan.ir.machine.tier_placement import HERE, TierPlacement
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.graph import Graph, Op
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.bundle import is_small
from paraplan.lowering.rewrites.whole_norms import vanishing
from paraplan.rules.carried_rules import registered_work
from paraplan.rules.dims import op_def
from paraplan.rules.localise import expansion
from paraplan.rules.strategies import Strategy

Price = tuple[float, ...]
Floats = NDArray[np.float64]
Dims = tuple[int, ...]


def add(*prices: Price) -> Price:
    """Sum, stream by stream."""
    return tuple(map(sum, zip(*prices, strict=True)))


def scale(price: Price, factor: float) -> Price:
    """Product with a number."""
    return tuple(part * factor for part in price)


@dataclass(frozen=True)
class MeshPrices:
    """Prices on a mesh.

    Attributes:
        costs: op and collective times.
        extended: mesh shape with the microbatch axis in front.
        places: where optimizer states may be; copies and updates off the device have streams of their own.
    """

    costs: Costs
    extended: Dims
    places: tuple[TierPlacement, ...] = (HERE,)
    _moves: dict[object, Price | None] = field(default_factory=dict, repr=False, compare=False)
    _locals: dict[object, TensorSpec] = field(default_factory=dict, repr=False, compare=False)
    _totals: dict[object, tuple[Floats, ReshardTable]] = field(default_factory=dict, repr=False, compare=False)
    _joined: dict[int, tuple[Graph, frozenset[str]]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """Streams in price order."""
        tiers = dict.fromkeys(tier for place in self.places if place.states for tier in TIERS[place.states].way)
        away = ((copy_stream(tier, OUT), update_stream(tier), copy_stream(tier, IN)) for tier in tiers)
        return (COMPUTE, *dict.fromkeys(self.costs.moves.comm_streams), *itertools.chain.from_iterable(away))

    @cached_property
    def zero(self) -> Price:
        """The price of nothing."""
        return (0.0,) * len(self.streams)

    def _on(self, stream: Stream, seconds: float) -> Price:
        at = self.streams.index(stream)
        return (*self.zero[:at], seconds, *self.zero[at + 1 :])

    def _sent(self, target: str, axis: int, size: int, bundled: bool = False) -> Price:
        """A collective over an axis: its stream's time, and the compute it takes meanwhile; the least, in a bundle."""
        costs = self.costs
        seconds = (costs.moves.collective_share_s if bundled else costs.moves.collective_s)(target, axis, size)
        taken = (costs.moves.taken_share_s if bundled else costs.moves.taken_s)(target, axis, size)
        return add(self._on(costs.moves.comm_streams[axis], seconds), self._on(COMPUTE, taken))

    def _local(self, spec: TensorSpec, layout: Layout) -> TensorSpec:
        key = (spec, layout)
        if key not in self._locals:
            self._locals[key] = TensorSpec(spec.dtype, local_shape(spec.shape, layout, self.extended))
        return self._locals[key]

    def ops(self, op: Op, graph: Graph, strategies: Sequence[Strategy]) -> Floats:
        """[option, stream] an op under strategies on the extended mesh, with the reductions they ask for.

        An op's time depends on its local shapes alone, which many strategies share. Where all samples are here, a part
        of a batch norm costs what it adds to the whole.

        Args:
            op, graph: the op and the specs of its graph.
            strategies: on the extended mesh.
        """
        joins = self._vanishes(op, graph)
        specs = tuple(graph.values[name] for name in op.tensors)
        outs = tuple(None if name is None else graph.values[name] for name in op.outs)
        found = np.zeros((len(strategies), len(self.streams)))
        known: dict[object, Price] = {}
        for number, strategy in enumerate(strategies):
            steps = expansion(op, graph.values, strategy, self.extended)
            if steps is not None:
                found[number] = add(self.zero, *(self._step(step, steps) for step in steps.ops))
                continue
            inputs = tuple(map(self._local, specs, strategy.inputs))
            if joins and self._has_all_samples(specs, strategy.inputs):
                found[number] = self._on(
                    COMPUTE, self.costs.memory_s(_again(op, inputs), 0) - self.costs.memory_s(0, 0)
                )
                continue
            outputs = tuple(
                None if spec is None or lay is None else self._local(spec, lay)
                for spec, lay in zip(outs, strategy.computed, strict=True)
            )
            if (inputs, outputs) not in known:
                known[inputs, outputs] = self._kernel(op, inputs, outputs)
            found[number] = known[inputs, outputs]
        for slot, spec in enumerate(outs):
            moves = [
                (number, strategy.computed[slot], strategy.outputs[slot]) for number, strategy in enumerate(strategies)
            ]
            changed = [
                (number, now, then)
                for number, now, then in moves
                if now is not None and then is not None and now != then
            ]
            if spec is not None and changed:
                numbers, now, then = zip(*changed, strict=True)
                found[list(numbers)] += self.each(spec, now, then)
        return found

    def _vanishes(self, op: Op, graph: Graph) -> bool:
        if self.costs.cluster.backend == "cpu":
            return False
        if id(graph) not in self._joined:
            self._joined[id(graph)] = graph, vanishing(graph)
        return not self._joined[id(graph)][1].isdisjoint(op.outs)

    def _has_all_samples(self, specs: tuple[TensorSpec, ...], layouts: Sequence[Layout]) -> bool:
        """Whether tensors are whole, or cut by channels alone."""
        return all(
            size == 1 or place == R or place == S(min(1, len(spec.shape) - 1))
            for spec, layout in zip(specs, layouts, strict=True)
            for size, place in zip(self.extended, layout, strict=True)
        )

    def _kernel(self, op: Op, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec | None, ...]) -> Price:
        definition = op_def(op.target)
        if definition is not None and definition.strides == "view":
            return self.zero
        registered = registered_work(op, [spec.shape for spec in inputs])
        seconds = self.costs.op_s(op.target, op.args, op.kwargs, inputs, outputs, registered)
        return self._on(COMPUTE, seconds + self.costs.loop_s(op.target, op.args))

    def each(
        self, spec: TensorSpec, sources: Sequence[Layout], targets: Sequence[Layout], bundled: bool = False
    ) -> Floats:
        """[pair, stream] the first source to the first target, the second to the second, and so on.

        Args:
            spec: of the value, global.
            sources, targets: layouts on the extended mesh, as many.
            bundled: as of `transfers`.
        """
        rows = {layout: number for number, layout in enumerate(dict.fromkeys(sources))}
        columns = {layout: number for number, layout in enumerate(dict.fromkeys(targets))}
        table = self.transfers(spec, tuple(rows), tuple(columns), bundled)
        found: Floats = table[[rows[layout] for layout in sources], [columns[layout] for layout in targets]]
        assert np.isfinite(found).all()
        return found

    def _step(self, step: Op, steps: Graph) -> Price:
        """One op of a ring's expansion, whose values are local."""
        inputs = tuple(steps.values[name] for name in step.tensors)
        if step.target in COLLECTIVES:
            size = input_bytes_of(step.target, step.args, inputs[0])
            return self._sent(step.target, int(step.kwargs["axis"]), size)
        outputs = tuple(None if name is None else steps.values[name] for name in step.outs)
        return self._on(COMPUTE, self.costs.op_s(step.target, step.args, step.kwargs, inputs, outputs))

    def reshard(
        self, spec: TensorSpec, source: Layout, target: Layout, bundled: bool = False, wire: str = ""
    ) -> Price | None:
        """A change of layout; None where there is no way.

        Args:
            spec: of the whole value.
            source, target: layouts on the extended mesh.
            bundled, wire: as of `transfers`.
        """
        if source == target:
            return self.zero
        key = (spec, source, target, bundled, wire)
        if key not in self._moves:
            price = self.transfers(spec, (source,), (target,), bundled, wire)[0, 0]
            self._moves[key] = tuple(price.tolist()) if np.isfinite(price).all() else None
        return self._moves[key]

    def transfers(
        self,
        spec: TensorSpec,
        sources: tuple[Layout, ...],
        targets: tuple[Layout, ...],
        bundled: bool = False,
        wire: str = "",
    ) -> Floats:
        """[source, target, stream] prices of changing a value's layout; infinite where there is no way.

        Args:
            spec: of the whole value.
            sources, targets: layouts on the extended mesh.
            bundled: whether lowering puts small values of this sort (parameters, their gradients) into one collective
                with others, so that they are priced at what they add to one at least (a bound must hold however many
                share it).
            wire: the dtype a value is cast to before it is summed over ranks; "": its own.
        """
        table = reshard_table(spec.shape, self.extended, 1, (*sources, *targets))
        if wire not in ("", spec.dtype):
            sums = self._sums(table, sources, targets)[:, :, None]
            cast = np.array([self._wire_cast(spec, wire, source) for source in sources])[:, None]
            as_is = self.transfers(spec, sources, targets, bundled)
            return np.where(sums, self.transfers(TensorSpec(wire, spec.shape), sources, targets, bundled) + cast, as_is)
        key = (spec, id(table), bundled)
        if key not in self._totals:
            moves = np.array([self._move(spec, move, bundled) for move in table.moves]).reshape(-1, len(self.streams))
            self._totals[key] = table.totals(moves), table
        totals = self._totals[key][0]
        rows, columns = ([table.index[layout] for layout in layouts] for layouts in (sources, targets))
        found: Floats = totals[np.ix_(rows, columns)]
        return found

    def _wire_cast(self, spec: TensorSpec, wire: str, source: Layout) -> Price:
        """A gradient cast to what it is summed in; nothing of halves on CUDA, where the product may give it so at once
        (`lowering.rewrites.wide_grads`)."""
        is_wide = self.costs.cluster.backend != "cpu" and wire == "float32" and spec.dtype in ("bfloat16", "float16")
        return self.zero if is_wide else self.cast(spec, wire, source)

    def sums(self, spec: TensorSpec, source: Layout, target: Layout) -> bool:
        """Whether a change of layout sums over ranks.

        Args:
            spec: of the value, global.
            source, target: layouts on the extended mesh.
        """
        table = reshard_table(spec.shape, self.extended, 1, (source, target))
        return bool(self._sums(table, (source,), (target,))[0, 0])

    def _sums(self, table: ReshardTable, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> NDArray[np.bool_]:
        """[source, target] whether the moves between layouts sum over ranks."""
        reduce = np.array([bool(move.reduction) and self.extended[move.axis] > 1 for move in table.moves], np.float64)
        rows, columns = ([table.index[layout] for layout in layouts] for layouts in (sources, targets))
        found: NDArray[np.bool_] = table.totals(reduce)[np.ix_(rows, columns)] > 0
        return found

    def _move(self, spec: TensorSpec, move: Move, bundled: bool) -> Price:
        before, after = self._local(spec, move.before), self._local(spec, move.after)
        n = self.extended[move.axis]
        if n == 1:
            return self.zero
        if move.kind == SLICE:
            return self._copy("paraplan.shard", before, after)
        if move.collective is None:
            return self._copy("paraplan.first_only", before, after)
        axis = move.axis - 1
        split = move.split_dim
        sent = before if split < 0 else _resized(before, split, n * after.shape[split])
        if bundled and is_small(spec, move, self.extended):
            return self._sent(move.kind, axis, before.nbytes, bundled=True)
        total = self._sent(move.kind, axis, sent.nbytes)
        if split >= 0 and (sent != before or math.prod(before.shape[:split]) > 1):
            total = add(total, self._copy("paraplan.stack", before, sent))
        if move.collective.joins and move.dim > 0 and math.prod(after.shape[: move.dim]) > 1:
            joined = TensorSpec(sent.dtype, move.collective.result_shape(sent.shape, n))
            total = add(total, self._copy("paraplan.unstack", joined, after))
        return total

    def _copy(self, target: str, before: TensorSpec, after: TensorSpec) -> Price:
        return self._on(COMPUTE, self.costs.op_s(target, ("%x",), {}, (before,), (after,)))

    def write(self, spec: TensorSpec, layout: Layout, dtype: str) -> Price:
        """A value of some dtype written over another one; on CUDA without the launch, which many share.

        Args:
            spec: of the value, global.
            layout: on the extended mesh.
            dtype: of the value that is written.
        """
        over, value = self._local(spec, layout), self._local(TensorSpec(dtype, spec.shape), layout)
        seconds = self.costs.op_s("paraplan.write", ("%0", "%1"), {}, (over, value), ())
        shared = 0.0 if self.costs.cluster.backend == "cpu" else self.costs.memory_s(0, 0)
        return self._on(COMPUTE, max(0.0, seconds - shared))

    def updated(self, param_bytes: int, slots: int) -> Price:
        """What a parameter adds to the optimizer's update, with its gradient and `slots` states."""
        read_bytes, write_bytes = param_bytes * (2 + slots), param_bytes * (1 + slots)
        return self._on(COMPUTE, self.costs.update_share_s(param_bytes, read_bytes, write_bytes))

    def updated_away(self, tier: str, param_bytes: int, slots: int, back: bool, copies: bool = True) -> Price:
        """A parameter's gradient copied to a tier, its update there, and the way back.

        Args:
            tier: where states are.
            param_bytes: of a rank's share.
            slots: states of that size.
            back: whether the updated parameter is copied back.
            copies: whether the gradient is copied there, and not there already.
        """
        update = self._on(update_stream(tier), self.costs.update_away_s(tier, param_bytes * (3 + 2 * slots)))
        copied = self._on(copy_stream(tier, OUT), self.costs.moves.copy_s(tier, param_bytes)) if copies else self.zero
        return add(copied, update, self.fetched(tier, param_bytes)) if back else add(copied, update)

    def staged(self, tier: str, nbytes: int, from_host: bool) -> Price:
        """States copied from a tier to where they are updated, the host or the device; back goes beside it.

        Args:
            tier: where the states live.
            nbytes: of them.
            from_host: whether they are copied from the memory on the way.
        """
        return self._on(copy_stream(tier, IN), self.costs.moves.copy_s(tier, nbytes, from_host, not from_host))

    def kept(self, tier: str, nbytes: int, from_host: bool) -> Price:
        """A gradient copied to a tier, and from there to its update.

        Args:
            tier: where the gradient waits.
            nbytes: of it.
            from_host: as of `staged`.
        """
        away = self._on(copy_stream(tier, OUT), self.costs.moves.copy_s(tier, nbytes))
        return add(away, self.staged(tier, nbytes, from_host))

    def fetched(self, tier: str, nbytes: int) -> Price:
        """A parameter copied from a tier to the device."""
        return self._on(copy_stream(tier, IN), self.costs.moves.copy_s(tier, nbytes))

    def cast(self, spec: TensorSpec, dtype: str, layout: Layout) -> Price:
        """A value in another dtype; nothing where it has that.

        Args:
            spec: of the value, global.
            dtype: that it is cast to.
            layout: on the extended mesh.
        """
        local = self._local(spec, layout)
        return (
            self.zero
            if dtype == spec.dtype
            else self._copy("aten._to_copy.default", local, TensorSpec(dtype, local.shape))
        )

    def nbytes(self, spec: TensorSpec, layout: Layout) -> int:
        """Local bytes."""
        return self._local(spec, layout).nbytes


_AGAIN = {
    "paraplan.bn_squares": (0,),
    "paraplan.bn_grad_affine": (0, 1),
    "aten.threshold_backward.default": (1, 1),
    "aten.add.Tensor": (0,),
}
"""What a batch norm of all samples reads for a part of it besides what its last part does, by that part's inputs."""


def _again(op: Op, inputs: tuple[TensorSpec, ...]) -> int:
    """Bytes that a part adds to a batch norm of all samples."""
    return sum(inputs[position].nbytes for position in _AGAIN.get(op.target, ()))


def _resized(spec: TensorSpec, dim: int, size: int) -> TensorSpec:
    return TensorSpec(spec.dtype, (*spec.shape[:dim], size, *spec.shape[dim + 1 :]))
