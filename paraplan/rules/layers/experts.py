"""Mixtures of experts and stacks of embedding tables: experts and tables are dims like any other.

Experts held by different ranks (expert parallelism): every rank of the axis sees the same tokens, computes those rows
that chose its own experts, and the results add up, as over a split vocabulary; or tokens are sharded as well and go to
the ranks of their experts (`rules.expansions.route`). Tables on different ranks (table-wise sharding) is their dim
sharded; row-wise and column-wise are the other two.
"""

from __future__ import annotations

from paraplan.ir.machine.mesh import Shard
from paraplan.ir.model.graph import Arg, Op
from paraplan.rules.dims import (
    ROUTING,
    WHOLE,
    DimNames,
    LocalContext,
    OpDims,
    Ring,
    Specs,
    dim_names,
    register,
    sizes_of,
)
from paraplan.rules.expansions.route import route_experts, route_experts_grad
from paraplan.rules.layers.lookup import start_and_size
from paraplan.rules.workspace import expert_workspace as workspace

_TOKENS: DimNames = ("t", WHOLE)
_IN: DimNames = ("e", WHOLE, "f", WHOLE)
_OUT: DimNames = ("e", "n", "f")


def _start(args: tuple[Arg, ...], ctx: LocalContext, position: int, spec: int, dim: int) -> tuple[Arg, ...]:
    """Where this rank's block of an input's dim begins, as the argument at `position`."""
    sharded = any(place == Shard(dim=dim) for place in ctx.in_layouts[spec])
    start: Arg = ctx.offset(ctx.inputs[spec], ctx.in_layouts[spec], dim) if sharded else 0
    return (*args[:position], start, *args[position + 1 :])


def _sizes(tokens: int, w_in: tuple[int, ...], w_out: tuple[int, ...]) -> dict[str, int]:
    return {"t": tokens, "e": w_in[0], "f": w_in[2], "n": w_out[1]}


def _route(outputs: tuple[str | None, ...], tokens: int, experts: int, before: int) -> Ring | None:
    """Tokens and experts sharded over one axis; `before`: inputs before the tokens, which lie as they do."""
    inputs = ("t",) * (before + 3) + ("e", "e")
    return Ring(inputs, outputs, "e", (ROUTING,)) if min(tokens, experts) > 1 else None


@register(
    "paraplan.experts",
    localise=lambda args, ctx: _start(args, ctx, 7, 3, 0),
    workspace=workspace.experts,
    expand=route_experts,
)
def experts(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`t _, t _, t _, e _ f _, e n f -> t n`: each row is one expert's, so sums over e are exact; f is contracted."""
    sizes = _sizes(inputs[0].shape[0], inputs[3].shape, inputs[4].shape)
    dims = (_TOKENS, _TOKENS, _TOKENS, _IN, _OUT)
    route = _route(("t",), sizes["t"], sizes["e"], 0)
    return OpDims(dims, (("t", "n"),), sizes, {"e": "sum", "f": "sum"}, ((2,), (4,)), ring=route)


@register(
    "paraplan.experts_grad",
    localise=lambda args, ctx: _start(args, ctx, 8, 4, 0),
    workspace=workspace.experts_grad,
    expand=route_experts_grad,
)
def experts_grad(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`t n, t _, t _, t _, e _ f _, e n f -> t _, t _, e _ f _, e n f`."""
    sizes = _sizes(inputs[1].shape[0], inputs[4].shape, inputs[5].shape)
    dims = (("t", "n"), _TOKENS, _TOKENS, _TOKENS, _IN, _OUT)
    outs = tuple(
        None if spec is None else names for spec, names in zip(outputs, (_TOKENS, _TOKENS, _IN, _OUT), strict=True)
    )
    lie = tuple(None if spec is None else dim for spec, dim in zip(outputs, "ttee", strict=True))
    route = _route(lie, sizes["t"], sizes["e"], 1)
    return OpDims(dims, outs, sizes, dict.fromkeys("tefn", "sum"), ((0,),), ring=route)


@register(
    "paraplan.embedding_tables",
    localise=lambda args, ctx: start_and_size(args, ctx, 2, 1),
    workspace=workspace.embedding_tables,
)
def embedding_tables(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`t v h, a t -> a t h`, v contracted."""
    ids = (*dim_names(len(inputs[1].shape) - 1, skip="tvh"), "t")
    sizes = sizes_of((("t", "v", "h"), inputs[0].shape), (ids, inputs[1].shape))
    return OpDims((("t", "v", "h"), ids), ((*ids, "h"),), sizes, {"v": "sum"}, ((0,),))


def _grad_local(args: tuple[Arg, ...], ctx: LocalContext) -> tuple[Arg, ...]:
    spec, layout = ctx.outputs[0], ctx.out_layouts[0]
    assert spec is not None and layout is not None
    start: Arg = ctx.offset(spec, layout, 1) if any(place == Shard(dim=1) for place in layout) else 0
    return (*args[:2], ctx.local_outputs[0][1], start)


@register("paraplan.embedding_tables_grad", localise=_grad_local, workspace=workspace.embedding_tables_grad)
def embedding_tables_grad(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a t h, a t -> t v h`: positions contracted."""
    lead = dim_names(len(inputs[1].shape) - 1, skip="tvh")
    sizes = sizes_of((("t", "v", "h"), outputs[0].shape), ((*lead, "t"), inputs[1].shape))
    return OpDims(((*lead, "t", "h"), (*lead, "t")), (("t", "v", "h"),), sizes, dict.fromkeys(lead, "sum"), ((0,),))
