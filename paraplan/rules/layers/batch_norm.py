"""Batch norm in pieces that are exact over shards: sums over samples, and per-channel arithmetic on them.

Statistics are of the global batch: shards of it leave partial sums, which are reduced before anything that is not
linear reads them. Squares are centred on the global mean first, for a mean of squares less a squared mean cancels.
Along the microbatch axis nothing can be reduced in time, so a training batch norm makes a program one microbatch.
"""

from __future__ import annotations

from paraplan.ir.model.graph import Op
from paraplan.rules.dims import WHOLE, DimNames, OpDims, Specs, register
from paraplan.rules.workspace import vision_workspace as workspace

CHANNELS: DimNames = ("c",)


def _dims(inputs: Specs) -> tuple[tuple[DimNames, ...], dict[str, int]]:
    """Inputs of rank above one are `b c _ _`, the others per channel."""
    shape = inputs[0].shape
    whole: DimNames = ("b", "c", *(WHOLE,) * (len(shape) - 2))
    return tuple(CHANNELS if len(spec.shape) == 1 else whole for spec in inputs), {"b": shape[0], "c": shape[1]}


@register("paraplan.bn_squares", workspace=workspace.bn_squares)
def squares(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b c _ _, c -> c`: centred squares add up over samples."""
    names, sizes = _dims(inputs)
    return OpDims(names, (CHANNELS,), sizes, {"b": "sum"})


@register("paraplan.bn_rstd", workspace=workspace.bn_rstd)
def rstd(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`c -> c`."""
    return OpDims((CHANNELS,), (CHANNELS,), {"c": inputs[0].shape[0]})


@register("paraplan.bn_running", workspace=workspace.bn_running)
def running(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`c, c -> c`, linear in both together."""
    return OpDims((CHANNELS, CHANNELS), (CHANNELS,), {"c": inputs[0].shape[0]}, {}, ((0, 1),))


@register("paraplan.bn_apply", workspace=workspace.bn_apply)
def apply(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b c _ _[, c], c[, c][, c] -> b c _ _`; without mean and bias linear in x."""
    names, sizes = _dims(inputs)
    return OpDims(names, (names[0],), sizes, {}, ((0,),) if op.args[1] is None and op.args[4] is None else ())


@register("paraplan.bn_grad_affine", workspace=workspace.bn_grad_affine)
def grad_affine(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b c _ _, b c _ _, c, c -> c, c`: samples contracted, linear in the gradient."""
    names, sizes = _dims(inputs)
    outs = tuple(None if spec is None else CHANNELS for spec in outputs)
    return OpDims(names, outs, sizes, {"b": "sum"}, ((0,),))


@register("paraplan.bn_grad_input", workspace=workspace.bn_grad_input)
def grad_input(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b c _ _, b c _ _, c, c[, c], c, c -> b c _ _`, linear in the gradient and its sums together."""
    names, sizes = _dims(inputs)
    last = len(inputs) - 1
    return OpDims(names, (names[0],), sizes, {}, ((0, last - 1, last),))
