"""Ops that make values: constants and random masks."""

from __future__ import annotations

from paraplan.ir.machine.mesh import Shard
from paraplan.ir.model.graph import Arg, Op
from paraplan.rules.dims import WHOLE, LocalContext, OpDims, Specs, dim_names, register, sizes_of, uneven
from paraplan.rules.workspace import workspace


@register("aten.full.default", localise=lambda args, ctx: (ctx.local_outputs[0], *args[1:]))
def full(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`-> a b`: each rank makes its share."""
    names = dim_names(len(outputs[0].shape))
    return uneven(OpDims((), (names,), sizes_of((names, outputs[0].shape))))


@register(
    *("aten.arange.start_step", "aten.arange.default", "aten.arange.start", "aten.eye.default"),
    *("aten.linspace.default", "paraplan.constant"),
)
def whole(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """Small constants are made whole and cut afterwards."""
    return OpDims((), ((WHOLE,) * len(outputs[0].shape),), {})


def _starts(args: tuple[Arg, ...], ctx: LocalContext) -> tuple[Arg, ...]:
    spec, layout = ctx.inputs[0], ctx.in_layouts[0]
    starts = tuple(
        ctx.offset(spec, layout, dim) if any(p == Shard(dim=dim) for p in layout) else 0
        for dim in range(len(spec.shape))
    )
    return (*args[:-1], starts)


@register("paraplan.dropout", localise=_starts, workspace=workspace.dropout)
def dropout(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b, () -> a b`, linear in x: the mask is keyed by the global element index, so any shard knows its own."""
    names = dim_names(len(inputs[0].shape))
    return uneven(OpDims((names, ()), (names,), sizes_of((names, inputs[0].shape)), {}, ((0,),)))


@register("paraplan.uniform", localise=_starts, workspace=workspace.uniform)
def uniform(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b, () -> a b`: keyed by the global element index; of x, the shape alone is looked at."""
    names = dim_names(len(inputs[0].shape))
    return uneven(OpDims((names, ()), (names,), sizes_of((names, inputs[0].shape))))
