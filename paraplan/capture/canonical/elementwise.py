"""Canonical ops of elementwise compositions: their shapes, and their differentiable forms.

As in `canonical` and `autograd`; kernels in `elementwise_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paraplan.capture.canonical.canonical import define
from paraplan.kernels import elementwise_kernels

Grads = tuple[Tensor | None, ...]


def _rotary_shape(x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    return x * cos


def _gated_shape(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape)


def _gated_grad_shape(g: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


define("rotary(Tensor x, Tensor cos, Tensor sin, bool transposed) -> Tensor", elementwise_kernels.rotary, _rotary_shape)
define("gated(Tensor gate, Tensor up, str activation) -> Tensor", elementwise_kernels.gated, _gated_shape)
define(
    "gated_grad(Tensor g, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    elementwise_kernels.gated_grad,
    _gated_grad_shape,
)
ops = torch.ops.paraplan


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin, x if any(ctx.needs_input_grad[1:]) else None)
        return ops.rotary(x, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        (g,), (cos, sin, x), need = grads, ctx.saved_tensors, ctx.needs_input_grad
        gx = ops.rotary(g, cos, sin, True) if need[0] else None
        g_cos = (g * x).sum_to_size(cos.shape) if need[1] else None
        if not need[2]:
            return gx, g_cos, None
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return gx, g_cos, (g * turned).sum_to_size(sin.shape)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ops.gated(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        d_gate, d_up = ops.gated_grad(grads[0], *ctx.saved_tensors, ctx.activation)
        need = ctx.needs_input_grad
        return d_gate if need[0] else None, d_up if need[1] else None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`paraplan.rotary`, differentiable.

    Args:
        x, cos, sin: as `kernels.elementwise_kernels.rotary` takes them.
    """
    return _Rotary.apply(x, cos, sin)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`paraplan.gated`, differentiable.

    Args:
        gate, up, activation: as `kernels.elementwise_kernels.gated` takes them.
    """
    return _Gated.apply(gate, up, activation)
