"""Ops that move or re-read elements: views, slices, concatenation, padding.

A reshape maps groups of input dims to groups of output dims with equal products (factor groups). Inside a
group dims are cut into common factors; only the leading factor of a dim may be sharded, and only where it
leads on both sides, for only then are the shards contiguous blocks on both. Sharded sizes are always those
of the local output, never matched by number. A dim that is merged or split must divide: its blocks would begin
elsewhere than those of what it becomes.
"""

from __future__ import annotations

import math

from paraplan.ir.model.graph import Arg, Op
from paraplan.rules.dims import WHOLE, LocalContext, OpDims, Specs, dim_names, place_of_dim, register, sizes_of, uneven


def factor_dims(
    source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, int]]:
    """Named dims of a reshape.

    Args:
        source, target: shapes with equal products.
    Returns:
        Names of the source's dims, of the target's dims, and the size of each named dim (the leading factor's extent).
    """
    left, right = [WHOLE] * len(source), [WHOLE] * len(target)
    sizes: dict[str, int] = {}
    names = iter(dim_names(26))
    i = j = 0
    while i < len(source) and j < len(target):
        if source[i] == 1:
            i += 1
            continue
        if target[j] == 1:
            j += 1
            continue
        name = next(names)
        left[i] = right[j] = name
        sizes[name] = math.gcd(source[i], target[j])  # equal blocks on both sides
        a, b = source[i], target[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(source):
                a, i = a * source[i], i + 1
            elif j < len(target):
                b, j = b * target[j], j + 1
            else:
                break
    return tuple(left), tuple(right), sizes


@register(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    strides="view",
    localise=lambda args, ctx: (args[0], ctx.local_outputs[0]),
)
def view(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`(a x) b -> a (x b)` and the like."""
    source, target = inputs[0].shape, outputs[0].shape
    left, right, sizes = factor_dims(source, target)
    merged = [name for name, size in sizes.items() if not source[left.index(name)] == target[right.index(name)] == size]
    return uneven(OpDims((left,), (right,), sizes, {}, ((0,),)), *merged)


@register("aten.permute.default", strides="view")
def permute(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b c -> b c a`."""
    names = dim_names(len(inputs[0].shape))
    order = [int(dim) % len(names) for dim in op.args[1]]
    return uneven(
        OpDims((names,), (tuple(names[dim] for dim in order),), sizes_of((names, inputs[0].shape)), {}, ((0,),))
    )


@register("aten.expand.default", strides="view", localise=lambda args, ctx: (args[0], ctx.local_outputs[0]))
def expand(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`_ b -> a b`: a new or widened dim may be sharded, each rank widening to its share."""
    names = dim_names(len(outputs[0].shape))
    lead = len(names) - len(inputs[0].shape)
    left = tuple(
        name if size == out else WHOLE
        for name, size, out in zip(names[lead:], inputs[0].shape, outputs[0].shape[lead:], strict=True)
    )
    return uneven(OpDims((left,), (names,), sizes_of((names, outputs[0].shape)), {}, ((0,),)))


def _all_but(shape: tuple[int, ...], dim: int) -> tuple[str, ...]:
    names = dim_names(len(shape))
    return tuple(WHOLE if index == place_of_dim(dim, shape) else name for index, name in enumerate(names))


@register("aten.slice.Tensor", strides="view")
def slice_(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ -> a _`: the sliced dim is whole."""
    names = _all_but(inputs[0].shape, int(op.args[1]))
    return uneven(OpDims((names,), (names,), sizes_of((names, inputs[0].shape)), {}, ((0,),)))


@register("aten.select.int", strides="view")
def select(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ b -> a b`."""
    dim = int(op.args[1]) % len(inputs[0].shape)
    names = _all_but(inputs[0].shape, dim)
    return uneven(OpDims((names,), (names[:dim] + names[dim + 1 :],), sizes_of((names, inputs[0].shape)), {}, ((0,),)))


def _local_sizes(args: tuple[Arg, ...], ctx: LocalContext) -> tuple[Arg, ...]:
    return (args[0], ctx.local_outputs[0], *args[2:])


@register("aten.slice_backward.default", localise=_local_sizes)
def slice_backward(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ -> a _`: the gradient laid into zeros."""
    names = _all_but(outputs[0].shape, int(op.args[2]))
    return uneven(OpDims((names,), (names,), sizes_of((names, outputs[0].shape)), {}, ((0,),)))


@register("aten.select_backward.default", localise=_local_sizes)
def select_backward(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b -> a _ b`."""
    dim = int(op.args[2]) % len(outputs[0].shape)
    names = _all_but(outputs[0].shape, dim)
    return uneven(OpDims((names[:dim] + names[dim + 1 :],), (names,), sizes_of((names, outputs[0].shape)), {}, ((0,),)))


@register("aten.cat.default", strides="joined")
def cat(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _, a _ -> a _`."""
    dim = int(op.args[1]) if len(op.args) > 1 else int(op.kwargs.get("dim", 0))
    names = _all_but(outputs[0].shape, dim)
    everything = tuple(range(len(inputs)))
    return uneven(OpDims((names,) * len(inputs), (names,), sizes_of((names, outputs[0].shape)), {}, (everything,)))


@register("aten.constant_pad_nd.default", strides="joined")
def constant_pad(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """Padded dims are whole; padding with zero is linear. The pads say which: (1, -1) shifts and keeps the size."""
    rank = len(inputs[0].shape)
    padded = {rank - 1 - index // 2 for index, pad in enumerate(op.args[1]) if pad != 0}
    kept = tuple(WHOLE if dim in padded else name for dim, name in enumerate(dim_names(rank)))
    zero = len(op.args) < 3 or op.args[2] == 0
    return uneven(OpDims((kept,), (kept,), sizes_of((kept, inputs[0].shape)), {}, ((0,),) if zero else ()))


def _reordered(dims: tuple[Arg, ...], inputs: Specs) -> OpDims:
    """Dims whose elements are reordered are whole."""
    rank = len(inputs[0].shape)
    moved = {place_of_dim(dim, inputs[0].shape) for dim in dims}
    names = tuple(WHOLE if index in moved else name for index, name in enumerate(dim_names(rank)))
    return uneven(OpDims((names,), (names,), sizes_of((names, inputs[0].shape)), {}, ((0,),)))


@register("aten.flip.default", strides="elementwise")
def flip(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ -> a _`."""
    return _reordered(op.args[1], inputs)


@register("aten.roll.default", strides="joined")
def roll(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ -> a _`; without dims it rolls all of them as one."""
    dims = op.args[2] if len(op.args) > 2 else op.kwargs.get("dims", ())
    return _reordered(dims or tuple(range(len(inputs[0].shape))), inputs)
