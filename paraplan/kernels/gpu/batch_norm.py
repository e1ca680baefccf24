"""The parts of batch norm as Triton kernels: one each, and one more where programs share a sum over samples.

As the functions of the same names in `kernels.vision_kernels`. Tensors are walked as [batch, channel, space]. A sum is
taken in `norm_splits` parts by channel, which a second kernel adds up in their order, so it is the same every time.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraplan.ir.machine.kernel_choice import channels_at_once, norm_splits
from paraplan.kernels.gpu.triton_launch import launch, row_major

BLOCK, SAMPLES = 1024, 1024
"""Elements of a program; samples a sum takes at once."""


@triton.jit
def _sums(
    x,
    g,
    mean,
    rstd,
    out,
    part,
    channels,
    space,
    count,
    per,
    both: tl.constexpr,
    block_c: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """Σ (x − mean)², or Σ g (x − mean) rstd and, `part` further on, Σ g, over a part of the samples."""
    kind = out.dtype.element_ty
    channel = tl.program_id(0) * block_c + tl.arange(0, block_c)
    here = channel < channels
    centre = tl.load(mean + channel, mask=here, other=0.0).to(kind)
    first, second = tl.zeros((block, block_c), kind), tl.zeros((block, block_c), kind)
    if both:
        scale = tl.load(rstd + channel, mask=here, other=0.0).to(kind)
    stop = tl.minimum((tl.program_id(1) + 1) * per, count)
    for start in range(tl.program_id(1) * per, stop, block):
        sample = start + tl.arange(0, block)
        place = (sample // space).to(tl.int64)[:, None] * channels * space
        place += channel[None, :] * space + (sample % space)[:, None]
        there = (sample < stop)[:, None] & here[None, :]
        moved = tl.where(there, tl.load(x + place, mask=there, other=0.0).to(kind) - centre[None, :], 0.0)
        if both:
            grad = tl.load(g + place, mask=there, other=0.0).to(kind)
            first += grad * moved * scale[None, :]
            second += grad
        else:
            first += moved * moved
    place = out + tl.program_id(1) * channels + channel
    tl.store(place, tl.sum(first, 0), mask=here)
    if both:
        tl.store(place + part, tl.sum(second, 0), mask=here)


@triton.jit
def _finish(parts, first, second, splits, channels, both: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    channel = tl.program_id(0) * block + tl.arange(0, block)
    here = channel < channels
    total, other = tl.zeros((block,), first.dtype.element_ty), tl.zeros((block,), first.dtype.element_ty)
    for split in range(splits):
        place = parts + split * channels + channel
        total += tl.load(place, mask=here, other=0.0)
        if both:
            other += tl.load(place + splits * channels, mask=here, other=0.0)
    tl.store(first + channel, total, mask=here)
    if both:
        tl.store(second + channel, other, mask=here)


@triton.jit
def _rstd(squares, out, channels, count: tl.constexpr, eps: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    kind = out.dtype.element_ty
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(squares + at, mask=at < channels, other=1.0).to(kind) / tl.full((block,), count, kind)
    tl.store(out + at, 1 / tl.sqrt(value + tl.full((block,), eps, kind)), mask=at < channels)


@triton.jit
def _running(running, total, out, channels, keep: tl.constexpr, take: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    kind = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    at = tl.program_id(0) * block + tl.arange(0, block)
    old = tl.load(running + at, mask=at < channels, other=0.0).to(kind) * tl.full((block,), keep, kind)
    value = old + tl.load(total + at, mask=at < channels, other=0.0).to(kind) * tl.full((block,), take, kind)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < channels)


@triton.jit
def _element(count, channels, space, many: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's elements, which exist, and their channels; `many`: more than 32 bits number."""
    at = tl.program_id(0)
    if many:
        at = at.to(tl.int64)
    at = at * block + tl.arange(0, block)
    return at, at < count, at // space % channels


