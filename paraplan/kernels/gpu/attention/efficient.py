"""Attention by torch's memory-efficient kernel: float32 too, masks and their gradients; no dropout, no grouped heads.

It adds its mask to the scores, reads rows of whole 32 bytes of it, and gives log-sums padded to blocks of 32 queries.
Of a row that attends to nothing it gives zeros and a log-sum of 0, which is made -inf (`empty_rows`); the backward
wants +inf there, or its probabilities are NaN.

Source: Rabe, Staats 2021, Self-attention Does Not Need O(n^2) Memory (arXiv 2112.05682).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paraplan.kernels.attention_kernels import AttentionCall, heads_last_layout
from paraplan.kernels.gpu.attention.empty_rows import clear_empty_rows
from paraplan.kernels.gpu.attention.flash import is_diagonal, is_future, no_gradients, nothing

aten = torch.ops.aten
INF = float("inf")


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    """As `kernels.attention_kernels.attention`."""
    call = AttentionCall(*rest)
    if is_future(call):
        return nothing(q, v)
    added, causal = _added(mask, q, k), is_diagonal(call)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, added, True, 0.0, causal, scale=call.scale)
    if added is None:
        return out, lse.narrow(-1, 0, q.shape[2]).contiguous()
    return out, clear_empty_rows(lse, added, causal)


def attention_grad(
    g_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `kernels.attention_kernels.attention_grad`."""
    call = AttentionCall(*rest)
    asks = call.mask_grad and mask is not None
    if is_future(call):
        return *no_gradients(q, k, v), torch.zeros_like(mask) if asks and mask is not None else None
    padded = _padded(lse, mask is not None)
    dq, dk, dv, dmask = aten._scaled_dot_product_efficient_attention_backward(
        heads_last_layout(g_out),
        q,
        k,
        v,
        _added(mask, q, k),
        out,
        padded,
        padded,
        padded,
        0.0,
        (True, True, True, asks),
        is_diagonal(call),
        scale=call.scale,
    )
    return dq, dk, dv, dmask if asks else None


def _added(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask as the kernel takes it: added, of every score's shape, copied where rows are not whole 32 bytes."""
    if mask is None:
        return None
    (b, h, s, _), t = q.shape, k.shape[2]
    rows = all(stride % 16 == 0 for size, stride in zip(mask.shape[:3], mask.stride(), strict=False) if size > 1)
    columns = mask.shape[3] == t and (mask.stride(3) == 1 or t == 1)
    if mask.dtype == torch.bool or not (rows and columns and mask.storage_offset() % 16 == 0):
        copy = q.new_empty((*mask.shape[:3], -(-t // 16) * 16)).narrow(-1, 0, t)
        copy.copy_(mask)
        mask = copy.log_() if mask.dtype == torch.bool else copy
    return mask.expand(b, h, s, t)


def _padded(lse: Tensor, masked: bool) -> Tensor:
    """Log-sums padded to blocks of 32, +inf where there is nothing to sum."""
    b, h, s = lse.shape
    if s % 32 == 0 and not masked and lse.is_contiguous():
        return lse
    padded = lse.new_empty((b, h, -(-s // 32) * 32))
    if s % 32:
        padded.fill_(INF)
    aten.nan_to_num.out(lse, float("nan"), INF, INF, out=padded.narrow(-1, 0, s))
    return padded
