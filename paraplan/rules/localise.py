"""An op's arguments on one rank: what rules may look at, and where a rank's block of a dim begins."""

from __future__ import annotations

from collections.abc import Mapping

from paraplan.ir.machine.mesh import Layout, Shard, local_shape
from paraplan.ir.model.graph import Arg, Graph, Op
from paraplan.ir.model.tensor import TensorSpec
from paraplan.rules.choices import axis_parts
from paraplan.rules.dims import LocalContext, op_def
from paraplan.rules.strategies import Strategy

Dims = tuple[int, ...]


def axis_key(axis: int) -> str:
    """An axis of the extended mesh (0: microbatches) as offsets name it."""
    return "m" if axis == 0 else str(axis - 1)


def offset_text(spec: TensorSpec, layout: Layout, dim: int, mesh_shape: Dims) -> str:
    """The first index of a rank's block along a dim, as "#..." text.

    Args:
        spec: of the whole value.
        layout: that it has.
        dim: which.
        mesh_shape: of the extended mesh.
    """
    block, terms = spec.shape[dim], []
    for axis, (placement, size) in enumerate(zip(layout, mesh_shape, strict=True)):
        if placement == Shard(dim=dim) and size > 1:
            block = -(-block // size)
            terms.append(f"{axis_key(axis)}:{block}")
    return "#" + ",".join(terms)


def local_context(op: Op, values: Mapping[str, TensorSpec], strategy: Strategy, mesh_shape: Dims) -> LocalContext:
    """What an op's rule may look at.

    Args:
        op: of a graph.
        values: specs of the graph's values, whole.
        strategy: of the op, with the microbatch axis in front.
        mesh_shape: likewise.
    """
    inputs = tuple(values[name] for name in op.tensors)
    outputs = tuple(None if name is None else values[name] for name in op.outs)
    return LocalContext(
        inputs=inputs,
        outputs=outputs,
        in_layouts=strategy.inputs,
        out_layouts=strategy.computed,
        mesh_shape=mesh_shape,
        offset=lambda spec, layout, dim: offset_text(spec, layout, dim, mesh_shape),
        local_inputs=tuple(
            local_shape(s.shape, lay, mesh_shape) for s, lay in zip(inputs, strategy.inputs, strict=True)
        ),
        local_outputs=tuple(
            () if s is None or lay is None else local_shape(s.shape, lay, mesh_shape)
            for s, lay in zip(outputs, strategy.computed, strict=True)
        ),
        key=axis_parts(strategy.key)[strategy.ring_axis].does if strategy.ring_axis >= 0 else "",
    )


def op_arguments(op: Op, context: LocalContext) -> tuple[Arg, ...]:
    """Positional arguments with local sizes and offsets, tensors by their global names."""
    definition = op_def(op.target)
    localise = None if definition is None else definition.localise
    return op.args if localise is None else localise(op.args, context)


def expansion(op: Op, values: Mapping[str, TensorSpec], strategy: Strategy, mesh_shape: Dims) -> Graph | None:
    """The local ops of a strategy with a ring; None where the op itself is one instruction.

    Args:
        op, values, strategy, mesh_shape: as of `local_context`.
    """
    definition = op_def(op.target)
    if strategy.ring_axis < 0 or definition is None or definition.expand is None:
        return None
    return definition.expand(op, local_context(op, values, strategy, mesh_shape), 1 + strategy.ring_axis)
