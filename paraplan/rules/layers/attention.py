"""Attention: batch, heads and sequences are free; with grouped queries the shards of heads follow the groups.

`paraplan.attention(q[b,h,s,d], k[b,h,t,d], v[b,h,t,e], mask, seed, ...) -> out[b,h,s,e], lse[b,h,s]`.

A rank may hold some of the queries (`s`) and all keys; backward, also all queries and some of the keys (`t`), for
given the whole rows' out and lse the gradients of blocks add up. Forward, shards of the keys make partial softmaxes,
which no sum joins: there a ring shards queries and keys both, and passes the keys round (`rules.expansions.ring`); or
keys are gathered and every rank takes a part of every rank's queries (`rules.expansions.stripes`).

Uneven are only dims whose rows of scores are whole: padding of the keys would take part in the softmax.
"""

from __future__ import annotations

from paraplan.ir.machine.mesh import Shard
from paraplan.ir.model.graph import Arg, Op
from paraplan.ir.model.tensor import TensorSpec
from paraplan.rules.dims import RING, STRIPES, WHOLE, DimNames, LocalContext, OpDims, Ring, Specs, register, uneven
from paraplan.rules.expansions.ring import ring_attention, ring_attention_grad
from paraplan.rules.expansions.stripes import striped_attention, striped_attention_grad
from paraplan.rules.workspace import attention_workspace

_QUERY: DimNames = ("b", "h", "s", WHOLE)
_KEY: DimNames = ("b", "h", "t", WHOLE)
_STATS: DimNames = ("b", "h", "s")


def _mask_dims(mask: TensorSpec, query: TensorSpec, key: TensorSpec) -> DimNames:
    """The names of the dims in which a mask is not broadcast."""
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    pairs = zip(mask.shape, sizes[-len(mask.shape) :], "bhst"[-len(mask.shape) :], strict=True)
    return tuple(dim if have == size and size > 1 else WHOLE for have, size, dim in pairs)


def _extras(specs: Specs, query: TensorSpec, key: TensorSpec) -> list[DimNames]:
    """Dim names of the mask and the seed, where they are."""
    return [_mask_dims(spec, query, key) if spec.shape else () for spec in specs]


def _grouped(query: TensorSpec, key: TensorSpec) -> tuple[str, ...]:
    """Heads, where they come in groups: those must stay whole."""
    return () if query.shape[1] == key.shape[1] else ("h",)


def _ring_inputs(dims: list[DimNames]) -> tuple[str, ...]:
    """Queries and keys are sharded; a mask keeps all keys, for every block of them comes by."""
    return tuple("s" if "s" in names else "t" if names == _KEY else "" for names in dims)


def _ring(
    inputs: tuple[str, ...], outputs: tuple[str, ...], query: TensorSpec, key: TensorSpec, is_causal: bool
) -> Ring | None:
    """A ring where there are rows to pass round; stripes where ranks would not have alike work."""
    if min(query.shape[2], key.shape[2]) < 2:
        return None
    striped = is_causal and query.shape[2] == key.shape[2]
    return Ring(inputs, outputs, "t", (RING, STRIPES) if striped else (RING,))


def _starts(args: tuple[Arg, ...], ctx: LocalContext, position: int, key: int) -> tuple[Arg, ...]:
    """Offsets of this rank's block of the score matrix [b, h, s, t]; `key` is the keys' place among the inputs."""

    def start(source: int, dim: int) -> Arg:
        layout = ctx.in_layouts[source]
        cut = any(p == Shard(dim=dim) for p in layout)
        return ctx.offset(ctx.inputs[source], layout, dim) if cut else 0

    starts = (start(0, 0), start(0, 1), start(0, 2), start(key, 2))
    return (*args[:position], starts, *args[position + 1 :])


@register(
    "paraplan.attention",
    strides="attention",
    localise=lambda args, ctx: _starts(args, ctx, 10, 1),
    workspace=attention_workspace.attention,
    expand=lambda op, ctx, axis: (striped_attention if ctx.key == STRIPES else ring_attention)(op, ctx, axis),
)
def attention(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b h s _, b h t _, b h t _, mask, seed -> b h s _, b h s`, t being whole."""
    query, key = inputs[0], inputs[1]
    dims = [_QUERY, _KEY, _KEY, *_extras(inputs[3:], query, key)]
    outs = tuple(None if spec is None else names for spec, names in zip(outputs, (_QUERY, _STATS), strict=True))
    sizes = {"b": query.shape[0], "h": key.shape[1], "s": query.shape[2]}
    ring = _ring(_ring_inputs(dims), ("s", "s"), query, key, op.args[3] is None and bool(op.args[7]))
    return uneven(OpDims(tuple(dims), outs, sizes, ring=ring), *_grouped(query, key))


@register(
    "paraplan.attention_grad",
    strides="attention",
    localise=lambda args, ctx: _starts(args, ctx, 13, 2),
    workspace=attention_workspace.attention_grad,
    expand=lambda op, ctx, axis: (striped_attention_grad if ctx.key == STRIPES else ring_attention_grad)(op, ctx, axis),
)
def attention_grad(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b h s _ (grad), q, k, v, mask, seed, out, lse -> dq, dk, dv, dmask`; what lacks a dim contracts it."""
    query, key = inputs[1], inputs[2]
    extras = _extras(inputs[4:-2], query, key)
    dims = [_QUERY, _QUERY, _KEY, _KEY, *extras, _QUERY, _STATS]
    mask = next((names for names in extras if names), None)
    outs = tuple(
        None if spec is None else names for spec, names in zip(outputs, (_QUERY, _KEY, _KEY, mask), strict=True)
    )
    sizes = {"b": query.shape[0], "h": key.shape[1], "s": query.shape[2], "t": key.shape[2]}
    onto = ("s", "t", "t", "s" if mask is not None and "s" in mask else "")
    ring = _ring(_ring_inputs(dims), onto, query, key, op.args[4] is None and bool(op.args[10]))
    return uneven(OpDims(tuple(dims), outs, sizes, dict.fromkeys("bhst", "sum"), ring=ring), "t", *_grouped(query, key))


@register("paraplan.attention_merge", strides="attention", workspace=attention_workspace.attention_merge)
def attention_merge(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b h s e, b h s, b h s e, b h s -> b h s e, b h s`: row by row."""
    names, stats = ("b", "h", "s", "e"), _STATS
    sizes = dict(zip(names, inputs[0].shape, strict=True))
    return OpDims((names, stats, names, stats), (names, stats), sizes)
