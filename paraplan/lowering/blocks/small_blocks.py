"""The small blocks around the segments: denominators, loss, buffers, parameter restoration."""

from __future__ import annotations

from paraplan.ir.execution.rank_program import Block, BlockRole
from paraplan.ir.machine.mesh import Layout, P, R, is_view_of, local_shape
from paraplan.ir.model.program import Denominator, LossTerm
from paraplan.ir.model.strides import contiguous_strides, is_contiguous
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.steps.step_writer import SplitBlock
from paraplan.lowering.transfers.copies import Copy
from paraplan.rules.graph_strategies import GraphKey, graph_strategies
from paraplan.rules.strategies import Strategy
from paraplan.rules.time_axis import KindMicro, extend

Dims = tuple[int, ...]


def count_block(
    kind: str, denominator: Denominator, micro: KindMicro, given: tuple[Layout, ...], extended: Dims
) -> tuple[Block, Layout]:
    """One microbatch's share of a denominator, which is called `kind`; the result stays partial.

    Args:
        kind: what the block is called.
        denominator: of the program.
        micro: what its ops do along the microbatch axis.
        given: layout of every input.
        extended: shape of the mesh, the microbatch axis first.
    """
    graph = denominator.graph
    emitter = BlockEmitter(f"{kind}.count", extended, BlockRole.COUNT, kind)
    for value, layout in zip(graph.inputs, given, strict=True):
        emitter.give(value, graph.values[value], layout)
    legal = graph_strategies(GraphKey(graph, extended[1:], micro.choices, extended[0]))
    for index, (op, options, along) in enumerate(zip(graph.ops, legal, micro.choices, strict=True)):
        homes = tuple(emitter.home(name)[1:] for name in op.tensors)
        emitter.op(op, graph, extend(nearest(options, homes), along), index)
    out = graph.outputs[0]
    assert out is not None
    layout = (P if extended[0] > 1 else R, *emitter.home(out)[1:])
    return emitter.finish((emitter.get(out, layout),), ()), layout


def nearest(options: tuple[Strategy, ...], homes: tuple[Layout, ...]) -> Strategy:
    """The strategy that moves the fewest inputs and keeps partial sums partial: counts are never gathered."""

    def moves(option: Strategy) -> int:
        return sum(have != need for have, need in zip(homes, option.inputs, strict=True))

    fitting = [option for option in options if option.computed == option.outputs]
    return min(fitting, key=moves)


def total_block(name: str, spec: TensorSpec, layout: Layout, extended: Dims) -> Block:
    """The whole denominator; input `count`.

    Args:
        name: of the block.
        spec: of the count.
        layout: the count is given in.
        extended: shape of the mesh, the microbatch axis first.
    """
    emitter = BlockEmitter(name, extended, BlockRole.COUNT)
    emitter.give("count", spec, (R, *layout[1:]))
    return emitter.finish((emitter.get("count", (R,) * len(extended)),), ())


def tangent_block(
    name: str, spec: TensorSpec, layout: Layout | None, extended: Dims, scaled: bool, share: float = 1.0
) -> SplitBlock:
    """The whole denominator and the tangent 1/denominator; just a constant tangent where there is none.

    Args:
        name: of the block.
        spec: of the denominator.
        layout: of it, on the extended mesh; None where there is none.
        extended: shape of the extended mesh.
        scaled: whether the tangent is multiplied by the float32 input `scale`.
        share: the tangent where there is no denominator.
    """
    emitter = BlockEmitter(name, extended, BlockRole.LOSS)
    whole, dtype = (R,) * len(extended), spec.dtype
    total = None
    if layout is None:
        tangent = emitter.local("aten.full.default", ((), share), "tangent", dtype, (), {"dtype": ":" + dtype})
    else:
        emitter.give("count", spec, (R, *layout[1:]))
        total = emitter.get("count", whole)
        tangent = emitter.local("aten.reciprocal.default", ("%" + total,), "tangent", dtype, ())
    if scaled:
        emitter.give("scale", TensorSpec("float32", ()), whole)
        scale = emitter.get("scale", whole)
        if dtype != "float32":
            scale = emitter.cast(scale, dtype, "cast")
        tangent = emitter.local("aten.mul.Tensor", ("%" + tangent, "%" + scale), "scaled", dtype, ())
    return emitter.split((total, tangent))


def zero_block(name: str, spec: TensorSpec, layout: Layout, extended: Dims) -> Block:
    """The gradient of an output nobody differentiates.

    Args:
        name: of the block.
        spec: of the output, global.
        layout: that its gradient is wanted in.
        extended: shape of the mesh, the microbatch axis first.
    """
    emitter = BlockEmitter(name, extended, BlockRole.ZERO)
    shape = local_shape(spec.shape, layout, extended)
    zero = emitter.local("aten.full.default", (shape, 0.0), "zero", spec.dtype, shape, {"dtype": ":" + spec.dtype})
    return emitter.finish((zero,), ())


