"""Rotary embeddings and gated activations as one Triton kernel each, as in `kernels.elementwise_kernels`.

Values are computed in float32 at least and rounded once, where the reference rounds after every step.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraplan.ir.model.strides import elementwise_strides, view_strides
from paraplan.kernels.gpu.activations import KINDS, activated
from paraplan.kernels.gpu.triton_launch import launch, row_major

BLOCK = 1024


@triton.jit
def _rotary(
    x,
    cos,
    sin,
    out,
    rows,
    sizes,
    xs,
    cs,
    ss,
    os,
    half,
    transposed: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    last, rest = row % sizes[2], row // sizes[2]
    middle, first = rest % sizes[1], rest // sizes[1]
    column = tl.arange(0, width)
    there = (row < rows)[:, None] & (column < half)[None, :]
    from_x = x + (first * xs[0] + middle * xs[1] + last * xs[2])[:, None] + column[None, :] * xs[3]
    from_cos = cos + (first * cs[0] + middle * cs[1] + last * cs[2])[:, None] + column[None, :] * cs[3]
    from_sin = sin + (first * ss[0] + middle * ss[1] + last * ss[2])[:, None] + column[None, :] * ss[3]
    to = out + (first * os[0] + middle * os[1] + last * os[2])[:, None] + column[None, :] * os[3]
    kind = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    x1 = tl.load(from_x, mask=there, other=0.0).to(kind)
    x2 = tl.load(from_x + half * xs[3], mask=there, other=0.0).to(kind)
    y1 = x1 * tl.load(from_cos, mask=there, other=0.0).to(kind)
    y2 = x2 * tl.load(from_cos + half * cs[3], mask=there, other=0.0).to(kind)
    s1 = tl.load(from_sin, mask=there, other=0.0).to(kind)
    s2 = tl.load(from_sin + half * ss[3], mask=there, other=0.0).to(kind)
    if transposed:
        y1 += x2 * s2
        y2 -= x1 * s1
    else:
        y1 -= x2 * s1
        y2 += x1 * s2
    tl.store(to, y1.to(out.dtype.element_ty), mask=there)
    tl.store(to + half * os[3], y2.to(out.dtype.element_ty), mask=there)


@triton.jit
def _gated(gate, up, out, columns, gate_pitch, up_pitch, kind: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    here = column < columns
    wide = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    value, _ = activated(tl.load(gate + row * gate_pitch + column, mask=here, other=0.0).to(wide), kind)
    value *= tl.load(up + row * up_pitch + column, mask=here, other=0.0).to(wide)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=here)


@triton.jit
def _gated_grad(
    g, gate, up, d_gate, d_up, columns, g_pitch, gate_pitch, up_pitch, kind: tl.constexpr, block: tl.constexpr
):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    here = column < columns
    wide = tl.float64 if d_up.dtype.element_ty == tl.float64 else tl.float32
    value, slope = activated(tl.load(gate + row * gate_pitch + column, mask=here, other=0.0).to(wide), kind)
    grad = tl.load(g + row * g_pitch + column, mask=here, other=0.0).to(wide)
    other = tl.load(up + row * up_pitch + column, mask=here, other=0.0).to(wide)
    tl.store(d_up + row * columns + column, (grad * value).to(d_up.dtype.element_ty), mask=here)
    tl.store(d_gate + row * columns + column, (grad * other * slope).to(d_gate.dtype.element_ty), mask=here)


def _walked(x: Tensor, like: Tensor) -> tuple[int, ...]:
    """Strides by which x, of dims that are `like`'s or 1, is walked as three leading dims and the last."""
    strides = [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]
    return (*[0] * (4 - like.dim()), *strides)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    """As `kernels.elementwise_kernels.rotary`, whatever the strides."""
    shape, given = tuple(x.shape), (x, cos, sin)
    strides = elementwise_strides(shape, [(tuple(each.shape), each.stride()) for each in given])
    out = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    sizes = (*[1] * (4 - x.dim()), *shape)[:3]
    half, rows = shape[-1] // 2, math.prod(sizes)
    width = triton.next_power_of_2(half)
    block = max(1, BLOCK // width)
    args = *given, out, rows, sizes, *(_walked(each, x) for each in (*given, out)), half, transposed, width, block
    launch(_rotary, (triton.cdiv(rows, block),), args, given, (out,))
    return out


def _as_rows(x: Tensor) -> Tensor:
    """x as [rows, columns] with dense rows, copied where it cannot be seen so."""
    columns = x.shape[-1] if x.dim() else 1
    shape = (x.numel() // max(columns, 1), columns)
    strides = view_strides(tuple(x.shape), x.stride(), shape)
    return (x if strides is not None and (columns == 1 or strides[1] == 1) else row_major(x)).view(shape)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """As `kernels.elementwise_kernels.gated`."""
    out = gate.new_empty(gate.shape)
    gate, up = _as_rows(gate), _as_rows(up)
    rows, columns = gate.shape
    args = gate, up, out, columns, gate.stride(0), up.stride(0), KINDS[activation], BLOCK
    launch(_gated, (rows, triton.cdiv(columns, BLOCK)), args, (gate, up), (out,))
    return out


def gated_grad(g: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """As `kernels.elementwise_kernels.gated_grad`."""
    made = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    given = _as_rows(g), _as_rows(gate), _as_rows(up)
    rows, columns = given[0].shape
    args = *given, *made, columns, *(x.stride(0) for x in given), KINDS[activation], BLOCK
    launch(_gated_grad, (rows, triton.cdiv(columns, BLOCK)), args, given, made)
    return made
