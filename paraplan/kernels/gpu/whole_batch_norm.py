"""Batch norm of all samples as one Triton kernel each way, or two where channels alone keep too few programs busy.

A program takes some channels and goes twice over its part of their samples: for what is summed, then for what follows
from it. In parts (`whole_splits`) the first is a kernel of its own, and every program of the second adds up the parts'
sums again, in their order. Means and centred squares of blocks are joined as Chan, Golub and LeVeque (1979) do, so one
pass is enough and nothing cancels. As `bn_whole` and `bn_whole_grad` of `kernels.vision_kernels`, in float32 at least.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraplan.ir.machine.kernel_choice import channels_at_once, whole_splits
from paraplan.kernels.gpu.triton_launch import launch, row_major

SAMPLES, MOST_SAMPLES = 1024, 4096
"""Elements a program takes at once, and where it takes all samples."""


@triton.jit
def _places(start, stop, channel, here, channels, space, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where samples of channels are, and which exist."""
    sample = start + tl.arange(0, block)
    place = (sample // space).to(tl.int64)[:, None] * channels * space
    place += channel[None, :] * space + (sample % space)[:, None]
    return place, (sample < stop)[:, None] & here[None, :]


@triton.jit
def _joined(count, mean, squares, more, its_mean, its_squares):  # type: ignore[no-untyped-def]
    """Count, mean and centred squares of two sets of samples together."""
    total = count + more
    apart = its_mean - mean
    return total, mean + apart * (more / total), squares + its_squares + apart * apart * (count * (more / total))


@triton.jit
def _moments(x, like, start, stop, channel, here, channels, space, block_c: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mean and centred squares of a part of the samples; `like` points to the dtype of sums."""
    kind = like.dtype.element_ty
    mean, squares = tl.zeros((block_c,), kind), tl.zeros((block_c,), kind)
    count = tl.zeros((block_c,), kind)
    for at in range(start, stop, block):
        place, there = _places(at, stop, channel, here, channels, space, block)
        value = tl.load(x + place, mask=there, other=0.0).to(kind)
        more = tl.zeros((block_c,), kind) + tl.minimum(stop - at, block)
        centre = tl.sum(value, 0) / more
        moved = tl.where(there, value - centre[None, :], 0.0)
        count, mean, squares = _joined(count, mean, squares, more, centre, tl.sum(moved * moved, 0))
    return mean, squares


@triton.jit
def _part_moments(x, parts, channels, space, count, per, block_c: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    channel = tl.program_id(0) * block_c + tl.arange(0, block_c)
    here = channel < channels
    start = tl.program_id(1) * per
    mean, squares = _moments(
        x, parts, start, tl.minimum(start + per, count), channel, here, channels, space, block_c, block
    )
    place = parts + tl.program_id(1) * channels + channel
    tl.store(place, mean, mask=here)
    tl.store(place + tl.num_programs(1) * channels, squares, mask=here)


@triton.jit
def _joined_parts(parts, channel, here, channels, count, per, kind: tl.constexpr, block_c: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mean and centred squares of all samples, from those that `_part_moments` stored, in the order of parts."""
    mean, squares = tl.zeros((block_c,), kind), tl.zeros((block_c,), kind)
    known = tl.zeros((block_c,), kind)
    for part in range(tl.num_programs(1)):
        place = parts + part * channels + channel
        its_mean = tl.load(place, mask=here, other=0.0)
        its_squares = tl.load(place + tl.num_programs(1) * channels, mask=here, other=0.0)
        more = tl.zeros((block_c,), kind) + tl.minimum(per, count - part * per)
        known, mean, squares = _joined(known, mean, squares, more, its_mean, its_squares)
    return mean, squares


@triton.jit
def _affine(w, bias, rstd, channel, here, weighed: tl.constexpr, moved: tl.constexpr, block_c: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a centred sample is multiplied by, and what is added then."""
    scale = rstd
    if weighed:
        scale *= tl.load(w + channel, mask=here, other=0.0).to(rstd.dtype)
    shift = tl.zeros((block_c,), rstd.dtype)
    if moved:
        shift += tl.load(bias + channel, mask=here, other=0.0).to(rstd.dtype)
    return scale, shift


@triton.jit
def _update_running(old, new, found, channel, here, keep: tl.constexpr, take: tl.constexpr, block_c: tl.constexpr):  # type: ignore[no-untyped-def]
    """A running statistic: keep of the old one, take of what was found."""
    kept, taken = tl.full((block_c,), keep, found.dtype), tl.full((block_c,), take, found.dtype)
    value = tl.load(old + channel, mask=here, other=0.0).to(found.dtype) * kept + found * taken
    tl.store(new + channel, value.to(new.dtype.element_ty), mask=here)


@triton.jit
def _whole(
    x,
    parts,
    w,
    bias,
    added,
    old_mean,
    old_var,
    out,
    mean_out,
    rstd_out,
    new_mean,
    new_var,
    channels,
    space,
    count,
    per,
    keep: tl.constexpr,
    take: tl.constexpr,
    unbiased: tl.constexpr,
    eps: tl.constexpr,
    split: tl.constexpr,
    weighed: tl.constexpr,
    moved: tl.constexpr,
    adds: tl.constexpr,
    runs: tl.constexpr,
    relu: tl.constexpr,
    block_c: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    kind = rstd_out.dtype.element_ty
    channel = tl.program_id(0) * block_c + tl.arange(0, block_c)
    here = channel < channels
    start = tl.program_id(1) * per
    stop = tl.minimum(start + per, count)
    samples = tl.zeros((block_c,), kind) + count
    if split:
        mean, squares = _joined_parts(parts, channel, here, channels, count, per, kind, block_c)
    else:
        mean, squares = _moments(x, rstd_out, start, stop, channel, here, channels, space, block_c, block)
    rstd = 1 / tl.sqrt(squares / samples + tl.full((block_c,), eps, kind))
    if tl.program_id(1) == 0:
        tl.store(mean_out + channel, mean, mask=here)
        tl.store(rstd_out + channel, rstd, mask=here)
        if runs:
            _update_running(old_mean, new_mean, mean, channel, here, keep, take, block_c)
            _update_running(
                old_var, new_var, squares * tl.full((block_c,), unbiased, kind), channel, here, keep, take, block_c
            )
    scale, shift = _affine(w, bias, rstd, channel, here, weighed, moved, block_c)
    for at in range(start, stop, block):
        place, there = _places(at, stop, channel, here, channels, space, block)
        value = tl.load(x + place, mask=there, other=0.0).to(kind) - mean[None, :]
        value = value * scale[None, :] + shift[None, :]
        if adds:
            value = value.to(out.dtype.element_ty).to(kind) + tl.load(added + place, mask=there, other=0.0).to(kind)
        if relu:
            value = tl.where(value < 0, 0.0, value)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _grad_sums(
    g,
    x,
    y,
    mean,
    rstd,
    start,
    stop,
    channel,
    here,
    channels,
    space,
    behind: tl.constexpr,
    block_c: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """Σ g (x − mean) and Σ g of a part of the samples."""
    kind = mean.dtype
    first, second = tl.zeros((block_c,), kind), tl.zeros((block_c,), kind)
    for at in range(start, stop, block):
        place, there = _places(at, stop, channel, here, channels, space, block)
        grad = tl.load(g + place, mask=there, other=0.0).to(kind)
        if behind:
            grad = tl.where(tl.load(y + place, mask=there, other=0.0).to(kind) <= 0, 0.0, grad)
        moved = tl.where(there, tl.load(x + place, mask=there, other=0.0).to(kind) - mean[None, :], 0.0)
        first += tl.sum(grad * moved, 0) * rstd
        second += tl.sum(grad, 0)
    return first, second


@triton.jit
def _part_grads(
    g,
    x,
    y,
    mean,
    rstd,
    parts,
    channels,
    space,
    count,
    per,
    behind: tl.constexpr,
    block_c: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    channel = tl.program_id(0) * block_c + tl.arange(0, block_c)
    here = channel < channels
    start = tl.program_id(1) * per
    centre = tl.load(mean + channel, mask=here, other=0.0).to(parts.dtype.element_ty)
    spread = tl.load(rstd + channel, mask=here, other=0.0).to(parts.dtype.element_ty)
    first, second = _grad_sums(
        g,
        x,
        y,
        centre,
        spread,
        start,
        tl.minimum(start + per, count),
        channel,
        here,
        channels,
        space,
        behind,
        block_c,
        block,
    )
    place = parts + tl.program_id(1) * channels + channel
    tl.store(place, first, mask=here)
    tl.store(place + tl.num_programs(1) * channels, second, mask=here)


@triton.jit
def _whole_grad(
    g,
    x,
    y,
    mean,
    rstd,
    w,
    parts,
    dx,
    dw,
    db,
    masked,
    channels,
    space,
    count,
    per,
    split: tl.constexpr,
    weighed: tl.constexpr,
    behind: tl.constexpr,
    masks: tl.constexpr,
    block_c: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    kind = rstd.dtype.element_ty
    channel = tl.program_id(0) * block_c + tl.arange(0, block_c)
    here = channel < channels
    start = tl.program_id(1) * per
    stop = tl.minimum(start + per, count)
    centre = tl.load(mean + channel, mask=here, other=0.0).to(kind)
    spread = tl.load(rstd + channel, mask=here, other=0.0)
    if split:
        first, second = tl.zeros((block_c,), kind), tl.zeros((block_c,), kind)
        for part in range(tl.num_programs(1)):
            place = parts + part * channels + channel
            first += tl.load(place, mask=here, other=0.0)
            second += tl.load(place + tl.num_programs(1) * channels, mask=here, other=0.0)
    else:
        first, second = _grad_sums(
            g, x, y, centre, spread, start, stop, channel, here, channels, space, behind, block_c, block
        )
    if tl.program_id(1) == 0:
        tl.store(dw + channel, first.to(dw.dtype.element_ty), mask=here)
        tl.store(db + channel, second.to(db.dtype.element_ty), mask=here)
    samples = tl.zeros((block_c,), kind) + count
    steep, level = spread * first / samples, second / samples
    scale = spread
    if weighed:
        scale *= tl.load(w + channel, mask=here, other=0.0).to(kind)
    for at in range(start, stop, block):
        place, there = _places(at, stop, channel, here, channels, space, block)
        grad = tl.load(g + place, mask=there, other=0.0).to(kind)
        if behind:
            grad = tl.where(tl.load(y + place, mask=there, other=0.0).to(kind) <= 0, 0.0, grad)
        if masks:
            tl.store(masked + place, grad.to(masked.dtype.element_ty), mask=there)
        normal = tl.load(x + place, mask=there, other=0.0).to(kind) - centre[None, :]
        value = (grad - level[None, :] - normal * steep[None, :]) * scale[None, :]
        tl.store(dx + place, value.to(dx.dtype.element_ty), mask=there)


class _Walk:
    """How programs go over x."""

    def __init__(self, x: Tensor) -> None:
        channels, space = x.shape[1], math.prod(x.shape[2:])
        count = x.shape[0] * space
        self.splits, block_c = whole_splits(count, channels, space), channels_at_once(space)
        self.sizes = channels, space, count, -(-count // self.splits)
        self.grid = triton.cdiv(channels, block_c), self.splits
        self.in_parts = self.splits > 1
        most = SAMPLES if self.in_parts else MOST_SAMPLES
        self.blocks = block_c, most // block_c
        self.warps = 4 if self.in_parts else 16

    def parts(self, like: Tensor) -> Tensor:
        """Room for two sums of every part; any tensor where there are none."""
        return like.new_empty(2, self.splits, self.sizes[0]) if self.in_parts else like


def bn_whole(
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    added: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """As `kernels.vision_kernels.bn_whole`, in one launch or two."""
    x, walk = row_major(x), _Walk(x)
    mean = torch.empty(x.shape[1], dtype=_statistics(x), device=x.device)
    rstd, out = torch.empty_like(mean), torch.empty_like(x)
    parts = walk.parts(mean)
    if walk.in_parts:
        launch(_part_moments, walk.grid, (x, parts, *walk.sizes, *walk.blocks), (x,), (parts,))
    runs = running_mean is not None and running_var is not None
    given = [x if each is None else row_major(each) for each in (w, bias, added, running_mean, running_var)]
    after = [torch.empty_like(each) if runs else mean for each in given[3:]]
    made = [out, mean, rstd, *after]
    count = walk.sizes[2]
    numbers = 1.0 - momentum, momentum, 1.0 / max(count - 1, 1), eps
    how = walk.in_parts, w is not None, bias is not None, added is not None, runs, relu
    args = x, parts, *given, *made, *walk.sizes, *numbers, *how, *walk.blocks
    launch(_whole, walk.grid, args, (x, parts, *given) if walk.in_parts else (x, *given), made, walk.warps)
    return out, mean, rstd, after[0] if runs else None, after[1] if runs else None


def bn_whole_grad(
    g: Tensor,
    x: Tensor,
    y: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    w: Tensor | None,
    dtype: torch.dtype,
    masks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `kernels.vision_kernels.bn_whole_grad`, in one launch or two."""
    g, x, mean, rstd = (row_major(each) for each in (g, x, mean, rstd))
    given = [g if each is None else row_major(each) for each in (y, w)]
    walk = _Walk(x)
    parts = walk.parts(rstd)
    if walk.in_parts:
        args = g, x, given[0], mean, rstd, parts, *walk.sizes, y is not None, *walk.blocks
        launch(_part_grads, walk.grid, args, (g, x, given[0], mean, rstd), (parts,))
    dx, masked = torch.empty_like(x), torch.empty_like(x) if masks else x
    dw, db = (torch.empty(x.shape[1], dtype=dtype, device=x.device) for _ in range(2))
    how = walk.in_parts, w is not None, y is not None, masks
    args = g, x, given[0], mean, rstd, given[1], parts, dx, dw, db, masked, *walk.sizes, *how, *walk.blocks
    read = (g, x, *given, mean, rstd, *([parts] if walk.in_parts else []))
    launch(_whole_grad, walk.grid, args, read, (dx, dw, db, masked) if masks else (dx, dw, db), walk.warps)
    return dx, dw, db, masked if masks else None


def _statistics(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
