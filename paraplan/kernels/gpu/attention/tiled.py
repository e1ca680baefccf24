"""Attention in tiles of the score matrix, with masks, grouped heads and dropout by global index: three Triton kernels.

    S = scale · q kᵀ + mask,   P = exp(S − lse),   out = drop(P) v,   lse = log Σ exp S
    δ = Σ g · out,   dV = drop(P)ᵀ g,   dS = P (drop(g vᵀ) − δ),   dQ = scale · dS k,   dK = scale · dSᵀ q

The forward keeps a running maximum and sum per query; the backward makes the scores again, once for every tile of keys
(dK, dV) and once for every tile of queries (dQ), so that no two programs write one element. Tiles in the future of all
their queries are passed over. What is dropped follows from (seed, slot, global row, key) as in `random_kernels`, so the
backward and every shard drop the same. Shapes and conventions are those of `kernels.attention_kernels`.

Source: Dao 2023, FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraplan.kernels.attention_kernels import AttentionCall
from paraplan.kernels.gpu.random import draw, slot_key
from paraplan.kernels.gpu.triton_launch import launch, row_major


@triton.jit
def _scores(q, k, mask, m, n, s, t, mask_base, mask_m, mask_n, ahead, scale,
            has_mask: tl.constexpr, bool_mask: tl.constexpr, causal: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """A tile of S; -inf where nothing is attended to. `ahead`: how far the first query is ahead of the first key."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    there = (m[:, None] < s) & (n[None, :] < t)
    if has_mask:
        added = tl.load(mask + mask_base + m[:, None] * mask_m + n[None, :] * mask_n, mask=there, other=0)
        if bool_mask:
            there = there & (added != 0)
        else:
            scores += added.to(tl.float32)
    if causal:
        there = there & (n[None, :] <= m[:, None] + ahead)
    return tl.where(there, scores, float("-inf"))