@triton.jit
def _apply(
    x,
    mean,
    rstd,
    w,
    bias,
    out,
    count,
    channels,
    space,
    centred: tl.constexpr,
    weighed: tl.constexpr,
    moved: tl.constexpr,
    many: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    kind = rstd.dtype.element_ty
    at, there, channel = _element(count, channels, space, many, block)
    value = tl.load(x + at, mask=there, other=0.0).to(kind)
    if centred:
        value -= tl.load(mean + channel, mask=there, other=0.0).to(kind)
    scale = tl.load(rstd + channel, mask=there, other=0.0)
    if weighed:
        scale *= tl.load(w + channel, mask=there, other=0.0).to(kind)
    value *= scale
    if moved:
        value += tl.load(bias + channel, mask=there, other=0.0).to(kind)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _input_grad(
    g,
    x,
    mean,
    rstd,
    w,
    dw,
    db,
    out,
    count,
    channels,
    space,
    samples: tl.constexpr,
    weighed: tl.constexpr,
    many: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    kind = rstd.dtype.element_ty
    at, there, channel = _element(count, channels, space, many, block)
    spread = tl.load(rstd + channel, mask=there, other=0.0)
    normal = tl.load(x + at, mask=there, other=0.0).to(kind) - tl.load(mean + channel, mask=there, other=0.0).to(kind)
    normal *= spread * tl.load(dw + channel, mask=there, other=0.0).to(kind)
    normal += tl.load(db + channel, mask=there, other=0.0).to(kind)
    if weighed:
        spread *= tl.load(w + channel, mask=there, other=0.0).to(kind)
    grad = tl.load(g + at, mask=there, other=0.0).to(kind) - normal / tl.full((block,), samples, kind)
    tl.store(out + at, (grad * spread).to(out.dtype.element_ty), mask=there)


def _statistics(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _reduced(x: Tensor, g: Tensor | None, mean: Tensor, rstd: Tensor | None) -> list[Tensor]:
    channels, space = x.shape[1], math.prod(x.shape[2:])
    count = x.shape[0] * space
    splits = norm_splits(count, channels)
    both = 1 if g is None else 2
    made = [torch.empty(channels, dtype=_statistics(x), device=x.device) for _ in range(both)]
    parts = made[0].new_empty(both, splits, channels)
    block_c = channels_at_once(space)
    given = x, x if g is None else g, mean, mean if rstd is None else rstd
    args = *given, parts, splits * channels, channels, space, count, -(-count // splits)
    grid = triton.cdiv(channels, block_c), splits
    launch(_sums, grid, (*args, both == 2, block_c, SAMPLES // block_c), given, (parts,))
    args = parts, made[0], made[-1], splits, channels, both == 2, BLOCK
    launch(_finish, (triton.cdiv(channels, BLOCK),), args, (parts,), made)
    return made


def bn_squares(x: Tensor, mean: Tensor) -> Tensor:
    """s[c] = sum over samples and space of (x − mean)²."""
    return _reduced(row_major(x), None, row_major(mean), None)[0]


def bn_grad_affine(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """As `kernels.vision_kernels.bn_grad_affine`."""
    dw, db = _reduced(row_major(x), row_major(g), row_major(mean), row_major(rstd))
    return dw, db


def bn_rstd(squares: Tensor, count: int, eps: float) -> Tensor:
    """As `kernels.vision_kernels.bn_rstd`."""
    squares = row_major(squares)
    out = torch.empty(squares.shape, dtype=_statistics(squares), device=squares.device)
    args = squares, out, out.numel(), float(count), eps, BLOCK
    launch(_rstd, (triton.cdiv(out.numel(), BLOCK),), args, (squares,), (out,))
    return out


def bn_running(running: Tensor, total: Tensor, momentum: float, scale: float) -> Tensor:
    """As `kernels.vision_kernels.bn_running`."""
    running, total = row_major(running), row_major(total)
    out = torch.empty_like(running)
    args = running, total, out, out.numel(), 1.0 - momentum, momentum * scale, BLOCK
    launch(_running, (triton.cdiv(out.numel(), BLOCK),), args, (running, total), (out,))
    return out


def bn_apply(x: Tensor, mean: Tensor | None, rstd: Tensor, w: Tensor | None, bias: Tensor | None) -> Tensor:
    """As `kernels.vision_kernels.bn_apply`."""
    x = row_major(x)
    given = [rstd if each is None else row_major(each) for each in (mean, rstd, w, bias)]
    out = torch.empty_like(x)
    there = mean is not None, w is not None, bias is not None
    launch(_apply, (triton.cdiv(x.numel(), BLOCK),), (x, *given, out, *_walk(x), *there, *_how(x)), (x, *given), (out,))
    return out


def bn_grad_input(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, dw: Tensor, db: Tensor, count: int
) -> Tensor:
    """As `kernels.vision_kernels.bn_grad_input`."""
    given = [row_major(rstd if each is None else each) for each in (g, x, mean, rstd, w, dw, db)]
    out = torch.empty_like(given[1])
    args = *given, out, *_walk(x), float(count), w is not None, *_how(x)
    launch(_input_grad, (triton.cdiv(x.numel(), BLOCK),), args, given, (out,))
    return out


def _walk(x: Tensor) -> tuple[int, int, int]:
    """Elements, channels and space."""
    return x.numel(), x.shape[1], math.prod(x.shape[2:])


def _how(x: Tensor) -> tuple[bool, int]:
    return x.numel() >= 2**31 - BLOCK, BLOCK
