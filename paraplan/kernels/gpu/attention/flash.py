"""Attention by torch's FlashAttention-2: half precision, no mask, no dropout; grouped heads without copies.

Of a causal score matrix a block of a ring is in the past of its queries (no mask at all), on the diagonal, or in their
future (nothing to do): which, its starts say, numbers known on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paraplan.kernels.attention_kernels import AttentionCall, heads_last_layout

aten = torch.ops.aten


def is_future(call: AttentionCall) -> bool:
    """Whether every key of the block is in its queries' future."""
    return call.causal and call.starts[2] < call.starts[3]


def is_diagonal(call: AttentionCall) -> bool:
    """Whether the block's queries and keys are at the same places, so that the kernel masks the future."""
    return call.causal and call.starts[2] == call.starts[3]


def nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of queries to keys in their future, and its log-sums."""
    (b, h, s, _), e = q.shape, v.shape[-1]
    lse = torch.full((b, h, s), float("-inf"), dtype=torch.float32, device=q.device)
    return q.new_zeros((b, s, h, e)).transpose(1, 2), lse


def no_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `nothing`: zeros, stored heads last.

    Args:
        q, k, v: [b, heads, rows, width], of which shapes and dtypes are taken.
    """
    dq, dk, dv = (x.new_zeros((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) for x in (q, k, v))
    return dq, dk, dv


def attention(q: Tensor, k: Tensor, v: Tensor, mask: None, seed: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """As `kernels.attention_kernels.attention`."""
    call = AttentionCall(*rest)
    if is_future(call):
        return nothing(q, v)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_diagonal(call), False, scale=call.scale)
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
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """As `kernels.attention_kernels.attention_grad`."""
    call = AttentionCall(*rest)
    if is_future(call):
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
        is_diagonal(call),
        unread,
        unread,
        scale=call.scale,
    )
    return heads_last_layout(dq), heads_last_layout(dk), heads_last_layout(dv), None
