"""Softmax attention with grouped queries, masks, dropout and a mask gradient.

    S = scale · q kᵀ + mask,   P = softmax(S),   out = drop(P) v,   lse = log Σ exp S

q: [b, h, s, d], k: [b, g, t, d], v: [b, g, t, e], h = g · r: head j reads group j // r. A row that may attend to
nothing gives zeros. Results are laid out as contiguous [b, s, h, e] tensors seen as [b, h, s, e].

Without dropout and mask gradient torch's CPU flash kernel runs; otherwise one batch row at a time, so the
workspace is a few score matrices of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paraplan.ir.trace.random_kernels import dropout


class _Call(NamedTuple):
    """What forward and backward share besides the tensors."""

    mask: Tensor | None
    seed: Tensor | None
    p: float
    slot: int
    causal: bool
    scale: float
    global_shape: tuple[int, ...]
    starts: tuple[int, ...]


def heads_last_layout(x: Tensor) -> Tensor:
    """The same values, stored as contiguous [b, s, h, d]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _flash_fits(q: Tensor, k: Tensor, v: Tensor, call: _Call, mask_grad: bool) -> bool:
    same = q.shape[-1] == v.shape[-1] and (not call.causal or (call.mask is None and q.shape[2] == k.shape[2]))
    same = same and all(x.stride(-1) == 1 for x in (q, k, v))  # torch's kernel gives wrong values otherwise
    return q.device.type == "cpu" and call.p == 0.0 and same and not mask_grad and 0 not in q.shape and 0 not in k.shape


def _flash_mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype).masked_fill_(~mask, float("-inf"))


def _repeat(x: Tensor, times: int) -> Tensor:
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _fold(x: Tensor, times: int) -> Tensor:
    """Sums the gradients of a group's heads."""
    return x if times == 1 else x.unflatten(1, (-1, times)).sum(2)


def _zero_empty_rows(out: Tensor, lse: Tensor) -> Tensor:
    """Zeros where a row attends to nothing, and in place of the NaN its softmax gave."""
    empty = ~torch.isfinite(lse)
    return out.masked_fill(empty.unsqueeze(-1), 0) if bool(empty.any()) else out


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    p: float,
    slot: int,
    causal: bool,
    scale: float,
    global_heads_batch: Sequence[int],
    starts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp.

    Args:
        q, k, v: see the module's head.
        mask: bool (True attends) or float (added), broadcastable to [b, h, s, t]; None for none.
        seed: int64 scalar, needed where p > 0.
        p, slot: dropout on the probabilities, keyed as in `random_kernels.dropout`.
        causal: query i attends to keys 0..i.
        scale: factor on q kᵀ.
        global_heads_batch: [B, H, S, T], the global shape of the scores.
        starts: where this block of the scores begins.
    Returns:
        out [b, h, s, e] (stored [b, s, h, e]) and lse [b, h, s], float32 at least.
    """
    call = _Call(mask, seed, p, slot, causal, scale, tuple(global_heads_batch), tuple(starts))
    if _flash_fits(q, k, v, call, False):
        times = q.shape[1] // k.shape[1]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, _repeat(k, times), _repeat(v, times), 0.0, causal, attn_mask=_flash_mask(mask, q), scale=scale
        )
        if mask is not None:
            out = _zero_empty_rows(out, lse)
        return heads_last_layout(out), lse.contiguous()
    return _attention_math(q, k, v, call)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _mask_row(mask: Tensor, row: int, shape: tuple[int, ...]) -> Tensor:
    """Mask of one batch row, as [h, s, t] (a view)."""
    return mask[row if mask.shape[0] > 1 else 0].expand(shape)


def _scores(q: Tensor, k: Tensor, call: _Call, row: int) -> Tensor:
    """S of one batch row: q [h, s, d], k [g, t, d] -> [h, s, t]."""
    (h, s, d), (g, t, _) = q.shape, k.shape
    scores = torch.bmm(q.reshape(g, h // g * s, d), k.transpose(1, 2)).view(h, s, t).mul_(call.scale)
    if call.mask is not None:
        mask = _mask_row(call.mask, row, (h, s, t))
        scores = (
            scores.masked_fill_(~mask, float("-inf"))
            if mask.dtype == torch.bool
            else scores.add_(mask.to(scores.dtype))
        )
    if call.causal:
        future = torch.ones(s, t, dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill_(future, float("-inf"))
    return scores


def _drop(x: Tensor, call: _Call, row: int) -> Tensor:
    if call.p == 0.0:
        return x
    assert call.seed is not None, "attention dropout without a seed"
    b0, h0, s0, t0 = call.starts
    return dropout(x.unsqueeze(0), call.seed, call.p, call.slot, call.global_shape, (b0 + row, h0, s0, t0)).squeeze(0)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(S − lse), zeros for rows that attend to nothing."""
    finite = torch.isfinite(lse)
    safe = lse.masked_fill(~finite, 0).unsqueeze(-1)
    return scores.sub_(safe).exp_().mul_(finite.unsqueeze(-1))


