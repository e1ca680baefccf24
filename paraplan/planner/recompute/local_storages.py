"""Which storages a kind's values lie in on a rank, and how large these are.

A view lies in what it views, as long as that lies where the view is taken: of a value that is brought to another layout
first (tokens gathered over a sequence's shards) a view lies in that copy, which is as large as the layout says and is
held for as long as the view is. So does a value that is saved in another layout than it was made in.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from paraplan.ir.machine.mesh import Layout, R, layout_text, local_shape
from paraplan.ir.model.graph import Phase
from paraplan.ir.model.program import SegmentKind
from paraplan.ir.model.tensor import DTYPE_BYTES, TensorSpec
from paraplan.lowering.blocks.forward import KindContext, LoweredForward
from paraplan.rules.dims import op_def


class Storages(NamedTuple):
    """Of a kind under a choice.

    Attributes:
        roots: of every value that an op makes, what names its storage: a value's name, or that and a layout.
        nbytes: local bytes of values that ops make, and of those storages that are copies.
    """

    roots: dict[str, str]
    nbytes: dict[str, int]


def storages_of(
    kind: SegmentKind, forward: LoweredForward, context: KindContext, phases: Collection[Phase] = (Phase.FORWARD,)
) -> Storages:
    """The storages of a kind.

    Args:
        kind: whose.
        forward: it, lowered under the choice, which keeps everything.
        context: the mesh, and how what it reads lies.
        phases: whose values have bytes.
    """
    extended = (context.num_microbatches, *context.mesh_shape)
    values = kind.graph.values
    lies: dict[str, Layout] = {name: given.layout for name, given in zip(kind.inputs, context.inputs, strict=True)}
    lies |= {name: (R, *layout) for name, layout in zip(kind.params, context.params, strict=True)}
    roots, nbytes = dict[str, str](), dict[str, int]()
    for op, strategy in zip(kind.graph.ops, forward.strategies, strict=True):
        definition = op_def(op.target)
        is_view = definition is not None and definition.strides == "view"
        for out, computed, layout in zip(op.outs, strategy.computed, strategy.outputs, strict=True):
            if out is None:
                continue
            if layout is not None:
                lies[out] = layout
            if layout is not None and op.phase in phases:
                nbytes[out] = _local_bytes(values[out], layout, extended)
            if not is_view or computed != layout:
                roots[out] = out
                continue
            viewed, read = op.tensors[0], strategy.inputs[0]
            roots[out] = root = roots.get(viewed, viewed)
            if viewed in lies and lies[viewed] != read:
                roots[out] = root = f"{viewed}@{layout_text(read)}"
                nbytes[root] = _local_bytes(values[viewed], read, extended)
    for name, (_, given) in forward.saved.items():
        if given.layout != lies[name]:  # as the backward reads it, which is less
            roots[name] = root = f"{name}@{layout_text(given.layout)}"
            nbytes[root] = _local_bytes(values[name], given.layout, extended)
    return Storages(roots, nbytes)


def _local_bytes(spec: TensorSpec, layout: Layout, extended: tuple[int, ...]) -> int:
    return DTYPE_BYTES[spec.dtype] * math.prod(local_shape(spec.shape, layout, extended))
