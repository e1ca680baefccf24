"""Convolutions: batch and channels are dims, space is whole.

Ungrouped, a convolution is a linear layer at every position: output channels are free, input channels contracted.
Grouped (depthwise above all), channels fall into groups that never meet, so a shard is a run of whole groups and
its own number of groups is an argument.
"""

from __future__ import annotations

from paraplan.ir.model.graph import Arg, Op
from paraplan.rules.dims import WHOLE, DimNames, LocalContext, OpDims, Specs, register
from paraplan.rules.workspace import vision_workspace as workspace

GROUPS, TRANSPOSED = -1, -3  # positions in the arguments of all three ops


def _names(op: Op, space: int) -> tuple[DimNames, DimNames, DimNames]:
    """Dims of (input, weight, result)."""
    whole = (WHOLE,) * space
    if op.args[GROUPS] != 1:
        return ("b", "g", *whole), ("g", WHOLE, *whole), ("b", "g", *whole)
    weight = ("k", "n") if op.args[TRANSPOSED] else ("n", "k")
    return ("b", "k", *whole), (*weight, *whole), ("b", "n", *whole)


def _sizes(op: Op, batch: int, into: int, out: int) -> dict[str, int]:
    groups = int(op.args[GROUPS])
    return {"b": batch, "g": groups} if groups != 1 else {"b": batch, "n": out, "k": into}


def _local_groups(args: tuple[Arg, ...], ctx: LocalContext) -> tuple[Arg, ...]:
    """Groups a rank holds: the first input has all of a group's channels, in dim 1."""
    if args[GROUPS] == 1:
        return args
    return (*args[:-1], int(args[GROUPS]) * ctx.local_inputs[0][1] // ctx.inputs[0].shape[1])


@register("paraplan.conv", localise=_local_groups, workspace=workspace.flat_copies)
def conv(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b k _ _, n k _ _[, n] -> b n _ _`; in groups `b g _ _, g _ _ _[, g] -> b g _ _`."""
    x, out = inputs[0].shape, outputs[0].shape
    given, weight, made = _names(op, len(x) - 2)
    bias = (made[1:2],) if len(inputs) == 3 else ()
    grouped = op.args[GROUPS] != 1
    linear = ((0,), (1,)) if len(inputs) == 2 else ((0, 2), (1, 2))
    return OpDims(
        (given, weight, *bias),
        (made,),
        _sizes(op, x[0], x[1], out[1]),
        {} if grouped else {"k": "sum"},
        linear,
        (2,) if bias and not grouped else (),
    )


@register("paraplan.conv_grad_input", localise=_local_groups, workspace=workspace.shape_reader)
def conv_grad_input(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b n _ _, n k _ _ -> b k _ _`; in groups `b g _ _, g _ _ _ -> b g _ _`."""
    g, out = inputs[0].shape, outputs[0].shape
    made, weight, given = _names(op, len(g) - 2)
    contracted = {} if op.args[GROUPS] != 1 else {"n": "sum"}
    return OpDims((given, weight), (made,), _sizes(op, g[0], out[1], g[1]), contracted, ((0,), (1,)))


@register("paraplan.conv_grad_weight", localise=_local_groups, workspace=workspace.shape_reader)
def conv_grad_weight(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b n _ _, b k _ _ -> n k _ _`: the batch is contracted."""
    g, x = inputs[0].shape, inputs[1].shape
    given, weight, made = _names(op, len(g) - 2)
    return OpDims((made, given), (weight,), _sizes(op, g[0], x[1], g[1]), {"b": "sum"}, ((0,), (1,)))
