"""Products of rows grouped by matrix, in one launch whatever the groups' sizes, which the host never reads.

    product     y[r] = a[r] · b[g(r)]             rows by a stack of matrices
    outer       y[g] = Σ over rows r of g: a[r]ᵀ b[r]    a stack of matrices from rows

A group's rows lie one after another and end where `ends` says; rows after the last end are neither read nor written.
Torch's kernel takes bfloat16 in rows and strides of whole 16 bytes, on compute capability 9 and 10 (elsewhere it would
wait for the ends); tiles of ours take everything else, with as many launches and nothing allocated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraplan.kernels.gpu.triton_launch import launch
from paraplan.kernels.torch_private import is_fake


@triton.jit
def _group_of(tile, ends, groups, tile_m: tl.constexpr):  # type: ignore[no-untyped-def]
    """The group of a tile of rows, -1 where there is none, its first row and where the group ends."""
    group, row, stop, seen, start = tile * 0 - 1, tile * 0, tile * 0, tile * 0, tile * 0
    for each in range(groups):
        end = tl.load(ends + each)
        tiles = (end - start + tile_m - 1) // tile_m
        here = (tile >= seen) & (tile < seen + tiles)
        group = tl.where(here, each, group)
        row = tl.where(here, start + (tile - seen) * tile_m, row)
        stop = tl.where(here, end, stop)
        seen += tiles
        start = end
    return group, row, stop


@triton.jit
def _product(
    a, b, out, ends, groups, k, n, pitch, bs, tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr
):  # type: ignore[no-untyped-def]
    group, row, stop = _group_of(tl.program_id(0), ends, groups, tile_m)
    if group >= 0:
        m = (row + tl.arange(0, tile_m)).to(tl.int64)
        column = tl.program_id(1) * tile_n + tl.arange(0, tile_n)
        acc = tl.zeros((tile_m, tile_n), tl.float32)
        for first in range(0, k, tile_k):
            at = first + tl.arange(0, tile_k)
            left = tl.load(
                a + m[:, None] * pitch + at[None, :], mask=(m[:, None] < stop) & (at[None, :] < k), other=0.0
            )
            place = b + group.to(tl.int64) * bs[0] + at[:, None] * bs[1] + column[None, :] * bs[2]
            right = tl.load(place, mask=(at[:, None] < k) & (column[None, :] < n), other=0.0)
            acc += tl.dot(left, right, input_precision="ieee")
        there = (m[:, None] < stop) & (column[None, :] < n)
        tl.store(out + m[:, None] * n + column[None, :], acc.to(out.dtype.element_ty), mask=there)


@triton.jit
def _outer(a, b, out, ends, m, n, a_pitch, b_pitch, tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr):  # type: ignore[no-untyped-def]
    group = tl.program_id(2)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    stop = tl.load(ends + group)
    row = tl.program_id(0) * tile_m + tl.arange(0, tile_m)
    column = tl.program_id(1) * tile_n + tl.arange(0, tile_n)
    acc = tl.zeros((tile_m, tile_n), tl.float32)
    for first in range(start, stop, tile_k):
        at = (first + tl.arange(0, tile_k)).to(tl.int64)
        inside = at[:, None] < stop
        left = tl.load(a + at[:, None] * a_pitch + row[None, :], mask=inside & (row[None, :] < m), other=0.0)
        right = tl.load(b + at[:, None] * b_pitch + column[None, :], mask=inside & (column[None, :] < n), other=0.0)
        acc += tl.dot(tl.trans(left), right, input_precision="ieee")
    place = out + group.to(tl.int64) * m * n + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(row[:, None] < m) & (column[None, :] < n))


def product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Rows by the matrices of their groups.

    Args:
        a: [row, k], its last dim dense.
        b: [group, k, n], of any strides.
        ends: [group] int32, where each group's rows end.
    Returns:
        [row, n]; rows after the last end are arbitrary.
    """
    if _is_torchs(a, b):
        return torch.ops.aten._grouped_mm.default(a, b, ends)  # type: ignore[no-any-return]
    (rows, k), (groups, _, n) = a.shape, b.shape
    out = a.new_empty(rows, n)
    tiles = _tiles(a)
    grid = (triton.cdiv(rows, tiles[0]) + groups, triton.cdiv(n, tiles[1]))
    launch(_product, grid, (a, b, out, ends, groups, k, n, a.stride(0), b.stride(), *tiles), (a, b, ends), (out,))
    return out


def outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Products of transposed rows with rows, summed by group; zeros of groups without rows.

    Args:
        a: [row, m], its last dim dense.
        b: [row, n], likewise.
        ends: [group] int32, where each group's rows end.
    Returns:
        [group, m, n].
    """
    if _is_torchs(a, b):
        return torch.ops.aten._grouped_mm.default(a.t(), b, ends)  # type: ignore[no-any-return]
    (m, n), groups = (a.shape[1], b.shape[1]), ends.shape[0]
    out = a.new_empty(groups, m, n)
    tiles = _tiles(a)
    grid = (triton.cdiv(m, tiles[0]), triton.cdiv(n, tiles[1]), groups)
    launch(_outer, grid, (a, b, out, ends, m, n, a.stride(0), b.stride(0), *tiles), (a, b, ends), (out,))
    return out


def _tiles(a: Tensor) -> tuple[int, int, int]:
    return (64, 64, 32) if a.dtype == torch.float32 else (128, 128, 32)


def _is_torchs(a: Tensor, b: Tensor) -> bool:
    """Whether torch's kernel takes these without the host; without data, those of a device that has it are meant."""
    if a.dtype != torch.bfloat16 or not all(map(_is_aligned, (a, b))):
        return False
    return not a.is_cuda or is_fake(a) or torch.cuda.get_device_capability(a.device)[0] in (9, 10)


def _is_aligned(x: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes and hold as many."""
    rest = [stride for stride in x.stride() if stride != 1]
    return all(number % 8 == 0 for number in (x.storage_offset(), *rest, *x.shape[-2 if x.dim() == 3 else -1 :]))
