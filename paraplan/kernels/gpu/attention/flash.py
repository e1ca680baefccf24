"""Attention by torch's FlashAttention-2: half precision, no mask, no dropout; grouped heads without copies.

Of a causal score matrix a block of a ring is in the past of its queries (no mask at all), on the diagonal, or in their
future (nothing to do): which, its starts say, numbers known on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paraplan.kernels.attention_kernels import heads_last_layout

aten = torch.ops.aten


def nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of queries to keys in their future, and its log-sums."""
    (b, h, s, _), e = q.shape, v.shape[-1]
    lse = torch.full((b, h, s), float("-inf"), dtype=torch.float32, device=q.device)
    return q.new_zeros((b, s, h, e)).transpose(1, 2), lse


def no_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients."""
    dq, dk, dv = (x.new_zeros((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) for x in (q, k, v))
    return dq, dk, dv


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: None,
    seed: Tensor | None,
    p: float,
    slot: int,
    causal: bool,
    scale: float,
    global_shape: Sequence[int],
    starts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """As `kernels.attention_kernels.attention`."""
    if causal and starts[2] < starts[3]:
        return nothing(q, v)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal and starts[2] == starts[3], False, scale=scale
    )
    return heads_last_layout(out), lse


def attention_grad(
    g_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    p: float,
    slot: int,
    causal: bool,
    scale: float,
    global_shape: Sequence[int],
    starts: Sequence[int],
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """As `kernels.attention_kernels.attention_grad`."""
    if causal and starts[2] < starts[3]:
        return *no_gradients(q, k, v), None
    unread = lse  # the state of random numbers, which are not drawn
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        g_out,
        q,
        k,
        v,
        out,
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal and starts[2] == starts[3],
        unread,
        unread,
        scale=scale,
    )
    return heads_last_layout(dq), heads_last_layout(dk), heads_last_layout(dv), None