def _attention_math(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    b, h, s, e = (*q.shape[:3], v.shape[-1])
    dtype = _compute_dtype(q.dtype)
    out = q.new_empty((b, s, h, e))
    lse = torch.empty((b, h, s), dtype=dtype, device=q.device)
    for row in range(b):
        _attend_row(q, k, v, call, row, out, lse)
    return out.transpose(1, 2), lse


def _attend_row(q: Tensor, k: Tensor, v: Tensor, call: _Call, row: int, out: Tensor, lse: Tensor) -> None:
    """One batch row of the math path; a function of its own so that its scores die before the next row's exist."""
    (h, s), (g, t, e) = q.shape[1:3], v.shape[1:]
    scores = _scores(q[row].to(lse.dtype), k[row].to(lse.dtype), call, row)
    lse[row] = torch.logsumexp(scores, -1)
    probs = _drop(_probabilities(scores, lse[row]), call, row)
    block = torch.bmm(probs.view(g, h // g * s, t), v[row].to(lse.dtype)).view(h, s, e)
    out[row] = block.transpose(0, 1)


def attention_grad(
    g_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `attention` in q, k, v and, where asked, the float mask (summed over its broadcast dims)."""
    call = _Call(mask, seed, p, slot, causal, scale, tuple(global_shape), tuple(starts))
    if not _flash_fits(q, k, v, call, mask_grad):
        return _attention_grad_math(g_out, q, k, v, out, lse, call, mask_grad)
    times = q.shape[1] // k.shape[1]
    if mask is not None:  # a row without keys: any finite lse keeps its probabilities at zero
        lse = lse.masked_fill(~torch.isfinite(lse), 0)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g_out,
        q,
        _repeat(k, times),
        _repeat(v, times),
        out,
        lse,
        0.0,
        causal,
        attn_mask=_flash_mask(mask, q),
        scale=scale,
    )
    return heads_last_layout(dq), heads_last_layout(_fold(dk, times)), heads_last_layout(_fold(dv, times)), None


def _attention_grad_math(
    g_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: _Call, mask_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    (b, h, s, d), (g, t, e) = q.shape, v.shape[1:]
    dtype = _compute_dtype(q.dtype)
    grads = q.new_empty((b, s, h, d)), k.new_empty((b, t, g, d)), v.new_empty((b, t, g, e))
    dmask = torch.zeros(call.mask.shape, dtype=dtype, device=q.device) if mask_grad and call.mask is not None else None
    for row in range(b):
        _attend_row_grad((g_out, q, k, v, out, lse), call, row, grads, dmask)
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, dv, None if dmask is None or call.mask is None else dmask.to(call.mask.dtype)


def _attend_row_grad(
    tensors: tuple[Tensor, ...], call: _Call, row: int, grads: tuple[Tensor, Tensor, Tensor], dmask: Tensor | None
) -> None:
    """The gradients of one batch row, written into its rows of `grads` and added to `dmask`."""
    g_out, q, k, v, out, lse = tensors
    dq, dk, dv = grads
    (h, s, d), (g, t, e) = q.shape[1:], v.shape[1:]
    rows, dtype = h // g * s, lse.dtype
    query, key, value, grad = (x[row].to(dtype) for x in (q, k, v, g_out))
    probs = _probabilities(_scores(query, key, call, row), lse[row])
    grad_rows = grad.reshape(g, rows, e)
    dv[row] = torch.bmm(_drop(probs, call, row).view(g, rows, t).transpose(1, 2), grad_rows).transpose(0, 1)
    delta = (grad * out[row].to(dtype)).sum(-1, keepdim=True)
    inner = _drop(torch.bmm(grad_rows, value.transpose(1, 2)).view(h, s, t), call, row)
    ds = probs.mul_(inner.sub_(delta))
    del inner
    if dmask is not None:
        target = dmask[row if dmask.shape[0] > 1 else 0]
        target += ds.sum_to_size(target.shape)
    ds = ds.mul_(call.scale).view(g, rows, t)
    dq[row] = torch.bmm(ds, key).view(h, s, d).transpose(0, 1)
    dk[row] = torch.bmm(ds.transpose(1, 2), query.reshape(g, rows, d)).transpose(0, 1)
