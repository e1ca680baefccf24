"""Layer, root-mean-square and group norm; the first two with statistics in float32 at least on every device.

torch keeps those of half-precision inputs in half precision on a CPU and in float32 on CUDA; a program is one for both.
Group norm's are in the dtype in which torch gives them.
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
    """x normalised over its last dims.

    Args:
        x: [..., *normalised].
        normalised: sizes of the dims that are normalised over.
        w, bias: of these sizes; None for ones and for zeros.
        eps: added to the variance.
    Returns:
        The result, and the means and reciprocal deviations, in which the normalised dims are 1.
    """
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
    """The gradients of `layer_norm` in x, w and bias; None for those not wanted.

    Args:
        g: like x, gradient of `layer_norm`'s output.
        x, normalised, w, bias: as `layer_norm` takes them.
        mean, rstd: as it returns them.
        wanted: of x, w and bias.
    """
    if (w is None or w.dtype == x.dtype) and not x.is_cuda:
        mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)
    made = aten.native_layer_norm_backward.default(g, x, normalised, mean, rstd, w, bias, list(wanted))
    found = [grad if want else None for grad, want in zip(made, wanted, strict=True)]
    return found[0], found[1], found[2]


def rms_norm(x: Tensor, dims: int, w: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """y = x · rstd · w and rstd = (mean(x²) + eps)^-½ over the last dims, which are 1 in rstd.

    Args:
        x: any shape.
        dims: how many last dims are normalised over.
        w: of those dims' sizes; None for ones.
        eps: added to the mean of squares.
    """
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

    Args:
        g: like x, gradient of `rms_norm`'s output.
        x, dims, w: as `rms_norm` takes them.
        rstd: as it returns it.
        wanted: of x and w; x's is always computed.
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
    """Each group of channels of each sample normalised.

    Args:
        x: [b, channels, ...].
        w, bias: [channels]; None for ones and for zeros.
        groups: of equally many successive channels.
        eps: added to the variance.
    Returns:
        The result, and means and reciprocal deviations [b, groups].
    """
    x = x.contiguous()
    plane = x[0, 0].numel()
    return aten.native_group_norm.default(x, w, bias, x.shape[0], x.shape[1], plane, groups, eps)  # type: ignore[no-any-return]


def group_norm_grad(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, groups: int, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `group_norm` in x, w and bias; None for those not wanted.

    Args:
        g: like x, gradient of `group_norm`'s output.
        x, w, groups: as `group_norm` takes them.
        mean, rstd: as it returns them.
        wanted: of x, w and bias.
    """
    plane = x[0, 0].numel()
    sizes = (x.shape[0], x.shape[1], plane, groups, list(wanted))
    made = aten.native_group_norm_backward.default(g.contiguous(), x.contiguous(), mean, rstd, w, *sizes)
    found = [grad if want else None for grad, want in zip(made, wanted, strict=True)]
    return found[0], found[1], found[2]
