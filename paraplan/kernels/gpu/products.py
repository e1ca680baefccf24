"""Products of halves in float32, as their sums are taken in anyway; torch has them for CUDA alone."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_grad_weight(g: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """As `kernels.reference_kernels.linear_grad_weight` of halves, in float32: not rounded to their dtype."""
    g, x = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    left, right = (x.t(), g) if transposed else (g.t(), x)
    return torch.ops.aten.mm.dtype(left, right, torch.float32)  # type: ignore[no-any-return]
