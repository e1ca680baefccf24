"""Layer and group norm, with their statistics in float32 at least on every device.

torch keeps those of half-precision inputs in half precision on a CPU and in float32 on CUDA; a program is one for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["group_norm", "group_norm_grad", "layer_norm", "layer_norm_grad"]

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
    g: Tensor, x: Tensor, normalised: Sequence[int], mean: Tensor, rstd: Tensor, w: Tensor | None,
    bias: Tensor | None, wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of `layer_norm` in x, w and bias; None for those not wanted."""
    if (w is None or w.dtype == x.dtype) and not x.is_cuda:
        mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)
    made = aten.native_layer_norm_backward.default(g, x, normalised, mean, rstd, w, bias, list(wanted))
    found = [grad if want else None for grad, want in zip(made, wanted, strict=True)]
    return found[0], found[1], found[2]


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
