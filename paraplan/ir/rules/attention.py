"""Attention: batch and heads are free; with grouped queries the shards of heads follow the groups.

`paraplan.attention(q[b,h,s,d], k[b,h,t,d], v[b,h,t,e], mask, seed, ...) -> out[b,h,s,e], lse[b,h,s]`.
"""

from __future__ import annotations

from paraplan.ir.graph import Arg, Op
from paraplan.ir.mesh import Shard
from paraplan.ir.rules import workspace
from paraplan.ir.rules.dims import WHOLE, Letters, LocalContext, OpDims, Specs, register
from paraplan.ir.tensor import TensorSpec

_BH: Letters = ("b", "h", WHOLE, WHOLE)
_STATS: Letters = ("b", "h", WHOLE)


def _mask_letters(mask: TensorSpec, batch: int, heads: int) -> Letters:
    lead: list[str] = [WHOLE] * len(mask.shape)
    if len(mask.shape) >= 4 and mask.shape[-4] == batch and batch > 1:
        lead[-4] = "b"
    if len(mask.shape) >= 3 and mask.shape[-3] == heads and heads > 1:
        lead[-3] = "h"
    return tuple(lead)


def _starts(args: tuple[Arg, ...], ctx: LocalContext, position: int) -> tuple[Arg, ...]:
    """Offsets of this rank's block of the score matrix [b, h, s, t]."""
    query, layout = ctx.inputs[0], ctx.in_layouts[0]
    starts = tuple(ctx.offset(query, layout, dim) if any(p == Shard(dim=dim) for p in layout) else 0 for dim in (0, 1))
    return (*args[:position], (*starts, 0, 0), *args[position + 1 :])


@register(
    "paraplan.attention",
    strides="attention",
    localise=lambda args, ctx: _starts(args, ctx, 10),
    workspace=workspace.attention,
)
def attention(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b h _ _, b h _ _, b h _ _, mask, seed -> b h _ _, b h _`."""
    query, key = inputs[0], inputs[1]
    dims: list[Letters] = [_BH, _BH, _BH]
    for spec in inputs[3:]:
        dims.append(_mask_letters(spec, query.shape[0], query.shape[1]) if spec.shape else ())
    outs = tuple(None if spec is None else names for spec, names in zip(outputs, (_BH, _STATS), strict=True))
    return OpDims(tuple(dims), outs, {"b": query.shape[0], "h": key.shape[1]})


@register(
    "paraplan.attention_grad",
    strides="attention",
    localise=lambda args, ctx: _starts(args, ctx, 13),
    workspace=workspace.attention_grad,
)
def attention_grad(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b h _ _ (grad), q, k, v, mask, seed, out, lse -> dq, dk, dv, dmask`; a broadcast mask's gradient contracts."""
    query, key = inputs[1], inputs[2]
    dims: list[Letters] = [_BH] * 4
    mask: Letters | None = None
    rest = inputs[4:]
    for spec in rest[:-2]:
        if spec.shape:
            mask = _mask_letters(spec, query.shape[0], query.shape[1])
            dims.append(mask)
        else:
            dims.append(())
    dims += [_BH, _STATS]
    names = (_BH, _BH, _BH, mask)
    outs = tuple(None if spec is None else dim for spec, dim in zip(outputs, names, strict=True))
    return OpDims(tuple(dims), outs, {"b": query.shape[0], "h": key.shape[1]}, {"b": "sum", "h": "sum"})
