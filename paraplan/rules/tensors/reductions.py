"""Reductions, scans and softmaxes. Zero is neutral in sums alone, so only there may a reduced dim be uneven."""

from __future__ import annotations

from paraplan.ir.model.graph import Op
from paraplan.rules.dims import WHOLE, DimNames, OpDims, Specs, dim_names, place_of_dim, register, sizes_of, uneven


def _reduced(op: Op, rank: int) -> set[int]:
    dims = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
    if dims is None or dims == ():
        return set(range(rank))
    return {int(dim) % max(rank, 1) for dim in (dims if isinstance(dims, (tuple, list)) else (dims,))}


def _reduction(op: Op, inputs: Specs, outputs: Specs, how: str) -> OpDims:
    names = dim_names(len(inputs[0].shape))
    gone = _reduced(op, len(names))
    if len(outputs[0].shape) == len(names):
        out: DimNames = tuple(WHOLE if index in gone else name for index, name in enumerate(names))
    else:
        out = tuple(name for index, name in enumerate(names) if index not in gone)
    contracted = {names[index]: how for index in sorted(gone) if names}
    dims = OpDims((names,), (out,), sizes_of((names, inputs[0].shape)), contracted, ((0,),) if how == "sum" else ())
    return uneven(dims, *(() if how == "sum" else contracted))


@register("aten.sum.dim_IntList", "aten.sum.default")
def total(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b -> a`: a sharded reduced dim leaves a partial sum."""
    return _reduction(op, inputs, outputs, "sum")


@register("aten.amax.default")
def amax(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b -> a`: a sharded reduced dim leaves a partial maximum."""
    return _reduction(op, inputs, outputs, "max")


def _along(op: Op, inputs: Specs, outputs: Specs, dim: int, linear: tuple[tuple[int, ...], ...]) -> OpDims:
    shape = outputs[0].shape
    names = tuple(
        WHOLE if index == place_of_dim(dim, shape) else name for index, name in enumerate(dim_names(len(shape)))
    )
    return uneven(OpDims((names,) * len(inputs), (names,), sizes_of((names, shape)), {}, linear))


@register("aten._softmax.default", "aten._log_softmax.default")
def softmax(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ -> a _`."""
    return _along(op, inputs, outputs, int(op.args[1]), ())


@register("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
def softmax_backward(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _, a _ -> a _`, linear in the gradient."""
    return _along(op, inputs, outputs, int(op.args[2]), ((0,),))


@register("aten.cumsum.default")
def cumsum(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ -> a _`, linear."""
    return _along(op, inputs, outputs, int(op.args[1]), ((0,),))
