"""Softmax attention with grouped queries, masks, dropout and a mask gradient.

    S = scale · q kᵀ + mask,   P = softmax(S),   out = drop(P) v,   lse = log Σ exp S

q: [b, h, s, d], k: [b, g, t, d], v: [b, g, t, e], h = g · r: head j reads group j // r. A row that may attend to
nothing gives zeros. Results are laid out as contiguous [b, s, h, e] tensors seen as [b, h, s, e].

Without dropout and mask gradient torch's CPU flash kernel runs; otherwise one batch row at a time, so the
workspace is a few score matrices of one row.

All of it works on one block of the global score matrix, `starts` saying where it begins: queries, keys or both may be
a rank's share of the sequence. Blocks of one row of queries are joined by `attention_merge`:

    lse = log(exp lse₁ + exp lse₂),   out = out₁ · exp(lse₁ − lse) + out₂ · exp(lse₂ − lse)

and, given the lse and out of the whole row, `attention_grad` of a block is that block's addend of every gradient.
Source: Milakov, Gimelshein 2018 (arXiv 1805.02867); Liu et al. 2023, Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paraplan.kernels.random_kernels import dropout


class AttentionCall(NamedTuple):
    """What `attention` and its gradient do: their last arguments.

    Attributes:
        p, slot: dropout on the probabilities, keyed as in `random_kernels.dropout`.
        causal: query i attends to keys 0..i.
        scale: factor on q kᵀ.
        global_shape: [B, H, S, T], the global shape of the scores.
        starts: where this block of the scores begins.
        mask_grad: whether the mask's gradient is asked for; of the gradient alone.
    """

    p: float
    slot: int
    causal: bool
    scale: float
    global_shape: Sequence[int]
    starts: Sequence[int]
    mask_grad: bool = False


class _Call(NamedTuple):
    """What forward and backward share besides the tensors; a mask holds this block's keys alone."""

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


def _make_call(q: Tensor, k: Tensor, mask: Tensor | None, seed: Tensor | None, *rest: Any) -> _Call:
    """The call on one block; of a mask over more keys than these the block's columns are taken."""
    call = AttentionCall(*rest)
    if mask is not None:
        mask = _columns(mask, k.shape[2], call.starts[3])
    return _Call(mask, seed, *call[:4], tuple(call.global_shape), tuple(call.starts))


def _columns(mask: Tensor, t: int, start: int) -> Tensor:
    """The columns of this block's keys (a view); all, where the mask has no others or is broadcast."""
    return mask.narrow(-1, start, t) if mask.shape[-1] > t else mask


def _is_whole(q: Tensor, k: Tensor, call: _Call) -> bool:
    """Whether the block is the whole score matrix: told from shapes, so that all ranks agree."""
    return (q.shape[2], k.shape[2]) == call.global_shape[2:]


def _flash_fits(q: Tensor, k: Tensor, v: Tensor, call: _Call, mask_grad: bool) -> bool:
    square = q.shape[2] == k.shape[2] or not _is_whole(q, k, call)
    same = q.shape[-1] == v.shape[-1] and (not call.causal or (call.mask is None and square))
    same = same and all(x.stride(-1) == 1 for x in (q, k, v))  # torch's kernel gives wrong values otherwise
    return q.device.type == "cpu" and call.p == 0.0 and same and not mask_grad and 0 not in q.shape and 0 not in k.shape


def _flash_mask(call: _Call, q: Tensor, k: Tensor) -> tuple[Tensor | None, bool]:
    """The mask as torch's flash kernel takes it, and whether the kernel is to mask the future itself."""
    mask, causal = call.mask, call.causal
    if causal and not _is_whole(q, k, call):
        mask = torch.full((1, 1, q.shape[2], k.shape[2]), float("-inf"), dtype=q.dtype, device=q.device)
        return mask.triu_(_first_future(call)), False
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(q.dtype), causal
    return torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf")), causal


def _first_future(call: _Call) -> int:
    """The diagonal of this block from which keys lie in the future of their query."""
    return 1 + call.starts[2] - call.starts[3]


