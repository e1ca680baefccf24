"""Root-mean-square norm by torch's fused kernels, which it has for CUDA alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paraplan.kernels.gpu.triton_launch import noted, row_major

aten = torch.ops.aten


def rms_norm(x: Tensor, dims: int, w: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """As `kernels.norm_kernels.rms_norm`, in one launch."""
    x = row_major(x)
    if noted(x):
        rstd = x.new_empty((*x.shape[:-dims], *(1,) * dims), dtype=torch.promote_types(x.dtype, torch.float32))
        out = torch.empty_like(x)
        noted(x, (x, w), (out, rstd), "rms_norm")
        return out, rstd
    return aten._fused_rms_norm.default(x, x.shape[-dims:], w, eps)  # type: ignore[no-any-return]


def rms_norm_grad(
    g: Tensor, x: Tensor, dims: int, rstd: Tensor, w: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor | None]:
    """As `kernels.norm_kernels.rms_norm_grad`, in one launch."""
    g, x = row_major(g), row_major(x)
    dx, dw = aten._fused_rms_norm_backward.default(g, x, x.shape[-dims:], rstd, w, [True, wanted[1]])
    return dx, dw if wanted[1] else None
