"""What `paraplan.float8_*` compute: products of eight-bit floats, dynamically scaled by one number a tensor.

A tensor x is held as x8 = x / s, with s the least power of two for which every element fits the dtype: torchao's
tensorwise recipe with `round_scales_to_power_of_2` (Micikevicius et al. 2022, "FP8 formats for deep learning"). Powers
of two make division and multiplication by s exact, and the last bit of a maximum changes nothing. Products are torch's
`_scaled_mm`, which on Hopper takes its left operand in rows and its right one in columns, 16 contracted elements at a
time. What a weight's gradient is made of is therefore cast to its transpose; a weight that lies the other way is copied
first. On CPU torch computes the same product in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paraplan.kernels.torch_private import scaled_mm

LEAST = 1e-12
"""Maxima below count as this much, as in torchao."""
ALIGNED = 16
"""What `_scaled_mm` wants contracted dims to be a multiple of."""
_EXPONENT = 0x7F800000


def float8_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The least power of two s with max|x| / s within the dtype: float32 []; of shards of x, the maximum is x's."""
    low, high = torch.aminmax(x)
    room = torch.finfo(dtype).max / torch.maximum(high, -low).float().clamp(min=LEAST)
    return (room.view(torch.int32) & _EXPONENT).view(torch.float32).reciprocal()


def float8_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale, rounded to the dtype.

    Args:
        x: any shape.
        scale: float32 [], what `float8_scale` gives for x, or for the tensor that x is a shard of.
        dtype: of the result: float8_e4m3fn or float8_e5m2.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.div(x, scale, out=out)


def float8_cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x cast, and its transpose.

    Args:
        x: [..., k].
        scale, dtype: as `float8_cast` takes them.
    Returns:
        [..., k] and a contiguous [k, ...], the last dim moved to the front.
    """
    out = float8_cast(x, scale, dtype)
    return out, out.movedim(-1, 0).contiguous()


def float8_linear(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, transposed: bool) -> Tensor:
    """y[..., n] = x[..., k] · w, in bfloat16.

    Args:
        x: [..., k], cast.
        w: [n, k], or [k, n] when `transposed`, cast.
        x_scale, w_scale: float32 [], what x and w were divided by.
        transposed: whether w is stored as [k, n].
    """
    right = _turned(w) if transposed else w
    return product(_rows(x), right, x_scale, w_scale, fast=True).view(*x.shape[:-1], right.shape[0])


def float8_linear_grad_input(g: Tensor, w: Tensor, g_scale: Tensor, w_scale: Tensor, transposed: bool) -> Tensor:
    """The gradient of `float8_linear` in x: bfloat16 [..., k].

    Args:
        g: [..., n], gradient of `float8_linear`'s output, cast.
        w, w_scale, transposed: as `float8_linear` takes them.
        g_scale: float32 [], what g was divided by.
    """
    right = w if transposed else _turned(w)
    return product(_rows(g), right, g_scale, w_scale).view(*g.shape[:-1], right.shape[0])


def float8_linear_grad_weight(g: Tensor, x: Tensor, g_scale: Tensor, x_scale: Tensor, transposed: bool) -> Tensor:
    """The gradient of `float8_linear` in w, all dims of g and x but the first contracted.

    Args:
        g: [n, ...], transposed gradient of the output, cast (`float8_cast_both`).
        x: [k, ...], transposed input, cast.
        g_scale, x_scale: float32 [], what they were divided by.
        transposed: whether w is stored as [k, n].
    Returns:
        bfloat16 [n, k], or [k, n] when `transposed`.
    """
    left, right = _filled(g), _filled(x)
    if transposed:
        return product(right, left, x_scale, g_scale)
    return product(left, right, g_scale, x_scale)


def product(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, fast: bool = False) -> Tensor:
    """left · rightᵀ, times both scales: bfloat16 [m, n].

    Args:
        left: [m, k], float8, contiguous.
        right: [n, k], float8, contiguous.
        left_scale, right_scale: float32 [].
        fast: whether sums are kept with fewer bits on Hopper; torchao's recipe does so in the forward alone.
    """
    return scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _rows(x: Tensor) -> Tensor:
    """[..., k] -> contiguous [rows, k]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _turned(x: Tensor) -> Tensor:
    """A copy [k, n] of a weight [n, k]."""
    return x.t().contiguous()


def _filled(x: Tensor) -> Tensor:
    """[k, ...] -> contiguous [k, rows], rows made a multiple of 16 with zeros."""
    x = x.reshape(x.shape[0], -1).contiguous()
    columns, rows = x.shape
    if rows % ALIGNED == 0:
        return x
    out = x.new_zeros((columns, rows + -rows % ALIGNED))
    out[:, :rows].copy_(x)
    return out
