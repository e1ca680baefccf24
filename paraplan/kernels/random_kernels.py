"""Counter-based dropout and uniform numbers: the mask of an element follows from (seed, slot, its global index) alone.

So shards of a tensor drop exactly what the whole tensor would, a recomputation draws the same mask again, and
nothing has to be saved. Two levels: a 64-bit key per row hashed from (seed, slot, global row), then a 32-bit mix
of the key with the column, in place, in chunks that stay in cache. A row is the last dim of the global tensor.

Mixers: splitmix64 (Steele et al. 2014) for rows, murmur3's finaliser for columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 16


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
_MIX64 = (_signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64))
_COLUMN = _signed(0x9E3779B1, 32)
_MIX32 = (_signed(0x85EBCA6B, 32), _signed(0xC2B2AE35, 32))


def _mix64(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX64[0]
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX64[1]
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _global_rows(
    shape: Sequence[int], global_shape: Sequence[int], starts: Sequence[int], device: torch.device
) -> Tensor:
    """Index, in the global tensor, of every row of the block."""
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for size, whole, start in zip(shape[:-1], global_shape[:-1], starts[:-1], strict=True):
        rows = (rows * whole).unsqueeze(-1) + torch.arange(start, start + size, device=device)
    return rows.reshape(-1)


def _row_keys(seed: Tensor, slot: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    stream = _mix64(_mix64(seed.to(torch.int64)) + _signed(slot * 0x632BE59BD9B4E019, 64))
    keys = _mix64(rows * _GOLDEN + stream).view(torch.int32).view(-1, 2)
    return keys[:, :1].contiguous(), keys[:, 1:].contiguous()


def _mix_columns(first: Tensor, second: Tensor, columns: Tensor) -> Tensor:
    """Uniform int32 for rows x columns: xor the key in, multiply and fold twice."""
    h = first ^ columns
    fold = h >> 16
    h.bitwise_xor_(fold.bitwise_and_(0xFFFF)).mul_(_MIX32[0])
    torch.bitwise_right_shift(h, 13, out=fold)
    h.bitwise_xor_(fold.bitwise_and_(0x7FFFF)).add_(second).mul_(_MIX32[1])
    torch.bitwise_right_shift(h, 16, out=fold)
    return h.bitwise_xor_(fold.bitwise_and_(0xFFFF))


def dropout(x: Tensor, seed: Tensor, p: float, slot: int, global_shape: Sequence[int], starts: Sequence[int]) -> Tensor:
    """x · mask / (1 − p), mask keyed by (seed, slot, global element index).

    Args:
        x: a block of the global tensor.
        seed: int64 scalar tensor.
        p: probability of dropping.
        slot: which random op of the kind this is.
        global_shape: shape of the whole tensor.
        starts: where the block begins in it, per dim.
    Returns:
        Contiguous tensor like x.
    """
    shape = tuple(x.shape) or (1,)
    flat = x.reshape(math.prod(shape[:-1]), shape[-1])
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    threshold = min(max(round(p * 2**32) - 2**31, -(2**31)), 2**31 - 1)
    scale = 1.0 / (1.0 - p) if p < 1 else 0.0
    for rows, columns, numbers in _draws(shape, seed, slot, global_shape, starts, x.device):
        target = out[rows, columns]
        torch.mul(flat[rows, columns], numbers() >= threshold, out=target)
        target.mul_(scale)
    return out.view(x.shape)


def uniform(x: Tensor, seed: Tensor, slot: int, global_shape: Sequence[int], starts: Sequence[int]) -> Tensor:
    """Numbers in (0, 1), 23 bits each, keyed as in `dropout`; float32 or float64, as x is.

    Args:
        x: gives shape and dtype; a block of the global tensor.
        seed, slot, global_shape, starts: see `dropout`.
    """
    shape = tuple(x.shape) or (1,)
    out = torch.empty((math.prod(shape[:-1]), shape[-1]), dtype=x.dtype, device=x.device)
    for rows, columns, numbers in _draws(shape, seed, slot, global_shape, starts, x.device):
        out[rows, columns].copy_(numbers().bitwise_right_shift_(9)).add_(2**22 + 0.5).mul_(2.0**-23)
    return out.view(x.shape)


def _draws(
    shape: Sequence[int],
    seed: Tensor,
    slot: int,
    global_shape: Sequence[int],
    starts: Sequence[int],
    device: torch.device,
) -> Iterator[tuple[slice, slice, Callable[[], Tensor]]]:
    """Chunk by chunk: rows, columns, and what makes their uniform int32."""
    whole, begin = tuple(global_shape) or (1,), tuple(starts) or (0,)
    height_in_all, columns = math.prod(shape[:-1]), shape[-1]
    first, second = _row_keys(seed, slot, _global_rows(shape, whole, begin, device))
    width = min(columns, CHUNK_ELEMENTS)
    height = max(1, CHUNK_ELEMENTS // max(width, 1))
    for left in range(0, columns, max(width, 1)):
        right = min(left + width, columns)
        numbers = torch.arange(begin[-1] + left, begin[-1] + right, dtype=torch.int32, device=device).mul_(_COLUMN)
        for top in range(0, height_in_all, height):
            rows = slice(top, min(top + height, height_in_all))
            yield rows, slice(left, right), partial(_mix_columns, first[rows], second[rows], numbers)
