"""Kernels of the canonical vision ops: convolution, pooling, resizing and batch norm.

Each works on a whole tensor or on one rank's block of it ([batch, channels, *space], space whole) and returns
row-major results, whatever the memory order of its inputs: a channels-last input costs one copy inside, and what
follows never has to guess an order. Gradients take sizes where torch's own formulas would keep a whole tensor alive
just to read its shape.

Batch norm comes as sums over samples (a sum, then centred squares), for these alone add up over shards exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "adaptive_avg_pool",
    "adaptive_avg_pool_grad",
    "adaptive_max_pool",
    "avg_pool",
    "avg_pool_grad",
    "bn_apply",
    "bn_grad_affine",
    "bn_grad_input",
    "bn_rstd",
    "bn_running",
    "bn_squares",
    "bn_whole",
    "bn_whole_grad",
    "conv",
    "conv_grad_input",
    "conv_grad_weight",
    "max_pool",
    "max_pool_grad",
    "upsample",
    "upsample_grad",
]

aten = torch.ops.aten
Ints = Sequence[int]


def _shaped(like: Tensor, shape: Ints) -> Tensor:
    """A tensor torch reads nothing but the shape and dtype of: one element, expanded."""
    return like.new_empty(1).expand(tuple(shape))


class ConvCall(NamedTuple):
    """What a convolution does: the last arguments of it and of its gradients, as of `aten.convolution`."""

    stride: Ints
    padding: Ints
    dilation: Ints
    transposed: bool
    output_padding: Ints
    groups: int


def conv(x: Tensor, w: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """y[b, n, ...] = x[b, k, ...] * w (+ bias).

    Args:
        x: [b, k, *space].
        w: [n, k / groups, *window], or [k, n / groups, *window] when transposed.
        bias: [n]; None for none.
        rest: of `ConvCall`.
    """
    return aten.convolution(x.contiguous(), w.contiguous(), bias, *ConvCall(*rest)).contiguous()


def conv_grad_input(g: Tensor, w: Tensor, size: Ints, *rest: Any) -> Tensor:
    """The gradient of `conv` in x: [b, k, *size].

    Args:
        g: [b, n, ...], gradient of `conv`'s output.
        w: as `conv` takes it.
        size: of x's space.
        rest: of `ConvCall`.
    """
    call = ConvCall(*rest)
    channels = w.shape[0] if call.transposed else w.shape[1] * call.groups
    x = _shaped(g, (g.shape[0], channels, *size))
    grads = aten.convolution_backward(g.contiguous(), x, w.contiguous(), None, *call, [True, False, False])
    return grads[0].contiguous()  # type: ignore[no-any-return]


def conv_grad_weight(g: Tensor, x: Tensor, size: Ints, *rest: Any) -> Tensor:
    """The gradient of `conv` in w, summed over the batch.

    Args:
        g: [b, n, ...], gradient of `conv`'s output.
        x: [b, k, *space].
        size: of the window.
        rest: of `ConvCall`.
    """
    call = ConvCall(*rest)
    first, second = (x.shape[1], g.shape[1]) if call.transposed else (g.shape[1], x.shape[1])
    w = _shaped(g, (first, second // call.groups, *size))
    grads = aten.convolution_backward(g.contiguous(), x.contiguous(), w, None, *call, [False, True, False])
    return grads[1].contiguous()  # type: ignore[no-any-return]


def max_pool(
    x: Tensor, window: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Maxima of windows, and where each lies in its plane.

    Args:
        x: [..., *plane], a plane of two or three dims.
        window: sizes, one per dim of the plane.
        stride, padding, dilation: likewise; padding is on either side.
        ceil_mode: whether windows count that begin in the plane, or the padding before it, and end outside of both.
    Returns:
        Maxima, and int64 places in the flattened plane.
    """
    function = getattr(aten, f"max_pool{len(window)}d_with_indices").default
    return function(x.contiguous(), window, stride, padding, dilation, ceil_mode)  # type: ignore[no-any-return]


def adaptive_max_pool(x: Tensor, size: Ints) -> tuple[Tensor, Tensor]:
    """Maxima of windows that cover the plane in `size` steps, and where each lies in it."""
    return getattr(aten, f"adaptive_max_pool{len(size)}d").default(x.contiguous(), size)  # type: ignore[no-any-return]


def max_pool_grad(g: Tensor, indices: Tensor, size: Ints) -> Tensor:
    """The gradient of any max pooling: g added into a plane where the maxima lie.

    Args:
        g: gradient of the maxima.
        indices: their places in the flattened plane, shaped as g.
        size: of the plane.
    """
    lead = g.shape[: g.dim() - len(size)]
    flat = g.new_zeros((*lead, torch.Size(size).numel()))
    flat.scatter_add_(-1, indices.contiguous().view(*lead, -1), g.contiguous().view(*lead, -1))
    return flat.view(*lead, *size)


