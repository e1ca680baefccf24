"""A kind under one choice -> its forward block; what the backward (`backward`) shares with it.

Backward values that the forward made are saved in the layout they were produced in, or made again just before the
backward first reads them (`remat`), or wait on a tier (`activation_offload`); inputs of the segment and its outputs
are not saved again, for the outer namespace holds them. A sharded parameter is gathered in each phase anew, used and
freed: a small one before the block, with those of other segments, a large one where the plan says so, else inside the
block (`early`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import msgspec

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.rank_program import Block, BlockRole
from paraplan.ir.machine.mesh import Layout, P, R
from paraplan.ir.machine.reshard import Move, reshard_path
from paraplan.ir.model.graph import Op, Phase
from paraplan.ir.model.program import SegmentKind
from paraplan.ir.model.strides import contiguous_strides, is_dense
from paraplan.ir.plan import KindChoice
from paraplan.lowering.blocks.bundle import bundle_key
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.blocks.remat import NOTHING, Remat, read_by_backward, remat_of
from paraplan.lowering.rewrites.chunks import WHOLE, Chunks, chunks_of
from paraplan.lowering.rewrites.float8_casts import casts_first
from paraplan.lowering.rewrites.loops import emit_ops
from paraplan.lowering.transfers.copies import Copy
from paraplan.rules.strategies import Strategy, op_strategies, strategy_named
from paraplan.rules.time_axis import KindMicro, extend

Dims = tuple[int, ...]
Path = tuple[Move, ...]


@dataclass(frozen=True)
class Given:
    """A value a block can be given: its layout on the extended mesh and its strides (None: contiguous)."""

    layout: Layout
    strides: Dims | None = None


@dataclass(frozen=True)
class KindContext:
    """All that shapes a kind's blocks besides the choice: equal contexts share blocks.

    Attributes:
        num_microbatches, mesh_shape: of the stage.
        inputs: per boundary input.
        params: per parameter slot, where it is stored.
        param_grads: per parameter slot, the layout its gradient is handed over in (on the mesh).
        grad_dtypes: per parameter slot, the dtype its gradient leaves the backward in, "" for that it is made in.
        reduce_dtype: what they are cast to before they are summed over ranks, "" for nothing.
        grouped: whether gradients leave the backward as they are made, to be added up before they are reduced.
        fetched: per parameter slot, whether it comes only shortly before the block, from a tier (see
        `param_prefetch`) or from
            where it rests (see `param_allgather`); empty: none does.
        ahead: whether large parameters are gathered before the block, too.
        rows: of a segment of the tail, per boundary input the dim that microbatches cut; empty elsewhere.
    """

    num_microbatches: int
    mesh_shape: Dims
    inputs: tuple[Given, ...]
    params: tuple[Layout, ...]
    param_grads: tuple[Layout, ...]
    grad_dtypes: tuple[str, ...]
    reduce_dtype: str = ""
    grouped: bool = False
    fetched: tuple[bool, ...] = ()
    ahead: bool = False
    rows: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class LoweredForward:
    """The forward block and what it hands on.

    Attributes:
        block: its inputs keep the graph's names (parameters, boundary inputs, seed).
        outputs: per output, where and how it lies.
        saved: graph name -> (local name in the block, how it lies) of every value saved for the backward.
        offloads: the copies of those that wait on a tier, by graph name; the block issues them.
        strategies: of every op, on the extended mesh.
        early: per parameter slot, the gather that is made before the block; None where there is none.
        remat: what the backward executes again.
    """

    block: Block
    outputs: tuple[Given, ...]
    saved: dict[str, tuple[str, Given]]
    strategies: tuple[Strategy, ...]
    early: tuple[Move | None, ...]
    remat: Remat = NOTHING
    offloads: dict[str, Copy] = field(default_factory=dict)


def chosen_strategies(
    kind: SegmentKind, choice: KindChoice, micro: KindMicro, mesh_shape: Dims, m: int
) -> tuple[Strategy, ...]:
    """The strategy of every op, on the extended mesh.

    Args:
        kind, choice: whose ops, and the keys of their strategies.
        micro: what ops do along the microbatch axis.
        mesh_shape: size of every axis.
        m: number of microbatches.
    Raises:
        InvalidPlanError: a key names no legal strategy of its op.
    """
    if len(choice.ops) != len(kind.graph.ops):
        raise InvalidPlanError(
            f"kind {kind.name} has {len(kind.graph.ops)} ops, the plan chooses for {len(choice.ops)}"
        )
    found = []
    for op, key, along in zip(kind.graph.ops, choice.ops, micro.choices, strict=True):
        strategy = strategy_named(op, kind.graph.values, mesh_shape, key, along, m)
        if strategy is None:
            legal = op_strategies(op, kind.graph.values, mesh_shape, along, m)
            raise InvalidPlanError(
                f"kind {kind.name}, {op.target} ({kind.graph.source_of(op)}): {key!r} is no legal strategy on "
                f"mesh {mesh_shape}; legal: {', '.join(option.key for option in legal[:12])}"
            )
        found.append(extend(strategy, along))
    return tuple(found)


def _summed_late(kind: SegmentKind, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """The strategies without sums over ranks of gradients that are cast for them, which come when they leave."""
    grads = own_grads(kind)
    return tuple(
        replace(strategy, outputs=strategy.computed) if op.outs and op.outs[0] in grads else strategy
        for op, strategy in zip(kind.graph.ops, strategies, strict=True)
    )


def own_grads(kind: SegmentKind) -> frozenset[str]:
    """The gradients of parameters that no op of the kind reads."""
    read = {name for op in kind.graph.ops for name in op.tensors}
    return frozenset(grad for grad in kind.param_grads if grad is not None and grad not in read)


def lower_forward(
    name: str, kind: SegmentKind, choice: KindChoice, micro: KindMicro, context: KindContext
) -> LoweredForward:
    """Lower a kind's forward ops.

    Args:
        name: of the block.
        kind, choice: what is lowered, and what the plan decides of it.
        micro: what its ops do along the microbatch axis.
        context: the mesh, and where values are given.
    """
    m = context.num_microbatches
    strategies = chosen_strategies(kind, choice, micro, context.mesh_shape, m)
    if context.reduce_dtype:
        strategies = _summed_late(kind, strategies)
    chunks = chosen_chunks(kind, choice, strategies, context)
    kind = executed(kind, choice)
    remat = remat_of(kind, choice.activations)
    emitter = BlockEmitter(name, (m, *context.mesh_shape), BlockRole.FORWARD, kind.name)
    gathered = early(kind, strategies, ops_of(kind, Phase.FORWARD), context)
    give_sources(emitter, kind, context, gathered)
    if at_once(choice):
        for tangent in filter(None, kind.tangents):
            emitter.give(tangent, kind.graph.values[tangent], (R,) * (1 + len(context.mesh_shape)))
    order = casts_first(kind, strategies, ops_of(kind, Phase.FORWARD))
    emit_ops(emitter, kind.graph, strategies, order, chunks, (*kind.outputs, *remat.saved))
    layouts = tuple(_output_layout(emitter.home(out), out, kind, m) for out in kind.outputs)
    locals_ = tuple(emitter.get(out, layout) for out, layout in zip(kind.outputs, layouts, strict=True))
    outputs = tuple(Given(lay, emitter.values[local].strides) for lay, local in zip(layouts, locals_, strict=True))
    saved = {}
    values = (*remat.saved, *_as_made(emitter, kind, remat, layouts))
    lies = _saved_layouts(emitter, kind, strategies, remat)
    kept: tuple[str | None, ...] = tuple(emitter.get(value, lies.get(value, emitter.home(value))) for value in values)
    for value, local in zip(values, unshared(emitter, kept) if at_once(choice) else kept, strict=True):
        assert local is not None
        saved[value] = (local, Given(lies.get(value, emitter.home(value)), emitter.values[local].strides))
    offloads = {value: emitter.offload(saved[value][0], tier) for value, tier in remat.offloaded}
    issued = (copy.issued.base for copy in offloads.values())
    block = emitter.finish(locals_, (*(local for local, _ in saved.values()), *issued))
    return LoweredForward(block, outputs, saved, strategies, gathered, remat, offloads)


def _saved_layouts(
    emitter: BlockEmitter, kind: SegmentKind, strategies: Sequence[Strategy], remat: Remat
) -> dict[str, Layout]:
    """How saved values lie that do not lie as they were made: as all of the backward reads them, where they were
    brought to that for the forward and take no more room (a product's partial sums, once they were summed)."""
    wanted: dict[str, set[Layout]] = {}
    ops = kind.graph.ops
    for index in (*ops_of(kind, Phase.BACKWARD), *remat.again, *remat.rerun):
        for name, layout in zip(ops[index].tensors, strategies[index].inputs, strict=True):
            wanted.setdefault(name, set()).add(layout)
    found = {}
    for name in set(remat.saved) - set(kind.param_grads) - set(kind.input_grads):
        (layout, *more) = wanted.get(name, ()) or (emitter.home(name),)
        if not more and layout != emitter.home(name) and emitter.lean(name, layout):
            found[name] = layout
    return found


def _as_made(emitter: BlockEmitter, kind: SegmentKind, remat: Remat, layouts: Sequence[Layout]) -> list[str]:
    """Outputs that the backward reads and that do not leave as they were made: a scalar of which microbatches have
    their share (a count that forward updates)."""
    read = set(read_by_backward(kind)).union(*(kind.graph.ops[index].tensors for index in remat.again))
    return [
        out
        for out, layout in zip(kind.outputs, layouts, strict=True)
        if out in read and emitter.home(out) != layout and emitter.home(out)[0] == R
    ]


def evaluate_forward(
    name: str, kind: SegmentKind, choice: KindChoice, micro: KindMicro, context: KindContext
) -> LoweredForward:
    """Lower a kind's forward for an evaluation: nothing saved, nothing random; outputs, then asides.

    Ops whose results only the backward reads are left out, and dropout is its input.

    Args:
        name, kind, choice, micro, context: as of `lower_forward`.
    """
    m, graph = context.num_microbatches, kind.graph
    strategies = chosen_strategies(kind, choice, micro, context.mesh_shape, m)
    emitter = BlockEmitter(name, (m, *context.mesh_shape), BlockRole.EVALUATION, kind.name)
    results = (*kind.outputs, *kind.asides)
    needed = set(results)
    for op in reversed(graph.ops):
        if op.phase is Phase.FORWARD and not needed.isdisjoint(op.outs):
            needed.update(op.tensors)
    taken = [index for index in ops_of(kind, Phase.FORWARD) if not needed.isdisjoint(graph.ops[index].outs)]
    taken = casts_first(kind, strategies, taken)
    gathered = early(kind, strategies, taken, context)
    give_sources(emitter, kind, context, gathered)

    def calm(to: BlockEmitter, index: int, strategy: Strategy) -> None:
        op = graph.ops[index]
        if op.target == "paraplan.dropout":
            assert op.outs[0] is not None and strategy.computed[0] is not None
            to.rename(op.outs[0], op.tensors[0], strategy.inputs[0])
        else:
            to.op(_certain(op), graph, strategy, index)

    emit_ops(emitter, graph, strategies, taken, chosen_chunks(kind, choice, strategies, context), results, emit=calm)
    layouts = tuple(_output_layout(emitter.home(out), out, kind, m) for out in results)
    locals_ = tuple(emitter.get(out, layout) for out, layout in zip(results, layouts, strict=True))
    outputs = tuple(Given(lay, emitter.values[local].strides) for lay, local in zip(layouts, locals_, strict=True))
    return LoweredForward(emitter.finish(locals_, ()), outputs, {}, strategies, gathered)


def at_once(choice: KindChoice) -> bool:
    """Whether the backward runs with the forward."""
    return choice.split is not None and choice.split.at_once


def executed(kind: SegmentKind, choice: KindChoice) -> SegmentKind:
    """The kind as its choice runs it: where forward and backward are one, all of its ops are the forward's."""
    if not at_once(choice):
        return kind
    ops = tuple(msgspec.structs.replace(op, phase=Phase.FORWARD) for op in kind.graph.ops)
    return msgspec.structs.replace(kind, graph=msgspec.structs.replace(kind.graph, ops=ops))


def chosen_chunks(
    kind: SegmentKind, choice: KindChoice, strategies: tuple[Strategy, ...], context: KindContext
) -> Chunks:
    """What of the kind runs in chunks.

    Args:
        kind, choice: what is lowered, and what the plan decides of it.
        strategies: of its ops.
        context: the mesh.
    """
    if choice.split is None:
        return WHOLE
    return chunks_of(kind, choice.split, strategies, (context.num_microbatches, *context.mesh_shape))


def unshared(
    emitter: BlockEmitter,
    results: tuple[str | None, ...],
    saved: tuple[str, ...] = (),
    own: AbstractSet[str] = frozenset(),
    rows: Collection[int] = (),
) -> tuple[str | None, ...]:
    """Results that own their storage: gradients are accumulated in place.

    Args:
        emitter: of the block.
        results: local names.
        saved: local names whose storage is somebody else's.
        own: inputs of the block that nobody else holds.
        rows: those that are to lie row by row, by their place.
    """
    taken = (set(emitter.inputs) - own) | {emitter.values[local].base for local in saved}
    found: list[str | None] = []
    for local in results:
        if local is not None:
            value = emitter.values[local]
            by_rows = len(found) not in rows or value.strides == contiguous_strides(value.shape)
            if value.base in taken or not is_dense(value.shape, value.strides) or not by_rows:
                local = emitter.copy_rows(local, f"{local}^own{len(found)}")
                value = emitter.values[local]
            taken.add(value.base)
        found.append(local)
    return tuple(found)


def _certain(op: Op) -> Op:
    """The op without dropout."""
    if op.target != "paraplan.attention":
        return op
    return msgspec.structs.replace(op, args=(*op.args[:5], 0.0, *op.args[6:]))


def give_sources(
    emitter: BlockEmitter, kind: SegmentKind, context: KindContext, early: tuple[Move | None, ...]
) -> None:
    """Gives a block of a kind what it may read: parameters, inputs and seeds.

    Args:
        emitter: of the block.
        kind: whose values they are.
        context: layouts of parameters and inputs.
        early: per parameter, the move that was made of it before the block; None for none.
    """
    values = kind.graph.values
    for name, layout, move in zip(kind.params, context.params, early, strict=True):
        emitter.give(name, values[name], (R, *layout) if move is None else move.after, zeros=True)
    for name, given in zip(kind.inputs, context.inputs, strict=True):
        emitter.give(name, values[name], given.layout, given.strides)
    for seed in kind.seeds:
        emitter.give(seed, values[seed], (R,) * (1 + len(context.mesh_shape)))


def ops_of(kind: SegmentKind, phase: Phase) -> list[int]:
    return [index for index, op in enumerate(kind.graph.ops) if op.phase is phase]


def early(
    kind: SegmentKind, strategies: tuple[Strategy, ...], ops: Iterable[int], context: KindContext
) -> tuple[Move | None, ...]:
    """Per parameter slot, the gather that can be made before the block whose ops these are, with other segments'.

    Only of a parameter that all its readers want in one layout other than its own, and of large ones where those are
    gathered ahead.

    Args:
        kind: whose parameters.
        strategies: of its ops.
        ops: of the block, by their numbers.
        context: the mesh, and where parameters are given.
    """
    extended = (context.num_microbatches, *context.mesh_shape)
    wanted: dict[str, dict[Layout, None]] = {}
    for index in ops:
        for name, layout in zip(kind.graph.ops[index].tensors, strategies[index].inputs, strict=True):
            wanted.setdefault(name, {})[layout] = None
    found: list[Move | None] = []
    fetched = context.fetched or (False,) * len(kind.params)
    for name, stored, away in zip(kind.params, context.params, fetched, strict=True):
        spec, layouts = kind.graph.values[name], tuple(wanted.get(name, ()))
        path = reshard_path(spec.shape, (R, *stored), layouts[0], extended, frozen=1) if len(layouts) == 1 else ()
        gathers = bool(path) and path[0].is_gather
        gathers = gathers and (context.ahead or bundle_key(spec, path[:1], extended) is not None)
        found.append(path[0] if gathers and not away else None)
    return tuple(found)


def _output_layout(home: Layout, out: str, kind: SegmentKind, m: int) -> Layout:
    """Outputs leave in the layout they were made in; a scalar is counted once over microbatches, if it is no maximum
    over them."""
    if m > 1 and not kind.graph.values[out].shape and home[0] == R:
        return (P, *home[1:])
    return home
