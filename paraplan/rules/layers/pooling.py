"""Pooling and resizing: batch and channels are free, space is whole.

Every one works plane by plane, and all but the maxima are linear. Unbatched inputs [channels, *space] have one free
dim less.
"""

from __future__ import annotations

from paraplan.ir.model.graph import Op
from paraplan.rules.dims import WHOLE, DimNames, OpDims, Specs, dim_names, register, sizes_of
from paraplan.rules.workspace import vision_workspace as workspace


def _planes(shape: tuple[int, ...], space: int) -> DimNames:
    return (*dim_names(len(shape) - space), *(WHOLE,) * space)


def _by_plane(inputs: Specs, outputs: Specs, space: int, linear: tuple[tuple[int, ...], ...]) -> OpDims:
    names = _planes(inputs[0].shape, space)
    outs = tuple(None if spec is None else names for spec in outputs)
    return OpDims((names,) * len(inputs), outs, sizes_of((names, inputs[0].shape)), {}, linear)


@register("paraplan.max_pool", "paraplan.adaptive_max_pool", workspace=workspace.flat_copies)
def max_pool(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b c _ _ -> b c _ _, b c _ _` (values, indices in the plane)."""
    return _by_plane(inputs, outputs, len(op.args[1]), ())


@register("paraplan.max_pool_grad", workspace=workspace.flat_copies)
def max_pool_grad(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b c _ _, b c _ _ -> b c _ _`, linear in the gradient."""
    return _by_plane(inputs, outputs, len(op.args[2]), ((0,),))


@register("paraplan.avg_pool", "paraplan.adaptive_avg_pool", workspace=workspace.flat_copies)
def avg_pool(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b c _ _ -> b c _ _`, linear."""
    return _by_plane(inputs, outputs, len(op.args[1]), ((0,),))


@register("paraplan.avg_pool_grad", "paraplan.adaptive_avg_pool_grad", workspace=workspace.shape_reader)
def avg_pool_grad(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b c _ _ -> b c _ _`, linear; the second argument is the size of the input's planes."""
    return _by_plane(inputs, outputs, len(op.args[1]), ((0,),))


@register("paraplan.upsample", "paraplan.upsample_grad", workspace=workspace.flat_copies)
def resize(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b c _ _ -> b c _ _`, linear."""
    return _by_plane(inputs, outputs, len(op.args[2]), ((0,),))