def avg_pool(
    x: Tensor, window: Ints, stride: Ints, padding: Ints, ceil_mode: bool, count_padding: bool, divisor: int | None
) -> Tensor:
    """Means of windows.

    Args:
        x, window, stride, padding, ceil_mode: as `max_pool` takes them.
        count_padding: whether padding counts among the elements that a window's sum is divided by.
        divisor: what it is divided by instead of their number; None for the number.
    """
    function = getattr(aten, f"avg_pool{len(window)}d").default
    return function(x.contiguous(), window, stride, padding, ceil_mode, count_padding, divisor)  # type: ignore[no-any-return]


def avg_pool_grad(
    g: Tensor,
    size: Ints,
    window: Ints,
    stride: Ints,
    padding: Ints,
    ceil_mode: bool,
    count_padding: bool,
    divisor: int | None,
) -> Tensor:
    """The gradient of `avg_pool` in x: [..., *size].

    Args:
        g: gradient of `avg_pool`'s output.
        size: of x's plane.
        window, stride, padding, ceil_mode, count_padding, divisor: as `avg_pool` takes them.
    """
    x = _shaped(g, (*g.shape[: g.dim() - len(size)], *size))
    function = getattr(aten, f"avg_pool{len(window)}d_backward").default
    return function(g.contiguous(), x, window, stride, padding, ceil_mode, count_padding, divisor)  # type: ignore[no-any-return]


def adaptive_avg_pool(x: Tensor, size: Ints) -> Tensor:
    """Means of windows that cover the plane in `size` steps."""
    return getattr(aten, f"_adaptive_avg_pool{len(size)}d").default(x.contiguous(), size)  # type: ignore[no-any-return]


def adaptive_avg_pool_grad(g: Tensor, size: Ints) -> Tensor:
    """The gradient of `adaptive_avg_pool` in x: [..., *size]."""
    x = _shaped(g, (*g.shape[: g.dim() - len(size)], *size))
    return getattr(aten, f"_adaptive_avg_pool{len(size)}d_backward").default(g.contiguous(), x)  # type: ignore[no-any-return]


def upsample(x: Tensor, how: str, size: Ints, rest: Sequence[object]) -> Tensor:
    """Planes resized.

    Args:
        x: [b, channels, *space].
        how: the name of torch's op, "upsample_bilinear2d".
        size: of the result's space.
        rest: the op's further arguments: `align_corners` where it has that, then a scale or None per dim of the space.
    """
    return getattr(aten, how).default(x.contiguous(), size, *rest)  # type: ignore[no-any-return]


def upsample_grad(g: Tensor, how: str, size: Ints, given: Ints, rest: Sequence[object]) -> Tensor:
    """The gradient of `upsample` in x: [b, channels, *given].

    Args:
        g: [b, channels, *size], gradient of `upsample`'s output.
        how, size, rest: as `upsample` takes them.
        given: the size of x's space.
    """
    shape = (*g.shape[: g.dim() - len(given)], *given)
    return getattr(aten, f"{how}_backward").default(g.contiguous(), size, shape, *rest)  # type: ignore[no-any-return]


