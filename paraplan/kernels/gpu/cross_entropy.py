"""The parts of cross-entropy over a block of the vocabulary, each one Triton kernel: a program per row, or per rows.

As the functions of the same names in `kernels.reference_kernels`; sums are in float32 at least and in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraplan.kernels.gpu.triton_launch import launch, row_major

COLUMNS, ROWS = 2048, 1024


@triton.jit
def _max(logits, out, width, here, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    kind = out.dtype.element_ty
    found = tl.full((block,), float("-inf"), kind)
    for start in range(0, here, block):
        column = start + tl.arange(0, block)
        value = tl.load(logits + row * width + column, mask=column < here, other=float("-inf")).to(kind)
        found = tl.where((value > found) | (value != value), value, found)  # a NaN stays
    top = tl.max(found, 0)
    top = tl.where(tl.max((found != found).to(tl.int32), 0) > 0, float("nan"), top)
    tl.store(out + row, top.to(kind))


@triton.jit
def _sumexp(logits, m, out, width, here, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    kind = out.dtype.element_ty
    top = tl.load(m + row)
    total = tl.zeros((block,), kind)
    for start in range(0, here, block):
        column = start + tl.arange(0, block)
        value = tl.load(logits + row * width + column, mask=column < here, other=float("-inf")).to(kind)
        total += tl.where(column < here, tl.exp(value - top), 0.0)
    tl.store(out + row, tl.sum(total, 0))


@triton.jit
def _inside(label, ignore_index, v_start, width):  # type: ignore[no-untyped-def]
    local = label - v_start
    return local, (local >= 0) & (local < width) & (label != ignore_index)


@triton.jit
def _target(logits, labels, out, count, width, ignore_index, v_start, whole, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    label = tl.load(labels + row, mask=row < count, other=ignore_index)
    local, inside = _inside(label, ignore_index, v_start, width)
    value = tl.load(logits + row * width + local, mask=inside & (row < count), other=0.0)
    is_class = (label == ignore_index) | ((label >= 0) & (label < whole))
    tl.store(out + row, tl.where(is_class, value.to(out.dtype.element_ty), float("nan")), mask=row < count)


@triton.jit
def _loss(m, s, t, labels, out, count, ignore_index, block: tl.constexpr):  # type: ignore[no-untyped-def]
    kind = out.dtype.element_ty
    total = tl.zeros((block,), kind)
    for start in range(0, count, block):
        row = start + tl.arange(0, block)
        label = tl.load(labels + row, mask=row < count, other=ignore_index)
        valid = (label != ignore_index) & (row < count)
        value = tl.log(tl.load(s + row, mask=valid, other=1.0)) + tl.load(m + row, mask=valid, other=0.0)
        total += tl.where(valid, value - tl.load(t + row, mask=valid, other=0.0), 0.0)
    tl.store(out, tl.sum(total, 0))


@triton.jit
def _grad(g, logits, m, s, labels, out, width, ignore_index, v_start, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    label = tl.load(labels + row)
    local, inside = _inside(label, ignore_index, v_start, width)
    seed = tl.load(g).to(s.dtype.element_ty)
    scale = tl.where(label != ignore_index, seed, 0.0) / tl.load(s + row)
    value = tl.load(logits + row * width + column, mask=column < width, other=float("-inf")).to(seed.dtype)
    grad = tl.exp(value - tl.load(m + row)) * scale - tl.where(inside & (column == local), seed, 0.0)
    tl.store(out + row * width + column, grad.to(out.dtype.element_ty), mask=column < width)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _here(logits: Tensor, columns: int, v_start: int) -> int:
    """How many of a block's columns are not padding."""
    return logits.shape[-1] if columns < 0 else min(max(columns - v_start, 0), logits.shape[-1])


def _per_row(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape[:-1], dtype=_wide(logits.dtype), device=logits.device)


def ce_max(logits: Tensor, columns: int = -1, v_start: int = 0) -> Tensor:
    """As `kernels.reference_kernels.ce_max`."""
    logits, out = row_major(logits), _per_row(logits)
    args = logits, out, logits.shape[-1], _here(logits, columns, v_start), COLUMNS
    launch(_max, (out.numel(),), args, (logits,), (out,))
    return out


def ce_sumexp(logits: Tensor, m: Tensor, columns: int = -1, v_start: int = 0) -> Tensor:
    """As `kernels.reference_kernels.ce_sumexp`."""
    logits, m, out = row_major(logits), row_major(m), _per_row(logits)
    args = logits, m, out, logits.shape[-1], _here(logits, columns, v_start), COLUMNS
    launch(_sumexp, (out.numel(),), args, (logits, m), (out,))
    return out


def ce_target(logits: Tensor, labels: Tensor, ignore_index: int, v_start: int = 0, columns: int = -1) -> Tensor:
    """As `kernels.reference_kernels.ce_target`, but NaN for a label that is no class: to raise, the host would have to
    wait."""
    logits, labels, out = row_major(logits), row_major(labels), _per_row(logits)
    count = out.numel()
    width = logits.shape[-1]
    args = logits, labels, out, count, width, ignore_index, v_start, width if columns < 0 else columns, ROWS
    launch(_target, (triton.cdiv(count, ROWS),), args, (labels,), (out,))
    return out


def ce_loss(m: Tensor, s: Tensor, t: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """As `kernels.reference_kernels.ce_loss`."""
    m, s, t, labels = (row_major(x) for x in (m, s, t, labels))
    out = torch.empty((), dtype=m.dtype, device=m.device)
    launch(_loss, (1,), (m, s, t, labels, out, m.numel(), ignore_index, ROWS), (m, s, t, labels), (out,))
    return out


def ce_grad(
    g: Tensor, logits: Tensor, m: Tensor, s: Tensor, labels: Tensor, ignore_index: int, v_start: int = 0
) -> Tensor:
    """As `kernels.reference_kernels.ce_grad`."""
    logits, m, s, labels = (row_major(x) for x in (logits, m, s, labels))
    out = torch.empty_like(logits)
    width = logits.shape[-1]
    args = g, logits, m, s, labels, out, width, ignore_index, v_start, COLUMNS
    launch(_grad, (m.numel(), triton.cdiv(width, COLUMNS)), args, (g, logits, m, s, labels), (out,))
    return out
