"""Layer, root-mean-square and group norm, with their statistics in float32 at least on every device.

torch keeps those of half-precision inputs in half precision on a CPU and in float32 on CUDA; a program is one for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["group_norm", "group_norm_grad", "layer_norm", "layer_norm_grad", "rms_norm", "rms_norm_grad"]

aten = torch.ops.aten


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def layer_norm(
    x: Tensor, normalised: Sequence[int], w: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x normalised over its last dims, of these sizes; also means and reciprocal deviations, dims of 1 there."""
    out, mean, rstd = aten.native_layer_norm.default(x, normalised, w, bias, eps)
    return out, _wide(mean), _wide(rstd)


def layer_norm_grad(
    g: Tensor,
    x: Tensor,
    normalised: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `layer_norm` in x, w and bias; None for those not wanted."""
    if (w is None or w.dtype == x.dtype) and not x.is_cuda:
        mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)
    made = aten.native_layer_norm_backward.default(g, x, normalised, mean, rstd, w, bias, list(wanted))
    found = [grad if want else None for grad, want in zip(made, wanted, strict=True)]
    return found[0], found[1], found[2]


def rms_norm(x: Tensor, dims: int, w: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """y = x · rstd · w and rstd = (mean(x²) + eps)^-½ over the last `dims` dims, which are 1 in rstd."""
    x = x.contiguous()
    wide = _wide(x)
    rstd = wide.square().mean(list(range(-dims, 0)), keepdim=True).add_(eps).rsqrt_()
    out = wide * rstd
    return (out if w is None else out.mul_(w)).to(x.dtype), rstd


def rms_norm_grad(
    g: Tensor, x: Tensor, dims: int, rstd: Tensor, w: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `rms_norm` in x and, where wanted, in w.

    dx = rstd · (g w − x̂ · mean(g w x̂)),   dw = Σ g x̂,   x̂ = x · rstd
    """
    g, x = g.contiguous(), x.contiguous()
    normal = x * rstd
    lead = list(range(x.dim() - dims))
    dw = (g * normal).sum(lead).to(w.dtype) if w is not None and wanted[1] else None
    weighed = g.to(rstd.dtype, copy=True)
    if w is not None:
        weighed.mul_(w)
    inner = (weighed * normal).mean(list(range(-dims, 0)), keepdim=True)
    return weighed.sub_(normal.mul_(inner)).mul_(rstd).to(x.dtype), dw


def group_norm(
    x: Tensor, w: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Each group of channels of each sample normalised; also means and reciprocal deviations [b, groups]."""
    x = x.contiguous()
    plane = x[0, 0].numel()
    return aten.native_group_norm.default(x, w, bias, x.shape[0], x.shape[1], plane, groups, eps)  # type: ignore[no-any-return]


def group_norm_grad(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, groups: int, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `group_norm` in x, w and bias; None for those not wanted."""
    plane = x[0, 0].numel()
    sizes = (x.shape[0], x.shape[1], plane, groups, list(wanted))
    made = aten.native_group_norm_backward.default(g.contiguous(), x.contiguous(), mean, rstd, w, *sizes)
    found = [grad if want else None for grad, want in zip(made, wanted, strict=True)]
    return found[0], found[1], found[2]
