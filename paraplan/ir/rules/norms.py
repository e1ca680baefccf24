"""Layer normalisation: normalised dims are whole, the others free."""

from __future__ import annotations

from paraplan.ir.graph import Op
from paraplan.ir.rules.dims import WHOLE, Letters, OpDims, Specs, letters, register, sizes_of


def _split(shape: tuple[int, ...], normalised: int) -> tuple[Letters, Letters]:
    lead = letters(len(shape) - normalised)
    return (*lead, *(WHOLE,) * normalised), (*lead, *(WHOLE,) * normalised)


@register("aten.native_layer_norm.default")
def layer_norm(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b _, _, _ -> a b _, a b _, a b _` (result, mean, reciprocal deviation)."""
    normalised = len(op.args[1])
    names, _ = _split(inputs[0].shape, normalised)
    affine = ((WHOLE,) * normalised,) * (len(inputs) - 1)
    outs = tuple(None if spec is None else names for spec in outputs)
    return OpDims((names, *affine), outs, sizes_of((names, inputs[0].shape)))


@register("aten.native_layer_norm_backward.default")
def layer_norm_backward(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b _, a b _, a b _, a b _, _, _ -> a b _, _, _`: gradients of weight and bias contract the rest."""
    normalised = len(op.args[2])
    names, _ = _split(inputs[0].shape, normalised)
    affine: Letters = (WHOLE,) * normalised
    outs = tuple(None if spec is None else (names if index == 0 else affine) for index, spec in enumerate(outputs))
    lead = names[: len(names) - normalised]
    return OpDims(
        (names, names, names, names, *(affine,) * (len(inputs) - 4)), outs, sizes_of((names, inputs[0].shape)),
        dict.fromkeys(lead, "sum"),
    )  # fmt: skip
