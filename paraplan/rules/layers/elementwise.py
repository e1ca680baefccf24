"""Rotary embeddings and gated activations: elementwise but for the halves of a rotated dim, which stays whole."""

from __future__ import annotations

from paraplan.ir.model.graph import Op
from paraplan.rules.dims import WHOLE, OpDims, Specs, dim_names, register, sizes_of, uneven


@register("paraplan.rotary", strides="elementwise")
def rotary(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b s _, a b s _, a b s _ -> a b s _`, a dim of 1 in cosines and sines having no name; linear in x."""
    shape = inputs[0].shape
    names = (*dim_names(len(shape) - 1), WHOLE)
    given = tuple(
        tuple(name if size == whole else WHOLE for name, size, whole in zip(names, spec.shape, shape, strict=True))
        for spec in inputs
    )
    return uneven(OpDims(given, (names,), sizes_of((names, shape)), linear=((0,),)))


def _alike(inputs: Specs, outputs: Specs, linear: int) -> OpDims:
    names = dim_names(len(inputs[0].shape))
    sizes = sizes_of((names, inputs[0].shape))
    return uneven(OpDims((names,) * len(inputs), (names,) * len(outputs), sizes, linear=((linear,),)))


@register("paraplan.gated")
def gated(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b, a b -> a b`, linear in the second."""
    return _alike(inputs, outputs, 1)


@register("paraplan.gated_grad")
def gated_grad(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b, a b, a b -> a b, a b`, linear in the first."""
    return _alike(inputs, outputs, 0)
