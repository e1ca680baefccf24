"""Linear layers in float8: their ops' shapes, and the differentiable form.

As in `canonical` and `autograd`; kernels in `float8_kernels`. Which formats, and that backward casts the weight again
rather than keeping a second copy of it, are torchao's `Float8Linear`. Of an input its transpose is kept, which is all
that the weight's gradient reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paraplan.capture.canonical.canonical import define
from paraplan.kernels import float8_kernels

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
"""What inputs and weights are cast to, and gradients of outputs: more range, fewer digits."""


def _scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _cast(x, scale, dtype), x.new_empty((x.shape[-1], *x.shape[:-1]), dtype=dtype)


def _linear(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, transposed: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[1 if transposed else 0]), dtype=torch.bfloat16)


def _grad_input(g: Tensor, w: Tensor, g_scale: Tensor, w_scale: Tensor, transposed: bool) -> Tensor:
    return g.new_empty((*g.shape[:-1], w.shape[0 if transposed else 1]), dtype=torch.bfloat16)


def _grad_weight(g: Tensor, x: Tensor, g_scale: Tensor, x_scale: Tensor, transposed: bool) -> Tensor:
    n, k = g.shape[0], x.shape[0]
    return g.new_empty((k, n) if transposed else (n, k), dtype=torch.bfloat16)


_TWO = "Tensor left_scale, Tensor right_scale, bool transposed) -> Tensor"
define("float8_scale(Tensor x, ScalarType dtype) -> Tensor", float8_kernels.float8_scale, _scale)
define("float8_cast(Tensor x, Tensor scale, ScalarType dtype) -> Tensor", float8_kernels.float8_cast, _cast)
define(
    "float8_cast_both(Tensor x, Tensor scale, ScalarType dtype) -> (Tensor, Tensor)",
    float8_kernels.float8_cast_both,
    _cast_both,
)
define(f"float8_linear(Tensor x, Tensor w, {_TWO}", float8_kernels.float8_linear, _linear)
define(f"float8_linear_grad_input(Tensor g, Tensor w, {_TWO}", float8_kernels.float8_linear_grad_input, _grad_input)
define(f"float8_linear_grad_weight(Tensor g, Tensor x, {_TWO}", float8_kernels.float8_linear_grad_weight, _grad_weight)
ops = torch.ops.paraplan


def _cast_by_its_own(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x cast, its transpose, and their scale."""
    scale = ops.float8_scale(x, dtype)
    return *ops.float8_cast_both(x, scale, dtype), scale


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, transposed: bool) -> Tensor:
        x8, turned, x_scale = _cast_by_its_own(x, VALUES)
        w_scale = ops.float8_scale(w, VALUES)
        w8 = ops.float8_cast(w, w_scale, VALUES)
        ctx.save_for_backward(turned, x_scale, w, w_scale)
        ctx.transposed = transposed
        return ops.float8_linear(x8, w8, x_scale, w_scale, transposed)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x8, x_scale, w, w_scale = ctx.saved_tensors
        g8, turned, g_scale = _cast_by_its_own(grads[0], GRADIENTS)
        gx = gw = None
        if ctx.needs_input_grad[0]:
            w8 = ops.float8_cast(w, w_scale, VALUES)
            gx = ops.float8_linear_grad_input(g8, w8, g_scale, w_scale, ctx.transposed)
        if ctx.needs_input_grad[1]:
            gw = ops.float8_linear_grad_weight(turned, x8, g_scale, x_scale, ctx.transposed)
        return gx, gw, None


def float8_linear(x: Tensor, w: Tensor, transposed: bool) -> Tensor:
    """y[..., n] = x[..., k] · w with both operands cast to float8, differentiable.

    Args:
        x: [..., k], bfloat16.
        w: [n, k], or [k, n] when `transposed`, bfloat16.
        transposed: whether w is stored as [k, n].
    Returns:
        bfloat16 [..., n].
    """
    return _Float8Linear.apply(x, w, transposed)  # type: ignore[no-any-return,no-untyped-call]


HEAVY = frozenset({float8_linear})
