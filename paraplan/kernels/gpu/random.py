"""Dropout and uniform numbers as one Triton kernel each: the bits of `kernels.random_kernels`, element by element.

A number is keyed by (seed, slot, global row, column). The block of the global tensor that a rank holds is walked as
[rows, columns]; a row's global index follows from the sizes, the global sizes and the starts of the leading dims, of
which those that lie wholly here are merged first (`merged_dims`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraplan.ir.machine.kernel_choice import merged_dims
from paraplan.ir.process.memo import SESSION
from paraplan.kernels.gpu.triton_launch import KEPT_LAUNCHES, Prepared, row_major

ELEMENTS, MOST_ELEMENTS = 2048, 4096
"""Of a program; the most where they are of one row, whose key is then made once (measured on an H200)."""
LEAST_COLUMNS = 64


@triton.jit
def _mix64(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _global_row(row, sizes, wholes, starts):  # type: ignore[no-untyped-def]
    """The index in the global tensor of a row of the block; the last leading dim first."""
    found = row * 0
    weight = row * 0 + 1
    for dim in tl.static_range(len(sizes)):
        found += (row % sizes[dim] + starts[dim]) * weight
        weight *= wholes[dim]
        row = row // sizes[dim]
    return found.to(tl.uint64)


@triton.jit
def stream_of(seed, slot_key):  # type: ignore[no-untyped-def]
    """A slot's stream of numbers (uint64)."""
    return _mix64(_mix64(seed.to(tl.uint64)) + slot_key)


@triton.jit
def keys_of_rows(stream, row):  # type: ignore[no-untyped-def]
    """Two uint32 for rows of a stream, by their global index (uint64)."""
    key = _mix64(row * 0x9E3779B97F4A7C15 + stream)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def finish(first, second, column):  # type: ignore[no-untyped-def]
    """Uniform bits of elements, as int32.

    Args:
        first, second: the keys of their rows (`keys_of_rows`).
        column: their columns in the global tensor, uint32; broadcast with the keys.
    """
    h = first ^ (column * 0x9E3779B1)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = ((h ^ (h >> 13)) + second) * 0xC2B2AE35
    h = h ^ (h >> 16)
    return h.to(tl.int32, bitcast=True)


@triton.jit
def _place(height, columns, sizes, wholes, starts, column_start, rows: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of a program's elements, which exist, their global rows ([rows, 1]) and columns ([1, block])."""
    across = (columns + block - 1) // block
    row = (tl.program_id(0) // across * rows + tl.arange(0, rows)).to(tl.int64)[:, None]
    column = (tl.program_id(0) % across * block + tl.arange(0, block))[None, :]
    there = (row < height) & (column < columns)
    found = _global_row(row, sizes, wholes, starts)
    return row * columns + column, there, found, (column + column_start).to(tl.uint32)


@triton.jit
def _dropout(
    x,
    seed,
    out,
    height,
    columns,
    sizes,
    wholes,
    starts,
    column_start,
    slot_key,
    threshold: tl.constexpr,
    scale: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    offsets, there, row, column = _place(height, columns, sizes, wholes, starts, column_start, rows, block)
    value = tl.load(x + offsets, mask=there)
    first, second = keys_of_rows(stream_of(tl.load(seed), slot_key), row)
    kept = finish(first, second, column) >= threshold
    wide = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    factor = tl.full((1, 1), scale, wide)
    tl.store(out + offsets, (value.to(wide) * kept.to(wide) * factor).to(x.dtype.element_ty), mask=there)


@triton.jit
def _uniform(
    seed,
    out,
    height,
    columns,
    sizes,
    wholes,
    starts,
    column_start,
    slot_key,
    rows: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    offsets, there, row, column = _place(height, columns, sizes, wholes, starts, column_start, rows, block)
    first, second = keys_of_rows(stream_of(tl.load(seed), slot_key), row)
    number = finish(first, second, column) >> 9
    value = (number.to(out.dtype.element_ty) + 4194304.5) * 1.1920928955078125e-07
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=there)


def slot_key(slot: int) -> int:
    """What a slot adds to the stream's key, as a signed 64-bit number."""
    key = slot * 0x632BE59BD9B4E019 % 2**64
    return key - 2**64 if key >= 2**63 else key


def dropout(x: Tensor, seed: Tensor, p: float, slot: int, global_shape: Sequence[int], starts: Sequence[int]) -> Tensor:
    """As `kernels.random_kernels.dropout`; one launch, and a copy first where x is not contiguous."""
    x = row_major(x)
    out = torch.empty_like(x)
    _dropout_launch(x.shape, p, slot, tuple(global_shape), tuple(starts))(x, seed, out)
    return out


def uniform(x: Tensor, seed: Tensor, slot: int, global_shape: Sequence[int], starts: Sequence[int]) -> Tensor:
    """As `kernels.random_kernels.uniform`; one launch."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _uniform_launch(x.shape, slot, tuple(global_shape), tuple(starts))(seed, out)
    return out


@SESSION.cached(most=KEPT_LAUNCHES)
def _dropout_launch(
    shape: tuple[int, ...], p: float, slot: int, global_shape: tuple[int, ...], starts: tuple[int, ...]
) -> Prepared:
    threshold, scale = threshold_and_scale(p)
    height, columns, *where = _where(shape, global_shape, starts)
    tile = _tile(height, columns)
    rest = height, columns, *where, slot_key(slot), threshold, scale, *tile
    return Prepared(_dropout, _grid(height, columns, *tile), rest, 1)


@SESSION.cached(most=KEPT_LAUNCHES)
def _uniform_launch(
    shape: tuple[int, ...], slot: int, global_shape: tuple[int, ...], starts: tuple[int, ...]
) -> Prepared:
    height, columns, *where = _where(shape, global_shape, starts)
    tile = _tile(height, columns)
    rest = height, columns, *where, slot_key(slot), *tile
    return Prepared(_uniform, _grid(height, columns, *tile), rest, 1)


def threshold_and_scale(p: float) -> tuple[int, float]:
    """Of dropout: the least bits that are kept, as int32, and the factor on what is kept."""
    return min(max(round(p * 2**32) - 2**31, -(2**31)), 2**31 - 1), 1.0 / (1.0 - p) if p < 1 else 0.0


def _tile(height: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a program, powers of 2: columns that leave little over, at most a whole row."""
    block = min(triton.next_power_of_2(max(columns, 1)), MOST_ELEMENTS)
    while block > LEAST_COLUMNS and -(-columns // block) * block > columns * 9 // 8:
        block //= 2
    return min(max(ELEMENTS // block, 1), triton.next_power_of_2(max(height, 1))), block


def _grid(height: int, columns: int, rows: int, block: int) -> tuple[int]:
    return (triton.cdiv(height, rows) * triton.cdiv(columns, block),)


def _where(
    shape: Sequence[int], global_shape: Sequence[int], starts: Sequence[int]
) -> tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """Rows, columns, (sizes, global sizes, starts) of merged leading dims, last first, and the first column."""
    sizes, wholes, begins = merged_dims(shape, global_shape, starts)
    columns = shape[-1] if shape else 1
    return math.prod(shape[:-1]), columns, sizes, wholes, begins, starts[-1] if starts else 0
