"""Padding of uneven shards made neutral before an op that would take it into a sum.

What padding holds is nobody's business but such an op's (`OpDims.fills_of`), so zeros are written into it in place:
that touches the tail of the last rank's block alone and needs no memory. Where elements share memory (an expanded
dim), or where the value is another (ignored labels), a copy is filled instead. Padding known to be zero is left:
parameters are loaded so and no update touches it, and moves pad with zeros.
"""

from __future__ import annotations

from paraplan.ir.execution.rank_program import Instr, LocalValue
from paraplan.ir.machine.mesh import Layout, padded_dims
from paraplan.ir.model.graph import Graph, Op
from paraplan.lowering.blocks.laid_values import LaidValues
from paraplan.rules.localise import axis_key
from paraplan.rules.strategies import Strategy, dims_of

Names = dict[tuple[str, Layout], str]


def fill_padding(emitter: LaidValues, op: Op, graph: Graph, strategy: Strategy, names: Names) -> Names:
    """The local names an op reads, after filling what it must not see as it is.

    Args:
        emitter: of the block.
        op, graph, strategy: what is about to be emitted, on the extended mesh.
        names: (value, layout) -> local name.
    """
    shape, found = emitter.mesh_shape, dict(names)
    padded = [
        (index, name, layout, dim, axis)
        for index, (name, layout) in enumerate(zip(op.tensors, strategy.inputs, strict=True))
        for dim, axis in padded_dims(graph.values[name].shape, layout, shape)
    ]
    if not padded:
        return names
    dims = dims_of(op, graph.values)
    for index, name, layout, dim, axis in padded:
        for filled, value in dims.fills_of(dims.inputs[index][dim]):
            if filled == index:
                size = graph.values[name].shape[dim]
                found[name, layout] = _filled(emitter, found[name, layout], dim, axis, size, value)
    return found


def _filled(emitter: LaidValues, local: str, dim: int, axis: int, size: int, value: float) -> str:
    if value == 0 and (local, dim) in emitter.zeroed:
        return local
    key = (local, dim, value)
    if key not in emitter.filled:
        emitter.filled[key] = _fill(emitter, local, dim, axis, size, value)
    return emitter.filled[key]


def _fill(emitter: LaidValues, local: str, dim: int, axis: int, size: int, value: float) -> str:
    source = emitter.values[local]
    block, out = source.shape[dim], emitter._unique(f"{local}^tail{dim}")
    args = ("%" + local, dim, size, f"#{axis_key(axis)}:{block}", value)
    if value == 0:
        emitter.zeroed.add((out, dim))
        emitter.zeroed.update((out, other) for name, other in tuple(emitter.zeroed) if name == local)
    expanded = any(stride == 0 and n > 1 for stride, n in zip(source.strides, source.shape, strict=True))
    if value != 0 or expanded or block == 1:  # a block of one may be an expanded one, which strides do not tell
        return emitter.local("paraplan.fill_tail", args, out, source.dtype, source.shape)
    emitter.values[out] = LocalValue(
        dtype=source.dtype, shape=source.shape, strides=source.strides, base=source.base, storage_bytes=0
    )
    emitter._add(
        Instr(target="paraplan.fill_tail_", args=args, outs=(out,), origin=emitter._origin, layout_change=True)
    )
    return out
