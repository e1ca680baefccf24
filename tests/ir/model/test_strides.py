"""Strides without torch, held against torch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._prims_common import is_non_overlapping_and_dense_or_false

from paraplan.ir.model.strides import (
    channels_last_strides,
    contiguous_strides,
    elementwise_strides,
    is_channels_last,
    is_contiguous,
    is_dense,
    joined_strides,
    view_strides,
)

Dims = tuple[int, ...]


def seen(shape: Dims, strides: Dims) -> Dims:
    """Strides that matter."""
    return tuple(stride for size, stride in zip(shape, strides, strict=True) if size != 1)


@st.composite
def laid(draw: st.DrawFn, shape: Dims | None = None) -> torch.Tensor:
    """A tensor permuted, sliced or widened from a contiguous one."""
    if shape is None:
        shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    x = torch.empty([shape[dim] * steps[dim] for dim in order], device="meta")
    x = x.permute([order.index(dim) for dim in range(len(shape))]) if shape else x
    for dim, step in enumerate(steps):
        x = x[(slice(None),) * dim + (slice(0, None, step),)] if shape[dim] else x
    return x


@st.composite
def splits(draw: st.DrawFn, numel: int) -> Dims:
    """A shape of that many elements."""
    found: list[int] = []
    while numel > 1 and len(found) < 5:
        found.append(draw(st.sampled_from([k for k in range(1, numel + 1) if numel % k == 0])))
        numel //= found[-1]
    return (*found, numel) if numel > 1 or draw(st.booleans()) else tuple(found)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_views_succeed_where_torchs_do(data: st.DataObject) -> None:
    x = data.draw(laid())
    shape = data.draw(splits(x.numel()))
    found = view_strides(tuple(x.shape), x.stride(), shape)
    try:
        wanted = x.view(shape).stride()
    except RuntimeError:
        assert found is None, (x.shape, x.stride(), shape)
        return
    assert found is not None and seen(shape, found) == seen(shape, wanted), (x.shape, x.stride(), shape)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_elementwise_results_lie_as_torchs_do(data: st.DataObject) -> None:
    out = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)))
    inputs = []
    for _ in range(data.draw(st.integers(1, 3))):
        lead = data.draw(st.integers(0, len(out)))
        shape = tuple(1 if data.draw(st.integers(0, 4)) == 0 else size for size in out[lead:])
        inputs.append(data.draw(laid(shape)))
    names = "abc"[: len(inputs)]
    real = [torch.empty_strided(x.shape, x.stride(), dtype=torch.float32) for x in inputs]
    result = {1: torch.relu, 2: torch.add, 3: torch.addcmul}[len(names)](*real)
    shape = tuple(result.shape)
    found = elementwise_strides(shape, [(tuple(x.shape), x.stride()) for x in inputs])
    assert seen(shape, found) == seen(shape, result.stride()), [(x.shape, x.stride()) for x in inputs]


@settings(max_examples=300, deadline=None)
@given(laid())
def test_contiguity_and_density(x: torch.Tensor) -> None:
    shape = tuple(x.shape)
    assert is_contiguous(shape, x.stride()) == x.is_contiguous()
    assert is_dense(shape, x.stride()) == is_non_overlapping_and_dense_or_false(x)


def test_contiguous_strides() -> None:
    for shape in ((), (3,), (2, 3, 4), (2, 0, 4), (1, 5, 1)):
        assert contiguous_strides(shape) == torch.empty(shape).stride()
    assert view_strides((0, 4), (4, 1), (2, 0)) is not None
    assert view_strides((), (), (1, 1)) == torch.empty(()).view(1, 1).stride()


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_images_channels_last(data: st.DataObject) -> None:
    """Padding and concatenation keep channels last, ambiguous shapes (sizes of 1) as torch decides."""
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=4, max_size=5)))
    x = data.draw(laid(shape))
    lie = (shape, x.stride())
    padded = torch.constant_pad_nd(x, [1, 2])
    assert padded.stride() == joined_strides(tuple(padded.shape), [lie])
    other = data.draw(laid(shape))
    joined = torch.cat([x, other], 1)
    assert joined.stride() == joined_strides(tuple(joined.shape), [lie, (shape, other.stride())])


def test_channels_last_strides() -> None:
    for shape, order in (((2, 3, 4, 5), torch.channels_last), ((2, 3, 4, 5, 6), torch.channels_last_3d)):
        wanted = torch.empty(shape, device="meta", memory_format=order).stride()
        assert channels_last_strides(shape) == wanted and is_channels_last(shape, wanted)
        assert not is_channels_last(shape, contiguous_strides(shape))
