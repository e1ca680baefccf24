"""Embedding and cross-entropy: the vocabulary is a dim like any other.

Over a split vocabulary each rank looks up or scores its own rows, shifted by its offset, and the partial
results add up (the maximum for `ce_max`): Megatron-LM's vocabulary parallelism (Shoeybi et al. 2019, 3). It need not
divide: no id is a padded row, and what runs over all columns is told where they end.
"""

from __future__ import annotations

from paraplan.ir.machine.mesh import Shard, padded_dims
from paraplan.ir.model.graph import Arg, Op
from paraplan.rules.dims import (
    WHOLE,
    LocalContext,
    OpDims,
    Specs,
    dim_names,
    place_of_dim,
    register,
    replicated,
    sizes_of,
    uneven,
)
from paraplan.rules.workspace import workspace


def _start(
    args: tuple[Arg, ...], ctx: LocalContext, position: int, index: int, dim: int, output: bool = False
) -> tuple[Arg, ...]:
    spec, layout = (
        (ctx.outputs[index], ctx.out_layouts[index]) if output else (ctx.inputs[index], ctx.in_layouts[index])
    )
    assert spec is not None and layout is not None
    sharded = any(placement == Shard(dim=dim) for placement in layout)
    return (*args[:position], ctx.offset(spec, layout, dim) if sharded else 0, *args[position + 1 :])


def start_and_size(args: tuple[Arg, ...], ctx: LocalContext, position: int, dim: int) -> tuple[Arg, ...]:
    """Where a rank's block of the first input's dim begins and, last, how long that dim is where it is split.

    Args:
        args: of the op.
        ctx: what its rule may look at.
        position: of the argument that says where the block begins.
        dim: of the first input.
    """
    found = _start(args, ctx, position, 0, dim)
    return found if found[position] == 0 else (*found, ctx.inputs[0].shape[dim])


@register(
    "paraplan.embedding", localise=lambda args, ctx: start_and_size(args, ctx, 2, 0), workspace=workspace.embedding
)
def embedding(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`v h, a b -> a b h`, v contracted."""
    ids = dim_names(len(inputs[1].shape), skip="vh")
    sizes = sizes_of((("v", "h"), inputs[0].shape), (ids, inputs[1].shape))
    dims = OpDims(
        (("v", "h"), ids), ((*ids, "h"),), sizes, {"v": "sum"}, ((0,),), fills={"v": ()} | dict.fromkeys(ids, ((1, 0),))
    )
    return uneven(dims)


def _grad_local(args: tuple[Arg, ...], ctx: LocalContext) -> tuple[Arg, ...]:
    sized = (*args[:2], ctx.local_outputs[0][0], *args[3:])
    return _start(sized, ctx, 4, 0, 0, output=True)


@register("paraplan.embedding_grad", localise=_grad_local, workspace=workspace.embedding_grad)
def embedding_grad(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b h, a b -> v h`: positions contracted; each rank may hold its own rows."""
    ids = dim_names(len(inputs[1].shape), skip="vh")
    sizes = sizes_of((("v", "h"), outputs[0].shape), (ids, inputs[1].shape))
    return uneven(OpDims(((*ids, "h"), ids), (("v", "h"),), sizes, dict.fromkeys(ids, "sum"), ((0,),)))


def _rows(inputs: Specs, logits: int) -> tuple[tuple[str, ...], dict[str, int]]:
    shape = inputs[logits].shape
    rows = dim_names(len(shape) - 1, skip="v")
    return rows, sizes_of(((*rows, "v"), shape))


def _columns(args: tuple[Arg, ...], ctx: LocalContext) -> tuple[Arg, ...]:
    """How many columns there are in all and where this rank's begin, where the last ones are padding."""
    spec, layout = ctx.inputs[0], ctx.in_layouts[0]
    last = len(spec.shape) - 1
    if all(dim != last for dim, _ in padded_dims(spec.shape, layout, ctx.mesh_shape)):
        return args
    return (*args, spec.shape[last], ctx.offset(spec, layout, last))


@register("paraplan.ce_max", localise=_columns, workspace=workspace.ce_max)
def ce_max(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b v -> a b`, a maximum over v; the kernel leaves padded columns out."""
    rows, sizes = _rows(inputs, 0)
    return uneven(OpDims(((*rows, "v"),), (rows,), sizes, {"v": "max"}, fills={"v": ()}))


@register("paraplan.ce_sumexp", localise=_columns, workspace=workspace.ce_rows)
def ce_sumexp(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b v, a b -> a b`, a sum over v; the kernel leaves padded columns out."""
    rows, sizes = _rows(inputs, 0)
    return uneven(OpDims(((*rows, "v"), rows), (rows,), sizes, {"v": "sum"}, fills={"v": ()}))


@register(
    "paraplan.ce_target",
    localise=lambda args, ctx: start_and_size(args, ctx, 3, len(ctx.inputs[0].shape) - 1),
    workspace=workspace.ce_target,
)
def ce_target(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b v, a b -> a b`: the label's logit, by the rank that has it; padded rows are ignored, no label is padding."""
    rows, sizes = _rows(inputs, 0)
    fills: dict[str, tuple[tuple[int, float], ...]] = {"v": ()} | dict.fromkeys(rows, ((1, int(op.args[2])),))
    return uneven(OpDims(((*rows, "v"), rows), (rows,), sizes, {"v": "sum"}, fills=fills))


@register("paraplan.ce_loss", workspace=workspace.ce_loss)
def ce_loss(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b, a b, a b, a b -> `: the sum over positions; padded ones are ignored labels."""
    rows = dim_names(len(inputs[0].shape))
    fills: dict[str, tuple[tuple[int, float], ...]] = dict.fromkeys(rows, ((3, int(op.args[4])),))
    return uneven(
        OpDims((rows,) * 4, ((),), sizes_of((rows, inputs[0].shape)), dict.fromkeys(rows, "sum"), fills=fills)
    )


@register(
    "paraplan.ce_grad",
    localise=lambda args, ctx: _start(args, ctx, 6, 1, len(ctx.inputs[1].shape) - 1),
    workspace=workspace.ce_grad,
)
def ce_grad(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`(), a b v, a b, a b, a b -> a b v`."""
    rows, sizes = _rows(inputs, 1)
    return uneven(OpDims(((), (*rows, "v"), rows, rows, rows), ((*rows, "v"),), sizes))


@register("aten.gather.default")
def gather(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _, a _ -> a _`: the gathered dim is whole; others must agree in size."""
    if len(inputs[0].shape) != len(inputs[1].shape):  # of a scalar
        return replicated(inputs, outputs)
    dim = place_of_dim(op.args[1], inputs[0].shape)
    names = tuple(
        WHOLE if index == dim or size != other else name
        for index, (name, size, other) in enumerate(
            zip(dim_names(len(inputs[0].shape)), inputs[0].shape, inputs[1].shape, strict=True)
        )
    )
    return OpDims((names, names), (names,), sizes_of((names, inputs[0].shape)), {}, ((0,),))