def _clear_empty_rows(out: Tensor, lse: Tensor, call: _Call) -> None:
    """In place: zeros, and lse = -inf, where a row attends to no key of this block (torch's kernel says lse = 0)."""
    if call.mask is not None:
        some = call.mask.any(-1) if call.mask.dtype == torch.bool else (call.mask > float("-inf")).any(-1)
        if not bool(some.all()):
            empty = some.logical_not_()
            lse.masked_fill_(empty, float("-inf"))
            out.masked_fill_(empty.unsqueeze(-1), 0)
    elif call.causal and (none := min(max(1 - _first_future(call), 0), lse.shape[2])):
        lse[:, :, :none] = float("-inf")
        out[:, :, :none] = 0


def _repeat(x: Tensor, times: int) -> Tensor:
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _fold(x: Tensor, times: int) -> Tensor:
    """Sums the gradients of a group's heads."""
    return x if times == 1 else x.unflatten(1, (-1, times)).sum(2)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, *call_args: Any
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp.

    Args:
        q, k, v: see the module's head.
        mask: bool (True attends) or float (added), broadcastable to [b, h, s, t]; None for none. It may hold all keys
            where k and v hold some.
        seed: int64 scalar, needed where p > 0.
        call_args: of `AttentionCall`.
    Returns:
        out [b, h, s, e] (stored [b, s, h, e]) and lse [b, h, s], float32 at least.
    """
    call = _make_call(q, k, mask, seed, *call_args)
    if _flash_fits(q, k, v, call, False):
        times = q.shape[1] // k.shape[1]
        added, future = _flash_mask(call, q, k)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, _repeat(k, times), _repeat(v, times), 0.0, future, attn_mask=added, scale=call.scale
        )
        del added
        out, lse = heads_last_layout(out), lse.contiguous()
        _clear_empty_rows(out, lse, call)
        return out, lse
    return _attention_math(q, k, v, call)


def attention_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attention of two sets of keys together, from that of each.

    Args:
        out_a, out_b: [b, h, s, e]; zeros where a row attends to nothing.
        lse_a, lse_b: [b, h, s]; -inf there.
        dtype: of the result; sums are in the dtype of lse.
    Returns:
        As `attention`.
    """
    b, h, s, e = out_a.shape
    lse = torch.logaddexp(lse_a, lse_b)
    total = torch.empty((b, s, h, e), dtype=lse.dtype, device=lse.device).transpose(1, 2)
    finite = lse.masked_fill(lse == float("-inf"), 0)
    torch.mul(out_a, (lse_a - finite).exp_().unsqueeze(-1), out=total)
    total.addcmul_(out_b.to(lse.dtype), (lse_b - finite).exp_().unsqueeze(-1))
    return total.to(dtype), lse


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
        future = torch.ones(s, t, dtype=torch.bool, device=q.device).triu_(_first_future(call))
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
    *call_args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `attention` in q, k, v and, where asked, the float mask (summed over its broadcast dims).

    Args:
        g_out: [b, h, s, e], gradient of `attention`'s output.
        q, k, v, mask, seed: as `attention` takes them.
        out, lse: what `attention` gives for the whole rows, whichever keys k and v hold.
        call_args: of `AttentionCall`.
    Returns:
        Gradients shaped as q, k and v, stored heads last ([b, s, h, d]); then one like the mask, zero at the keys that
        are not in k, or None where it is not asked for.
    """
    call, mask_grad = _make_call(q, k, mask, seed, *call_args), AttentionCall(*call_args).mask_grad
    if not _flash_fits(q, k, v, call, mask_grad):
        grads = torch.zeros(mask.shape, dtype=lse.dtype, device=q.device) if mask_grad and mask is not None else None
        return _attention_grad_math(g_out, q, k, v, out, lse, call, grads)
    times = q.shape[1] // k.shape[1]
    added, future = _flash_mask(call, q, k)
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
        future,
        attn_mask=added,
        scale=call.scale,
    )
    return heads_last_layout(dq), heads_last_layout(_fold(dk, times)), heads_last_layout(_fold(dv, times)), None


def _attention_grad_math(
    g_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: _Call, dmask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`dmask`: zeros of the mask's shape over all keys, added to; None where its gradient is not asked for."""
    (b, h, s, d), (g, t, e) = q.shape, v.shape[1:]
    grads = q.new_empty((b, s, h, d)), k.new_empty((b, t, g, d)), v.new_empty((b, t, g, e))
    here = None if dmask is None else _columns(dmask, t, call.starts[3])
    for row in range(b):
        _attend_row_grad((g_out, q, k, v, out, lse), call, row, grads, here)
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