def _over_samples(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(value: Tensor, x: Tensor) -> Tensor:
    return value.view(-1, *(1,) * (x.dim() - 2))


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _wide(x: Tensor) -> Tensor:
    """Row-major and in the dtype of statistics."""
    return x.contiguous().to(_statistics_dtype(x.dtype))


def bn_squares(x: Tensor, mean: Tensor) -> Tensor:
    """s[c] = sum over samples and space of (x − mean)², by way of this block's own mean and variance."""
    count = x.numel() // max(x.shape[1], 1)
    wide = _wide(x)
    var, own = torch.var_mean(wide, _over_samples(x), correction=0)
    return own.sub_(mean).square_().add_(var).mul_(count)


def bn_rstd(squares: Tensor, count: int, eps: float) -> Tensor:
    """1 / sqrt(squares / count + eps), in float32 at least.

    Args:
        squares: [c], sums of centred squares over all samples and space; a variance where count is 1.
        count: samples times space, over all ranks.
        eps: added to the variance.
    """
    return squares.to(_statistics_dtype(squares.dtype)).div(count).add_(eps).rsqrt_()


def bn_running(running: Tensor, total: Tensor, momentum: float, scale: float) -> Tensor:
    """(1 − momentum) · running + momentum · scale · total, in running's dtype.

    Args:
        running: [c], a running mean or variance before the step.
        total: [c], the step's sum, or sum of centred squares, over all samples and space.
        momentum: the share of the step's own.
        scale: what makes a mean or a variance of `total`: 1 / count, 1 / (count − 1).
    """
    return (running * (1.0 - momentum)).add_(total.to(running.dtype), alpha=momentum * scale)


def bn_apply(x: Tensor, mean: Tensor | None, rstd: Tensor, w: Tensor | None, bias: Tensor | None) -> Tensor:
    """(x − mean) · rstd · w + bias, channel by channel, in x's dtype.

    Args:
        x: [b, c, *space].
        mean: [c]; None for zeros.
        rstd: [c], reciprocal deviations.
        w, bias: [c]; None for ones and for zeros.
    """
    scale = _per_channel(rstd if w is None else rstd * w, x)
    wide = _wide(x)
    out = wide * scale if mean is None else (wide - _per_channel(mean, x)).mul_(scale)
    del wide
    if bias is not None:
        out.add_(_per_channel(bias, x))
    return out.to(x.dtype)


def bn_grad_affine(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of g · (x − mean) · rstd, sum of g) over samples and space: [c] each, in float32 at least.

    Args:
        g: [b, c, *space], gradient of the norm's output.
        x: [b, c, *space], its input.
        mean, rstd: [c], the statistics of the whole batch.
    """
    mean = mean.to(rstd.dtype)
    given = (_wide(g), _wide(x), None, mean, torch.ones_like(mean), None, None, False, 0.0, [False, True, True])
    _, dw, db = aten.native_batch_norm_backward.default(*given)
    return dw.mul_(rstd), db


def bn_grad_input(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, dw: Tensor, db: Tensor, count: int
) -> Tensor:
    """The gradient in x: rstd · w · (g − db / count − (x − mean) · rstd · dw / count), in x's dtype.

    Args:
        g, x, mean, rstd: as `bn_grad_affine` takes them.
        w: [c]; None for ones.
        dw, db: [c], the sums of `bn_grad_affine` over the whole batch.
        count: samples times space, over all ranks.
    """
    scale = rstd if w is None else rstd * w
    out = (_wide(x) - _per_channel(mean, x)).mul_(_per_channel(dw * rstd * scale / -count, x))
    out.addcmul_(g.to(out.dtype), _per_channel(scale, x)).sub_(_per_channel(db * scale / count, x))
    return out.to(x.dtype)


def bn_whole(
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    added: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Batch norm of all samples: `bn_apply`, plus `added`, through a relu.

    The parts one after another: with the same bits.

    Args:
        x: [b, c, *space].
        w, bias: [c]; None for ones and for zeros.
        running_mean, running_var: [c], before the step; None where none are kept.
        added: like x; None for nothing.
        momentum: the share of the step's own in running statistics.
        eps: added to the variance.
        relu: whether the result goes through one.
    Returns:
        The result, mean and rstd [c], and the running mean and variance after the step, None where none are kept.
    """
    count = x.numel() // max(x.shape[1], 1)
    total = x.sum(_over_samples(x), dtype=_statistics_dtype(x.dtype))
    mean = total * (1.0 / count)
    squares = bn_squares(x, mean)
    rstd = bn_rstd(squares, count, eps)
    out = bn_apply(x, mean, rstd, w, bias)
    if added is not None:
        out = (out + added).contiguous()
    after_mean = None if running_mean is None else bn_running(running_mean, total, momentum, 1.0 / count)
    after_var = None if running_var is None else bn_running(running_var, squares, momentum, 1.0 / max(count - 1, 1))
    return out.relu_() if relu else out, mean, rstd, after_mean, after_var


def bn_whole_grad(
    g: Tensor,
    x: Tensor,
    y: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    w: Tensor | None,
    dtype: torch.dtype,
    masks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of `bn_whole` over all samples: in x, and in weight and bias in a dtype; likewise its parts.

    Args:
        g: the gradient, in y where the result went through a relu.
        x, mean, rstd, w: of the norm.
        y: that relu's result; None where there is no relu.
        dtype: of the gradients of weight and bias.
        masks: whether the gradient before the relu is wanted too.
    """
    g = g if y is None else aten.threshold_backward.default(g, y, 0).contiguous()
    dw, db = bn_grad_affine(g, x, mean, rstd)
    dx = bn_grad_input(g, x, mean, rstd, w, dw, db, x.numel() // max(x.shape[1], 1))
    return dx, dw.to(dtype), db.to(dtype), g if masks else None