def loss_block(
    name: str,
    terms: tuple[LossTerm, ...],
    specs: tuple[TensorSpec, ...],
    layouts: tuple[Layout, ...],
    extended: Dims,
    share: float = 1.0,
) -> SplitBlock:
    """loss = sum of numerator/denominator, whole on every rank; inputs `numerator<i>` and `denominator<i>`.

    Numerators without a denominator are multiplied by `share`.

    Where losses have names, each follows as a result of its own, without its weight.

    Args:
        name: of the block.
        terms: of the loss.
        specs, layouts: of every term's numerator.
        extended: shape of the mesh, the microbatch axis first.
        share: of a numerator without a denominator.
    """
    emitter = BlockEmitter(name, extended, BlockRole.LOSS)
    whole = (R,) * len(extended)
    dtype = specs[0].dtype
    parts: dict[str, list[str]] = {}
    for index, (term, spec, layout) in enumerate(zip(terms, specs, layouts, strict=True)):
        emitter.give(f"numerator{index}", spec, (R, *layout[1:]))
        local = emitter.get(f"numerator{index}", whole)
        if term.denominator is not None:
            emitter.give(f"denominator{index}", spec, whole)
            below = emitter.get(f"denominator{index}", whole)
            local = emitter.local("aten.div.Tensor", ("%" + local, "%" + below), f"term{index}", spec.dtype, ())
        elif share != 1.0:
            local = emitter.local("aten.mul.Tensor", ("%" + local, share), f"term{index}", spec.dtype, ())
        parts.setdefault("", []).append(local)
        if term.name:
            parts.setdefault(term.name, []).append(local)
    weights = {term.name: term.weight for term in terms if term.name}
    total = _scalar_sum(emitter, parts.pop(""), "sum", dtype)
    metrics = []
    for number, (loss, addends) in enumerate(parts.items()):
        value = _scalar_sum(emitter, addends, f"part{number}+", dtype)
        scale = 1.0 / weights[loss]
        metrics.append(emitter.local("aten.mul.Tensor", ("%" + value, scale), f"metric{number}", dtype, ()))
    return emitter.split((total, *metrics))


def _scalar_sum(emitter: BlockEmitter, addends: list[str], stem: str, dtype: str) -> str:
    total = addends[0]
    for index, local in enumerate(addends[1:], 1):
        total = emitter.local("aten.add.Tensor", ("%" + total, "%" + local), f"{stem}{index}", dtype, ())
    return total


def buffer_block(
    name: str, spec: TensorSpec, layout: Layout, strides: Dims | None, addends: int, extended: Dims
) -> Block:
    """A buffer overwritten by the sum of its new values; inputs `stored` and `new<i>`, `layout` as they lie.

    Args:
        name: of the block.
        spec: of the buffer, global.
        layout: of the new values.
        strides: of the new values; None for row-major.
        addends: how many new values are summed.
        extended: shape of the mesh, the microbatch axis first.
    """
    emitter = BlockEmitter(name, extended, BlockRole.BUFFER)
    whole = (R,) * len(extended)
    emitter.give("stored", spec, whole)
    total = _whole_sum(emitter, spec, layout, strides, addends)
    emitter.effect("paraplan.write", ("%" + emitter.get("stored", whole), "%" + total))
    return emitter.finish((), ())


def share_block(
    name: str, spec: TensorSpec, layout: Layout, strides: Dims | None, addends: int, extended: Dims
) -> Block:
    """A group's share of a buffer's new value, whole in a storage of its own; inputs as of `buffer_block`.

    Args:
        name, spec, layout, strides, addends, extended: as of `buffer_block`.
    """
    emitter = BlockEmitter(name, extended, BlockRole.BUFFER)
    total = _whole_sum(emitter, spec, layout, strides, addends)
    value = emitter.values[total]
    if value.base in emitter.inputs or not is_contiguous(value.shape, value.strides):
        total = emitter.copy_rows(total, "own")
    return emitter.finish((total,), ())


def _whole_sum(emitter: BlockEmitter, spec: TensorSpec, layout: Layout, strides: Dims | None, addends: int) -> str:
    """The sum of the inputs `new<i>`, whole."""
    total = ""
    for index in range(addends):
        emitter.give(f"new{index}", spec, (R, *layout[1:]), strides)
        value = emitter.get(f"new{index}", (R,) * len(layout))
        total = (
            value
            if not total
            else emitter.local("aten.add.Tensor", ("%" + total, "%" + value), f"sum{index}", spec.dtype, spec.shape)
        )
    return total


def restore_block(
    name: str,
    param: TensorSpec,
    state_dtype: str,
    stored: Layout,
    state: Layout,
    mesh_shape: Dims,
    copy: Copy | None = None,
    own: bool = False,
) -> Block:
    """The updated parameter written into its stored copy, by one copy that casts it; what other ranks are sent first is
    cast before. Inputs `stored` and `state`.

    Args:
        name: of the block.
        param: spec of the parameter.
        state_dtype: of the optimizer's copy.
        stored, state: layouts on the mesh.
        mesh_shape: of the stage.
        copy: of the state to the device, where it was updated on a tier; what it makes is `state`.
        own: whether the state on the device is a copy, no view of the stored one.
    """
    emitter = BlockEmitter(name, (1, *mesh_shape), BlockRole.RESTORE)
    emitter.give("stored", param, (R, *stored))
    spec, strides = TensorSpec(state_dtype, param.shape), None
    if copy is not None:
        emitter.arrive("state", spec, (R, *state), copy)
    else:
        alike = state_dtype == param.dtype and is_view_of(param.shape, stored, state, mesh_shape)
        if alike and not own:  # a view of the stored copy
            strides = contiguous_strides(local_shape(param.shape, stored, mesh_shape))
        emitter.give("state", spec, (R, *state), strides)
    source = "state"
    sent = any(a != b and size > 1 for a, b, size in zip(stored, state, mesh_shape, strict=True))
    if sent and state_dtype != param.dtype:
        source = emitter.cast(emitter.get("state", (R, *state)), param.dtype, "cast")
        emitter.define(source, param, (R, *state))
    updated = emitter.get(source, (R, *stored))
    emitter.effect("paraplan.write", ("%" + emitter.get("stored", (R, *stored)), "%" + updated))
    return emitter.finish((), ())
