"""Activations within Triton kernels, by number."""

from __future__ import annotations

import triton
import triton.language as tl

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


@triton.jit
def activated(x, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """An activation and its derivative."""
    if kind == 0:
        share = 1 / (1 + tl.exp(-x))
        value, slope = x * share, share * (1 + x * (1 - share))
    elif kind == 1:
        share = 0.5 * (1 + tl.math.erf(x * 0.7071067811865476))
        value, slope = x * share, share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif kind == 2:
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        share = 1 / (1 + tl.exp(-inner))
        value = x * share
        slope = share + x * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        value, slope = tl.where(x <= 0, 0.0, x), tl.where(x > 0, 1.0, 0.0)
    return value, slope
