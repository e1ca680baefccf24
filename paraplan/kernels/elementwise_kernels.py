"""Kernels of elementwise compositions that are one op: rotary embeddings and gated activations.

    rotary      y = x · cos + r(x) · sin,   r(x) = (−x₂, x₁) of halves (x₁, x₂) of the last dim
    gated       y = act(gate) · up

As ops of their own they are one kernel on a device, and what the backward reads is their inputs alone. Sources: Su et
al. 2021 (arXiv 2104.09864), by halves as in GPT-NeoX; Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paraplan.kernels.expert_kernels import ACTIVATIONS

__all__ = ["gated", "gated_grad", "rotary"]


def rotary(x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    """A rotary embedding, or what its gradient is multiplied by.

    Args:
        x: [..., d], d even.
        cos, sin: of x's rank, each dim x's or 1, the last one x's.
        transposed: the gradient in x of that of y, r being replaced by its transpose.
    """
    half, sign = x.shape[-1] // 2, -1 if transposed else 1
    first, second = sin[..., :half], sin[..., half:]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], second if transposed else first, value=-sign)
    out[..., half:].addcmul_(x[..., :half], first if transposed else second, value=sign)
    return out


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) · up.

    Args:
        gate, up: of one shape, any.
        activation: a name in `ACTIVATIONS`.
    """
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    ACTIVATIONS[activation].value(gate, out)
    return out.mul_(up)


def gated_grad(g: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradients of `gated` in gate and up.

    Args:
        g: gradient of `gated`'s output.
        gate, up, activation: as `gated` takes them.
    """
    d_gate, d_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    ACTIVATIONS[activation].value(gate, d_up)
    d_up.mul_(g)
    torch.mul(g, up, out=d_gate)
    ACTIVATIONS[activation].grad(d_gate, gate, d_gate)
    return d_gate, d_up
