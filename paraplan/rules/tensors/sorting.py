"""Ops that order, pick or scan along one dim: it is whole, all others are free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.model.graph import Arg, Op
from paraplan.ir.model.tensor import DTYPE_BYTES
from paraplan.rules.dims import WHOLE, OpDims, Specs, dim_names, place_of_dim, register, replicated, sizes_of


def _along(inputs: Specs, outputs: Specs, dim: int) -> OpDims:
    shape = inputs[0].shape
    whole = place_of_dim(dim, shape)
    names = tuple(WHOLE if at == whole else name for at, name in enumerate(dim_names(len(shape))))
    short = tuple(name for at, name in enumerate(names) if at != whole)
    outs = tuple(None if spec is None else (names if len(spec.shape) == len(shape) else short) for spec in outputs)
    return OpDims((names,), outs, sizes_of((names, shape)))


@register("aten.topk.default")
def topk(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ -> a _, a _`."""
    return _along(inputs, outputs, int(op.args[2]) if len(op.args) > 2 else int(op.kwargs.get("dim", -1)))


def _sorted_bytes(inputs: Sequence[LocalValue], outputs: object, args: tuple[Arg, ...]) -> int:
    """The sorted values, of which the order alone is kept."""
    return math.prod(inputs[0].shape) * DTYPE_BYTES[inputs[0].dtype]


@register("aten.argsort.default", strides="elementwise", workspace=_sorted_bytes)
@register("aten.sort.default", strides="elementwise")
def sort(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ -> a _, a _`."""
    return _along(inputs, outputs, int(op.args[1]) if len(op.args) > 1 else int(op.kwargs.get("dim", -1)))


@register("aten.sort.stable", strides="elementwise")
def sort_stable(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ -> a _, a _`."""
    return _along(inputs, outputs, int(op.kwargs.get("dim", -1)))


@register("aten.max.dim", "aten.min.dim", "aten.cummax.default", "aten.cummin.default", "aten.cumprod.default")
def picked(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ -> a, a` (value and where it was), `a _ -> a _` for scans."""
    return _along(inputs, outputs, int(op.args[1]))


@register("aten.argmax.default", "aten.argmin.default")
def argmax(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ -> a`; over all elements: whole."""
    dim = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
    return replicated(inputs, outputs) if dim is None else _along(inputs, outputs, int(dim))


@register("aten.any.dim", "aten.all.dim", "aten.prod.dim_int")
def folded(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ -> a`."""
    return _along(inputs, outputs, int(op.args[1]))


@register("aten.amin.default")
def amin(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ -> a`: reduced dims are whole (no collective here takes a minimum)."""
    rank = len(inputs[0].shape)
    dims = tuple(op.args[1]) if len(op.args) > 1 else ()
    gone = {place_of_dim(dim, inputs[0].shape) for dim in dims} if dims else set(range(rank))
    names = tuple(WHOLE if at in gone else name for at, name in enumerate(dim_names(rank)))
    kept = names if len(outputs[0].shape) == rank else tuple(name for at, name in enumerate(names) if at not in gone)
    return OpDims((names,), (kept,), sizes_of((names, inputs[0].shape)))


@register("aten.tril.default", "aten.triu.default")
def triangle(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ _ -> a _ _`, linear."""
    rank = len(inputs[0].shape)
    names = (*dim_names(rank - 2), WHOLE, WHOLE)
    return OpDims((names,), (names,), sizes_of((names, inputs[0].shape)), {}, ((0,),))