@triton.jit
def _kept(seed, key, row, n, threshold: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which probabilities of a tile dropout keeps; `row`: global rows of its queries, `n`: global keys."""
    bits = draw(tl.load(seed), key, row.to(tl.uint64)[:, None], n.to(tl.uint32)[None, :])
    return bits >= threshold


@triton.jit
def _rows(x, base, row, stride, count, d, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of a [rows, d] matrix, zeros outside."""
    column = tl.arange(0, width)
    there = (row[:, None] < count) & (column[None, :] < d)
    return tl.load(x + base + row[:, None] * stride + column[None, :], mask=there, other=0.0)


@triton.jit
def _write(x, base, row, stride, count, d, value, width: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, width)
    there = (row[:, None] < count) & (column[None, :] < d)
    tl.store(x + base + row[:, None] * stride + column[None, :], value.to(x.dtype.element_ty), mask=there)


@triton.jit
def _forward(q, k, v, mask, seed, out, lse, qs, ks, vs, os, masks, whole, starts, h, g, s, t, d, e, scale, key,
             threshold: tl.constexpr, drop_scale: tl.constexpr, has_mask: tl.constexpr, bool_mask: tl.constexpr,
             causal: tl.constexpr, drops: tl.constexpr, width: tl.constexpr, e_width: tl.constexpr,
             tile_m: tl.constexpr, tile_n: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    m = tl.program_id(0) * tile_m + tl.arange(0, tile_m)
    batch, head = tl.program_id(1).to(tl.int64) // h, tl.program_id(1).to(tl.int64) % h
    group = head // (h // g)
    ahead = starts[2] - starts[3]
    row = ((batch + starts[0]) * whole[1] + head + starts[1]) * whole[2] + starts[2] + m
    queries = _rows(q, batch * qs[0] + head * qs[1], m, qs[2], s, d, width)
    top = tl.full((tile_m,), float("-inf"), tl.float32)
    total = tl.zeros((tile_m,), tl.float32)
    acc = tl.zeros((tile_m, e_width), tl.float32)
    stop = t
    if causal:
        stop = tl.minimum(t, tl.maximum((tl.program_id(0) + 1) * tile_m + ahead, 0))
    for start in range(0, stop, tile_n):
        n = start + tl.arange(0, tile_n)
        keys = _rows(k, batch * ks[0] + group * ks[1], n, ks[2], t, d, width)
        values = _rows(v, batch * vs[0] + group * vs[1], n, vs[2], t, e, e_width)
        scores = _scores(queries, keys, mask, m, n, s, t, batch * masks[0] + head * masks[1], masks[2], masks[3],
                         ahead, scale, has_mask, bool_mask, causal)  # fmt: skip
        new = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        probs = tl.exp(scores - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(probs, 1)
        if drops:
            probs = tl.where(_kept(seed, key, row, n + starts[3], threshold), probs * drop_scale, 0.0)
        acc = acc * shrink[:, None] + tl.dot(probs.to(values.dtype), values, input_precision="ieee")
        top = new
    some = total > 0
    acc = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
    found = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    _write(out, batch * os[0] + head * os[1], m, os[2], s, e, acc, e_width)
    tl.store(lse + (batch * h + head) * s + m, found, mask=m < s)


@triton.jit
def _delta(g_out, out, delta, gs, os, h, s, e, e_width: tl.constexpr, tile_m: tl.constexpr):  # type: ignore[no-untyped-def]
    m = tl.program_id(0) * tile_m + tl.arange(0, tile_m)
    batch, head = tl.program_id(1).to(tl.int64) // h, tl.program_id(1).to(tl.int64) % h
    grad = _rows(g_out, batch * gs[0] + head * gs[1], m, gs[2], s, e, e_width).to(tl.float32)
    made = _rows(out, batch * os[0] + head * os[1], m, os[2], s, e, e_width).to(tl.float32)
    tl.store(delta + (batch * h + head) * s + m, tl.sum(grad * made, 1), mask=m < s)


@triton.jit
def _tile_grad(queries, keys, values, grad, lse, delta, mask, seed, place, m, n, s, t, mask_base, mask_m, mask_n,
               ahead, row, key_start, scale, key, threshold: tl.constexpr, drop_scale: tl.constexpr,
               has_mask: tl.constexpr, bool_mask: tl.constexpr, causal: tl.constexpr,
               drops: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """drop(P) and the gradient of S of a tile."""
    scores = _scores(
        queries, keys, mask, m, n, s, t, mask_base, mask_m, mask_n, ahead, scale, has_mask, bool_mask, causal
    )
    whole = tl.load(lse + place + m, mask=m < s, other=float("-inf"))
    finite = whole > float("-inf")
    probs = tl.where(finite[:, None], tl.exp(scores - tl.where(finite, whole, 0.0)[:, None]), 0.0)
    inner = tl.dot(grad, tl.trans(values), input_precision="ieee")
    dropped = probs
    if drops:
        kept = _kept(seed, key, row, n + key_start, threshold)
        dropped = tl.where(kept, probs * drop_scale, 0.0)
        inner = tl.where(kept, inner * drop_scale, 0.0)
    ds = probs * (inner - tl.load(delta + place + m, mask=m < s, other=0.0)[:, None])
    return dropped, ds


@triton.jit
def _key_grads(g_out, q, k, v, mask, seed, lse, delta, dk, dv, gs, qs, ks, vs, dks, dvs, masks, whole, starts,
               h, g, s, t, d, e, scale, key,
               threshold: tl.constexpr, drop_scale: tl.constexpr, has_mask: tl.constexpr, bool_mask: tl.constexpr,
               causal: tl.constexpr, drops: tl.constexpr, width: tl.constexpr, e_width: tl.constexpr,
               tile_m: tl.constexpr, tile_n: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    n = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
    batch, group = tl.program_id(1).to(tl.int64) // g, tl.program_id(1).to(tl.int64) % g
    ahead = starts[2] - starts[3]
    keys = _rows(k, batch * ks[0] + group * ks[1], n, ks[2], t, d, width)
    values = _rows(v, batch * vs[0] + group * vs[1], n, vs[2], t, e, e_width)
    to_keys = tl.zeros((tile_n, width), tl.float32)
    to_values = tl.zeros((tile_n, e_width), tl.float32)
    first = 0
    if causal:
        first = tl.maximum(tl.program_id(0) * tile_n - ahead, 0) // tile_m * tile_m
    for member in range(0, h // g):
        head = group * (h // g) + member
        for start in range(first, s, tile_m):
            m = start + tl.arange(0, tile_m)
            row = ((batch + starts[0]) * whole[1] + head + starts[1]) * whole[2] + starts[2] + m
            queries = _rows(q, batch * qs[0] + head * qs[1], m, qs[2], s, d, width)
            grad = _rows(g_out, batch * gs[0] + head * gs[1], m, gs[2], s, e, e_width)
            dropped, ds = _tile_grad(
                queries, keys, values, grad, lse, delta, mask, seed, (batch * h + head) * s, m, n, s, t,
                batch * masks[0] + head * masks[1], masks[2], masks[3], ahead, row, starts[3], scale, key, threshold,
                drop_scale, has_mask, bool_mask, causal, drops,
            )  # fmt: skip
            to_values += tl.dot(tl.trans(dropped).to(grad.dtype), grad, input_precision="ieee")
            to_keys += tl.dot(tl.trans(ds * scale).to(queries.dtype), queries, input_precision="ieee")
    _write(dk, batch * dks[0] + group * dks[1], n, dks[2], t, d, to_keys, width)
    _write(dv, batch * dvs[0] + group * dvs[1], n, dvs[2], t, e, to_values, e_width)


@triton.jit
def _query_grads(g_out, q, k, v, mask, seed, lse, delta, dq, gs, qs, ks, vs, dqs, masks, whole, starts,
                 h, g, s, t, d, e, scale, key,
                 threshold: tl.constexpr, drop_scale: tl.constexpr, has_mask: tl.constexpr, bool_mask: tl.constexpr,
                 causal: tl.constexpr, drops: tl.constexpr, width: tl.constexpr, e_width: tl.constexpr,
                 tile_m: tl.constexpr, tile_n: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    m = tl.program_id(0) * tile_m + tl.arange(0, tile_m)
    batch, head = tl.program_id(1).to(tl.int64) // h, tl.program_id(1).to(tl.int64) % h
    group = head // (h // g)
    ahead = starts[2] - starts[3]
    row = ((batch + starts[0]) * whole[1] + head + starts[1]) * whole[2] + starts[2] + m
    queries = _rows(q, batch * qs[0] + head * qs[1], m, qs[2], s, d, width)
    grad = _rows(g_out, batch * gs[0] + head * gs[1], m, gs[2], s, e, e_width)
    acc = tl.zeros((tile_m, width), tl.float32)
    stop = t
    if causal:
        stop = tl.minimum(t, tl.maximum((tl.program_id(0) + 1) * tile_m + ahead, 0))
    for start in range(0, stop, tile_n):
        n = start + tl.arange(0, tile_n)
        keys = _rows(k, batch * ks[0] + group * ks[1], n, ks[2], t, d, width)
        values = _rows(v, batch * vs[0] + group * vs[1], n, vs[2], t, e, e_width)
        _, ds = _tile_grad(
            queries, keys, values, grad, lse, delta, mask, seed, (batch * h + head) * s, m, n, s, t,
            batch * masks[0] + head * masks[1], masks[2], masks[3], ahead, row, starts[3], scale, key, threshold,
            drop_scale, has_mask, bool_mask, causal, drops,
        )  # fmt: skip
        acc += tl.dot((ds * scale).to(keys.dtype), keys, input_precision="ieee")
    _write(dq, batch * dqs[0] + head * dqs[1], m, dqs[2], s, d, acc, width)


@triton.jit
def _mask_grad(g_out, q, k, v, mask, seed, lse, delta, dmask, gs, qs, ks, vs, dms, shared, masks, whole, starts,
               h, g, s, t, d, e, scale, key,
               threshold: tl.constexpr, drop_scale: tl.constexpr, has_mask: tl.constexpr, bool_mask: tl.constexpr,
               causal: tl.constexpr, drops: tl.constexpr, width: tl.constexpr, e_width: tl.constexpr,
               tile_m: tl.constexpr, tile_n: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """A tile of the mask's gradient: dS summed over the batch rows and heads (`shared`) that a row and a head of the
    mask stand for."""
    columns = (t + tile_n - 1) // tile_n
    m = tl.program_id(0) // columns * tile_m + tl.arange(0, tile_m)
    n = tl.program_id(0) % columns * tile_n + tl.arange(0, tile_n)
    heads = h // shared[1]
    own_batch, own_head = tl.program_id(1).to(tl.int64) // heads, tl.program_id(1).to(tl.int64) % heads
    ahead = starts[2] - starts[3]
    total = tl.zeros((tile_m, tile_n), tl.float32)
    for member in range(0, shared[0] * shared[1]):
        batch = own_batch + member // shared[1]
        head = own_head + member % shared[1]
        group = head // (h // g)
        row = ((batch + starts[0]) * whole[1] + head + starts[1]) * whole[2] + starts[2] + m
        queries = _rows(q, batch * qs[0] + head * qs[1], m, qs[2], s, d, width)
        grad = _rows(g_out, batch * gs[0] + head * gs[1], m, gs[2], s, e, e_width)
        keys = _rows(k, batch * ks[0] + group * ks[1], n, ks[2], t, d, width)
        values = _rows(v, batch * vs[0] + group * vs[1], n, vs[2], t, e, e_width)
        _, ds = _tile_grad(
            queries, keys, values, grad, lse, delta, mask, seed, (batch * h + head) * s, m, n, s, t,
            batch * masks[0] + head * masks[1], masks[2], masks[3], ahead, row, starts[3], scale, key, threshold,
            drop_scale, has_mask, bool_mask, causal, drops,
        )  # fmt: skip
        total += ds
    there = (m[:, None] < s) & (n[None, :] < t)
    place = dmask + own_batch * dms[0] + own_head * dms[1] + m[:, None] * dms[2] + n[None, :] * dms[3]
    tl.store(place, total.to(dmask.dtype.element_ty), mask=there)


class _Given(NamedTuple):
    """What all kernels take the same of, as their last arguments: numbers, then compile-time constants."""

    masks: tuple[int, ...]
    whole: tuple[int, ...]
    starts: tuple[int, ...]
    numbers: tuple[float, ...]
    fixed: tuple[object, ...]


def _given(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: AttentionCall) -> _Given:
    (_, h, s, d), (g, t, e) = q.shape, v.shape[1:]
    widths = max(16, triton.next_power_of_2(d)), max(16, triton.next_power_of_2(e))
    tiles = (64, 32) if max(widths) > 128 or q.dtype == torch.float32 else (128, 64)
    threshold = min(max(round(call.p * 2**32) - 2**31, -(2**31)), 2**31 - 1)
    drop_scale = 1.0 / (1.0 - call.p) if call.p < 1 else 0.0
    masks = (0, 0, 0, 0)
    if mask is not None:
        masks = tuple(stride if size > 1 else 0 for size, stride in zip(mask.shape, mask.stride(), strict=True))
    fixed = (
        threshold,
        drop_scale,
        mask is not None,
        mask is not None and mask.dtype == torch.bool,
        call.causal,
        call.p > 0,
        *widths,
        *tiles,
    )
    numbers = (h, g, s, t, d, e, call.scale, slot_key(call.slot))
    return _Given(masks, tuple(call.global_shape), tuple(call.starts), numbers, fixed)


def _cdiv(count: int, by: object) -> int:
    assert isinstance(by, int)
    return -(-count // by)


def _columns(mask: Tensor | None, t: int, start: int) -> Tensor | None:
    return mask.narrow(-1, start, t) if mask is not None and mask.shape[-1] > t else mask


def _bytes(mask: Tensor | None, like: Tensor) -> Tensor:
    """A mask as kernels load it; any tensor where there is none."""
    if mask is None:
        return like
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _heads_last(b: int, h: int, s: int, d: int, like: Tensor) -> Tensor:
    return like.new_empty((b, s, h, d)).transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    """x with its last dim laid out row by row."""
    return x if x.stride(-1) == 1 else row_major(x)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    """As `kernels.attention_kernels.attention`, in one launch."""
    call = AttentionCall(*rest)
    q, k, v, mask = _unit(q), _unit(k), _unit(v), _columns(mask, k.shape[2], call.starts[3])
    (b, h, s, _), e = q.shape, v.shape[-1]
    out = _heads_last(b, h, s, e, q)
    lse = torch.empty((b, h, s), dtype=torch.float32, device=q.device)
    given = _given(q, k, v, mask, call)
    strides = (x.stride()[:3] for x in (q, k, v, out))
    tensors = q, k, v, _bytes(mask, q), lse if seed is None else seed
    args = *tensors, out, lse, *strides, given.masks, given.whole, given.starts, *given.numbers, *given.fixed
    launch(_forward, (_cdiv(s, given.fixed[-2]), b * h), args, tensors, (out, lse))
    return out, lse


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
    """As `kernels.attention_kernels.attention_grad`, in three launches, with the mask's gradient in five."""
    call = AttentionCall(*rest)
    asks = call.mask_grad and mask is not None
    dmask = torch.zeros(mask.shape, dtype=mask.dtype, device=mask.device) if asks and mask is not None else None
    g_out, q, k, v, out, lse = (*map(_unit, (g_out, q, k, v, out)), row_major(lse))
    mask = _columns(mask, k.shape[2], call.starts[3])
    (b, h, s, d), (g, t, e) = q.shape, v.shape[1:]
    dq, dk, dv = _heads_last(b, h, s, d, q), _heads_last(b, g, t, d, q), _heads_last(b, g, t, e, q)
    delta = torch.empty_like(lse)
    given = _given(q, k, v, mask, call)
    e_width, tile_m, tile_n = given.fixed[-3:]
    over_queries = (_cdiv(s, tile_m), b * h)
    args = g_out, out, delta, g_out.stride()[:3], out.stride()[:3], h, s, e, e_width, tile_m
    launch(_delta, over_queries, args, (g_out, out), (delta,))
    tensors = g_out, q, k, v, _bytes(mask, q), lse if seed is None else seed, lse, delta
    strides = tuple(x.stride()[:3] for x in (g_out, q, k, v))
    rest = given.masks, given.whole, given.starts, *given.numbers, *given.fixed
    args = *tensors, dk, dv, *strides, dk.stride()[:3], dv.stride()[:3], *rest
    launch(_key_grads, (_cdiv(t, tile_n), b * g), args, tensors, (dk, dv))
    launch(_query_grads, over_queries, (*tensors, dq, *strides, dq.stride()[:3], *rest), tensors, (dq,))
    if dmask is not None:
        here = dmask.narrow(-1, call.starts[3] if dmask.shape[-1] > t else 0, t)
        shared = (b // dmask.shape[0], h // dmask.shape[1])
        grid = (_cdiv(s, tile_m) * _cdiv(t, tile_n), dmask.shape[0] * dmask.shape[1])
        launch(_mask_grad, grid, (*tensors, here, *strides, here.stride(), shared, *rest), tensors, (here,))
    return dq, dk, dv, dmask
