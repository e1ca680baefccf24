"""Layer and group normalisation: normalised dims are whole (groups of channels likewise), the others free."""

from __future__ import annotations

from collections.abc import Callable

from paraplan.ir.model.graph import Arg, Op
from paraplan.rules.dims import WHOLE, DimNames, LocalContext, OpDims, Specs, dim_names, register, sizes_of, uneven
from paraplan.rules.workspace import norm_workspace
from paraplan.rules.workspace import vision_workspace as workspace


def _split(shape: tuple[int, ...], normalised: int) -> tuple[DimNames, DimNames]:
    lead = dim_names(len(shape) - normalised)
    return (*lead, *(WHOLE,) * normalised), (*lead, *(WHOLE,) * normalised)


def _forward(inputs: Specs, outputs: Specs, normalised: int) -> OpDims:
    """Rows are free: the result and its statistics, dims of 1 where it is normalised, follow the input's."""
    names, _ = _split(inputs[0].shape, normalised)
    affine = ((WHOLE,) * normalised,) * (len(inputs) - 1)
    outs = tuple(None if spec is None else names for spec in outputs)
    return uneven(OpDims((names, *affine), outs, sizes_of((names, inputs[0].shape))))


def _backward(inputs: Specs, outputs: Specs, normalised: int, rows: int) -> OpDims:
    """Of the inputs the first `rows` have rows. Gradients of weight and bias contract these; all are linear in the
    gradient."""
    names, _ = _split(inputs[0].shape, normalised)
    affine: DimNames = (WHOLE,) * normalised
    outs = tuple(None if spec is None else (names if index == 0 else affine) for index, spec in enumerate(outputs))
    lead = names[: len(names) - normalised] if any(spec is not None for spec in outputs[1:]) else ()
    given = (*(names,) * rows, *(affine,) * (len(inputs) - rows))
    return uneven(OpDims(given, outs, sizes_of((names, inputs[0].shape)), dict.fromkeys(lead, "sum"), linear=((0,),)))


@register("paraplan.layer_norm")
def layer_norm(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b _, _, _ -> a b _, a b _, a b _` (result, mean, reciprocal deviation)."""
    return _forward(inputs, outputs, len(op.args[1]))


@register("paraplan.layer_norm_grad")
def layer_norm_grad(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b _, a b _, a b _, a b _, _, _ -> a b _, _, _` (of gradient, input, mean, reciprocal deviation)."""
    return _backward(inputs, outputs, len(op.args[2]), 4)


@register("paraplan.rms_norm", workspace=norm_workspace.rms_norm)
def rms_norm(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b _[, _] -> a b _, a b _` (result, reciprocal root of the mean square)."""
    return _forward(inputs, outputs, int(op.args[1]))


@register("paraplan.rms_norm_grad", workspace=norm_workspace.rms_norm_grad)
def rms_norm_grad(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b _, a b _, a b _[, _] -> a b _, _` (of gradient, input, reciprocal root)."""
    return _backward(inputs, outputs, int(op.args[2]), 3)


def _group_affine(count: int) -> tuple[DimNames, ...]:
    return (("g",),) * count


def _group_sizes(op_groups: int, shape: tuple[int, ...]) -> dict[str, int]:
    return {"b": shape[0], "g": op_groups}


def _local_groups(position: int, x: int) -> Callable[[tuple[Arg, ...], LocalContext], tuple[Arg, ...]]:
    """A rank's number of groups, from its share of the channels."""

    def localise(args: tuple[Arg, ...], ctx: LocalContext) -> tuple[Arg, ...]:
        groups = int(args[position]) * ctx.local_inputs[x][1] // ctx.inputs[x].shape[1]
        return (*args[:position], groups, *args[position + 1 :])

    return localise


@register("paraplan.group_norm", localise=_local_groups(3, 0), workspace=workspace.flat_copies)
def group_norm(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b g _ _[, g][, g] -> b g _ _, b g, b g`: channels are cut in whole groups."""
    names: DimNames = ("b", "g", *(WHOLE,) * (len(inputs[0].shape) - 2))
    outs = tuple(None if spec is None else (names if index == 0 else ("b", "g")) for index, spec in enumerate(outputs))
    affine = _group_affine(len(inputs) - 1)
    return OpDims((names, *affine), outs, _group_sizes(int(op.args[3]), inputs[0].shape))


@register("paraplan.group_norm_grad", localise=_local_groups(5, 0), workspace=workspace.flat_copies)
def group_norm_grad(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b g _ _, b g _ _, b g, b g[, g] -> b g _ _, g, g`: gradients of weight and bias contract the batch; all of them
    are linear in the gradient."""
    names: DimNames = ("b", "g", *(WHOLE,) * (len(inputs[0].shape) - 2))
    outs = tuple(None if spec is None else (names if index == 0 else ("g",)) for index, spec in enumerate(outputs))
    given = (names, names, ("b", "g"), ("b", "g"), *_group_affine(len(inputs) - 4))
    sizes = _group_sizes(int(op.args[5]), inputs[0].shape)
    return OpDims(given, outs, sizes, {"b": "sum"}, linear=((0,),))
