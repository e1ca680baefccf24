"""Strides of local values, as torch computes them.

A plan's memory is true only if it is known which reshapes are views and which copy, and that follows from
strides. These are torch's own rules, without torch: `view_strides` is `at::detail::computeStride`,
`elementwise_strides` is TensorIterator's (also `torch._prims_common.compute_elementwise_output_strides`),
`joined_strides` is that of concatenation and padding, which keep images channels last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Dims = tuple[int, ...]


def contiguous_strides(shape: Dims) -> Dims:
    """Row-major strides of a shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Dims, strides: Dims) -> bool:
    """Whether elements lie in row-major order without gaps (dims of size 1 do not count)."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def is_dense(shape: Dims, strides: Dims) -> bool:
    """Whether elements fill their storage without gaps or overlap, in any order of dims."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def view_strides(shape: Dims, strides: Dims, new_shape: Dims) -> Dims | None:
    """Strides of a view as `new_shape`, or None where only a copy has that shape.

    Args:
        shape, strides: of the tensor.
        new_shape: of as many elements.
    Source: torch's computeStride (aten/src/ATen/TensorUtils.cpp).
    """
    if not shape:
        return (1,) * len(new_shape)
    if any(size == 0 for size in shape):
        return contiguous_strides(new_shape)
    result = [0] * len(new_shape)
    view_dim = len(new_shape) - 1
    chunk_stride, tensor_numel, view_numel = strides[-1], 1, 1
    for dim in range(len(shape) - 1, -1, -1):
        tensor_numel *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != tensor_numel * chunk_stride):
            while view_dim >= 0 and (view_numel < tensor_numel or new_shape[view_dim] == 1):
                result[view_dim] = view_numel * chunk_stride
                view_numel *= new_shape[view_dim]
                view_dim -= 1
            if view_numel != tensor_numel:
                return None
            if dim > 0:
                chunk_stride, tensor_numel, view_numel = strides[dim - 1], 1, 1
    return tuple(result) if view_dim == -1 else None


def merges_batch(shape: Dims, strides: Dims) -> bool:
    """Whether all dims but the last two are one in a view."""
    groups, matrix = math.prod(shape[:-2]), shape[-2:]
    return view_strides(shape, strides, (groups, *matrix)) is not None


def elementwise_strides(out_shape: Dims, inputs: Sequence[tuple[Dims, Dims]]) -> Dims:
    """Strides TensorIterator gives the fresh output of an elementwise op.

    Args:
        out_shape: the broadcast shape.
        inputs: (shape, strides) of each tensor input, before broadcasting.
    """
    if not inputs:
        return contiguous_strides(out_shape)
    expanded = [_broadcast_strides(shape, strides, out_shape) for shape, strides in inputs]
    full = [shape == out_shape for shape, _ in inputs]
    if all(full) and all(is_contiguous(out_shape, strides) for strides in expanded):
        return contiguous_strides(out_shape)
    if all(full) and len(set(expanded)) == 1 and is_dense(out_shape, expanded[0]):
        return expanded[0]
    order = _iteration_order(out_shape, expanded)
    strides, step = [0] * len(out_shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(out_shape[dim], 1)
    return tuple(strides)


def channels_last_strides(shape: Dims) -> Dims:
    """Strides of [batch, channels, *space] with channels innermost."""
    order = (*range(2, len(shape)), 1)
    strides, step = [0] * len(shape), 1
    for dim in (*reversed(order), 0):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def is_channels_last(shape: Dims, strides: Dims) -> bool:
    """Whether torch takes a tensor for channels last (`suggest_memory_format`; ambiguous ones are row-major).

    Source: is_channels_last_strides_2d_s4 and _3d_s5 (c10/core/MemoryFormat.h).
    """
    if len(shape) not in (4, 5) or strides[1] == 0:
        return False
    least = 0
    for dim in (1, *reversed(range(2, len(shape))), 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(shape[dim], 1)
    return True


def joined_strides(out_shape: Dims, inputs: Sequence[tuple[Dims, Dims]]) -> Dims:
    """Strides of a concatenation, or of one input padded: channels last if all inputs are, else row-major."""
    if inputs and all(is_channels_last(shape, strides) for shape, strides in inputs):
        return channels_last_strides(out_shape)
    return contiguous_strides(out_shape)


def _broadcast_strides(shape: Dims, strides: Dims, out_shape: Dims) -> Dims:
    lead = len(out_shape) - len(shape)
    kept = tuple(
        0 if size == 1 and out != 1 else stride
        for size, stride, out in zip(shape, strides, out_shape[lead:], strict=True)
    )
    return (0,) * lead + kept


def _iteration_order(shape: Dims, operands: list[Dims]) -> list[int]:
    """Dims from fastest to slowest: TensorIteratorBase::reorder_dimensions."""

    def should_swap(a: int, b: int) -> int:
        for strides in operands:
            if strides[a] == 0 or strides[b] == 0:
                continue
            if strides[a] != strides[b]:
                return -1 if strides[a] < strides[b] else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    order = list(range(len(shape) - 1, -1, -1))
    for i in range(1, len(order)):
        dim1 = i
        for dim0 in range(i - 1, -1, -1):
            comparison = should_swap(order[dim0], order[dim1])
            if comparison > 0:
                order[dim0], order[dim1] = order[dim1], order[dim0]
                dim1 = dim0
            elif comparison < 0:
                break
    return order
