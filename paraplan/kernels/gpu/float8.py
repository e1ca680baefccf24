"""Scales and casts to float8 in Triton: the bits of `kernels.float8_kernels`.

A scale is a power of two, so it follows from the bits of the maximum without a division, and dividing by it only moves
an exponent. Maxima of parts of a tensor are found by as many programs as a device runs at once; a second kernel joins
them. A cast reads a tensor once and writes it row by row, its transpose, or both. Rounding is done on the bits (to
nearest, ties to even, as torch does), which is as quick as memory is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraplan.kernels.float8_kernels import LEAST
from paraplan.kernels.gpu.triton_launch import launch, row_major
from paraplan.rules.layers.float8 import PART_ELEMENTS, PARTS

TILE = 64
_FORMATS = {torch.float8_e4m3fn: (3, 7, 8), torch.float8_e5m2: (2, 15, 15)}
"""Digits of a mantissa, bias of an exponent, exponent of the largest number (whose mantissa is 1.75)."""


@triton.jit
def _parts(x, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest magnitude of every part of a tensor; NaN where there is one."""
    found = tl.zeros((block,), tl.float32)
    for start in range(tl.program_id(0).to(tl.int64) * block, count, tl.num_programs(0) * block):
        place = start + tl.arange(0, block)
        value = tl.abs(tl.load(x + place, mask=place < count, other=0.0).to(tl.float32))
        found = tl.where((value > found) | (value != value), value, found)
    top = tl.where(tl.max((found != found).to(tl.int32), 0) > 0, float("nan"), tl.max(found, 0))
    tl.store(out + tl.program_id(0), top)


@triton.jit
def _scale(parts, out, count, least: tl.constexpr, largest: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The power of two for the largest of some magnitudes: 0 for NaN, as the reference kernel has it."""
    place = tl.arange(0, block)
    value = tl.load(parts + place, mask=place < count, other=0.0)
    is_nan = tl.max((value != value).to(tl.int32), 0) > 0
    bits = tl.max(tl.where(value != value, 0.0, tl.maximum(value, least)).to(tl.int32, bitcast=True), 0)
    exponent = (bits >> 23) - largest + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.where(is_nan, 0, tl.where(bits == 0x7F800000, 255, exponent))
    tl.store(out, (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def _code(value, scale, digits: tl.constexpr, bias: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of value / scale, scale a power of two, the eight bits in the format, as uint8."""
    exponent = scale.to(tl.int32, bitcast=True)
    inverse = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    inverse = tl.where(exponent == 0, float("inf"), tl.where(exponent == 0x7F800000, 0.0, inverse))
    bits = (value * inverse).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    dropped: tl.constexpr = 23 - digits
    normal = ((size + ((1 << (dropped - 1)) - 1) + ((size >> dropped) & 1)) >> dropped) - ((127 - bias) << digits)
    unit: tl.constexpr = (127 + 1 - bias - digits + 23) << 23  # whose last digit is that of subnormals
    small = (size.to(tl.float32, bitcast=True) + tl.full(size.shape, unit, tl.int32).to(tl.float32, bitcast=True)).to(
        tl.int32, bitcast=True
    ) - unit
    found = tl.where(size < ((128 - bias) << 23), small, normal)
    largest: tl.constexpr = 0x7E if digits == 3 else 0x7C  # e4m3 has no infinity
    found = tl.where(size > 0x7F800000, 0x7F, tl.minimum(found, largest))
    return (found | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _cast(
    x,
    scale,
    rows,
    turned,
    height,
    width,
    has_rows: tl.constexpr,
    has_turned: tl.constexpr,
    digits: tl.constexpr,
    bias: tl.constexpr,
    tile: tl.constexpr,
):  # type: ignore[no-untyped-def]
    row = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    there = (row[:, None] < height) & (column[None, :] < width)
    place = row[:, None] * width + column[None, :]
    code = _code(tl.load(x + place, mask=there, other=0.0).to(tl.float32), tl.load(scale), digits, bias)
    if has_rows:
        tl.store(rows + place, code, mask=there)
    if has_turned:
        place = column[:, None] * height + row[None, :]
        tl.store(turned + place, tl.trans(code), mask=tl.trans(there))


def float8_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As `kernels.float8_kernels.float8_scale`, in two launches."""
    x = row_major(x)
    count, out = x.numel(), torch.empty((), dtype=torch.float32, device=x.device)
    programs = min(triton.cdiv(count, PART_ELEMENTS), PARTS)
    parts = torch.empty(programs, dtype=torch.float32, device=x.device)
    launch(_parts, (programs,), (x, parts, count, PART_ELEMENTS), (x,), (parts,))
    launch(_scale, (1,), (parts, out, programs, LEAST, _FORMATS[dtype][2], PARTS), (parts,), (out,))
    return out


def float8_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As `kernels.float8_kernels.float8_cast`, in one launch."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch_cast(row_major(x), scale, out, None)
    return out


def float8_cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `kernels.float8_kernels.float8_cast_both`, in one launch."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    turned = torch.empty((x.shape[-1], *x.shape[:-1]), dtype=dtype, device=x.device)
    _launch_cast(row_major(x), scale, out, turned)
    return out, turned


def _launch_cast(x: Tensor, scale: Tensor, rows: Tensor | None, turned: Tensor | None) -> None:
    written = [out for out in (rows, turned) if out is not None]
    first = written[0]
    width = x.shape[-1] if x.shape else 1
    height = x.numel() // max(width, 1)
    digits, bias, _ = _FORMATS[first.dtype]
    places = [(first if out is None else out).view(torch.uint8) for out in (rows, turned)]
    args = (x, scale, *places, height, width, rows is not None, turned is not None, digits, bias, TILE)
    launch(_cast, (triton.cdiv(width, TILE), triton.cdiv(height, TILE)), args, (x, scale), written)
