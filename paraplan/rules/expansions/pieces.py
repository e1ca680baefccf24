"""The instructions of a product in pieces (see `overlap`), as an expansion over local shapes."""

from __future__ import annotations

import math

from paraplan.ir.execution.rank_program import ROOM
from paraplan.ir.machine.collectives import ALL_GATHER, REDUCE_SCATTER
from paraplan.ir.model.graph import Arg, Graph, Op
from paraplan.ir.model.tensor import TensorSpec
from paraplan.rules.dims import LocalContext, dim_names
from paraplan.rules.expansions.overlap import GATHER, Pieces, parse_pieces
from paraplan.rules.expansions.ring import Steps


def product_in_pieces(op: Op, context: LocalContext, axis: int) -> Graph:
    """The steps of a product in pieces; see `OpDef.expand`."""
    pieces = parse_pieces(context.key)
    assert pieces is not None, context.key
    write = _gathered if pieces.collective == GATHER else _scattered
    return write(Steps(op, context, axis), context, _row_dim(pieces), pieces.count)


def _row_dim(pieces: Pieces) -> int:
    """The position of the rows' dim in the first input's shape."""
    return dim_names(24, skip="kn").index(pieces.dim)


def _weights(steps: Steps) -> tuple[Arg, ...]:
    """(weight, bias or None, whether the weight lies [k, n]) as `paraplan.linear` takes them."""
    _, weight, *rest = steps.args
    if len(rest) == 2:
        return weight, rest[0], rest[1]
    return weight, None, not rest[0]  # the gradient of an input multiplies by the weight as it lies the other way


def _gathered(steps: Steps, context: LocalContext, dim: int, count: int) -> Graph:
    x, out = steps.values["in0"], _out(context)
    length = x.shape[dim] // count
    part = TensorSpec(x.dtype, _sized(x.shape, dim, length))
    arrived = []
    for index in range(count):
        if math.prod(x.shape[:dim]) == 1:
            args: tuple[Arg, ...] = ("%in0", dim, index * length, (index + 1) * length, 1)
            piece = steps.add("aten.slice.Tensor", args, {f"piece{index}": part})
        else:
            piece = steps.add("paraplan.shard", ("%in0", dim, length, index * length), {f"piece{index}": part})
        arrived.append(steps.exchange(ALL_GATHER, piece, f"gathered{index}"))
    steps.add(ROOM, (out.shape,), {"room": out}, dtype=":" + out.dtype)
    for index, gathered in enumerate(arrived):
        where = (steps.size, count, index, dim)
        args = ("%room", "%" + gathered, *_weights(steps), *where)
        steps.ops.append(Op(target="paraplan.linear_into_", args=args, outs=()))
    # A name that nothing reads before the last piece: a collective would at once.
    done = steps.add("aten.view.default", ("%room", out.shape), {"out": out})
    return steps.graph((done,))


def _scattered(steps: Steps, context: LocalContext, dim: int, count: int) -> Graph:
    out = _out(context)
    part = TensorSpec(out.dtype, _sized(out.shape, dim, out.shape[dim] // count))
    stacked = TensorSpec(out.dtype, (steps.size * part.shape[0], *part.shape[1:]))
    parts = []
    for index in range(count):
        where = (steps.size, count, index, dim)
        made = steps.add("paraplan.linear_rows", ("%in0", *_weights(steps), *where), {f"partial{index}": stacked})
        parts.append(steps.exchange(REDUCE_SCATTER, made, f"part{index}"))
    joined = steps.add("aten.cat.default", (tuple("%" + name for name in parts), dim), {"out": out})
    return steps.graph((joined,))


def _out(context: LocalContext) -> TensorSpec:
    spec = context.outputs[0]
    assert spec is not None
    return TensorSpec(spec.dtype, context.local_outputs[0])


def _sized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
