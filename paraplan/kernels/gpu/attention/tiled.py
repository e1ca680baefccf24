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
from paraplan.kernels.gpu.random import finish, row_key, slot_key
from paraplan.kernels.gpu.triton_launch import launch, row_major

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(x, base, row, stride, count, width: tl.constexpr, d: tl.constexpr, checked: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of a [rows, d] matrix, zeros outside; `checked`: whether some of the rows may be outside."""
    column = tl.arange(0, width)
    place = x + base + row.to(tl.int64)[:, None] * stride + column[None, :]
    if checked:
        there = row[:, None] < count
        if d < width:
            there = there & (column[None, :] < d)
        return tl.load(place, mask=there, other=0.0)
    if d < width:
        return tl.load(place, mask=(column[None, :] < d) & (row[:, None] >= 0), other=0.0)
    return tl.load(place)


@triton.jit
def _write(x, base, row, stride, count, value, width: tl.constexpr, d: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, width)
    there = (row[:, None] < count) & (column[None, :] < d)
    place = x + base + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(place, value.to(x.dtype.element_ty), mask=there)


@triton.jit
def _added(scores, mask, m, n, s, t, base, mask_m, mask_n, scale, has_mask: tl.constexpr, bool_mask: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of log2(e) · S from the products; m, n: places of its queries and keys, broadcast to the tile."""
    scores = scores * (scale * LOG2E)
    if has_mask:
        place = mask + base + m.to(tl.int64) * mask_m + n.to(tl.int64) * mask_n
        added = tl.load(place, mask=(m < s) & (n < t), other=0)
        if bool_mask:
            scores = tl.where(added != 0, scores, float("-inf"))
        else:
            scores += added.to(tl.float32) * LOG2E
    return scores


@triton.jit
def _attended(scores, m, n, t, ahead, causal: tl.constexpr, checked: tl.constexpr, ends: tl.constexpr):  # type: ignore[no-untyped-def]
    """-inf where nothing is attended to. `ahead`: how far the first query is ahead of the first key; `checked`: whether
    the tile may be on the diagonal; `ends`: whether it may hold keys from t on, which are to be left out."""
    if checked and causal:
        scores = tl.where(n <= m + ahead, scores, float("-inf"))
    if checked and ends:
        scores = tl.where(n < t, scores, float("-inf"))
    return scores


@triton.jit
def _forward_tile(start, queries, k, v, k_base, v_base, k_stride, v_stride, mask, mask_base, mask_m, mask_n, m, s, t,
                  ahead, scale, first, second, key_start, top, total, acc, threshold: tl.constexpr,
                  has_mask: tl.constexpr, bool_mask: tl.constexpr, causal: tl.constexpr, drops: tl.constexpr,
                  d: tl.constexpr, e: tl.constexpr, width: tl.constexpr, e_width: tl.constexpr, tile_n: tl.constexpr,
                  precision: tl.constexpr, checked: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Running maximum, sum and result with one more tile of keys."""
    n = start + tl.arange(0, tile_n)
    keys = _rows(k, k_base, n, k_stride, t, width, d, checked)
    scores = tl.dot(queries, tl.trans(keys), input_precision=precision)
    scores = _added(scores, mask, m[:, None], n[None, :], s, t, mask_base, mask_m, mask_n, scale, has_mask, bool_mask)
    scores = _attended(scores, m[:, None], n[None, :], t, ahead, causal, checked, True)
    new = tl.maximum(top, tl.max(scores, 1))
    safe = new
    if has_mask or (checked and causal):
        safe = tl.where(new == float("-inf"), 0.0, new)
    probs = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(probs, 1)
    if drops:
        kept = finish(first[:, None], second[:, None], (n + key_start).to(tl.uint32)[None, :]) >= threshold
        probs = tl.where(kept, probs, 0.0)
    values = _rows(v, v_base, n, v_stride, t, e_width, e, checked)
    acc = tl.dot(probs.to(values.dtype), values, acc * shrink[:, None], input_precision=precision)
    return new, total, acc


@triton.jit
def _forward(q, k, v, mask, seed, out, lse, qs, ks, vs, os, masks, whole, starts, h, g, s, t, scale, key,
             threshold: tl.constexpr, drop_scale: tl.constexpr, has_mask: tl.constexpr, bool_mask: tl.constexpr,
             causal: tl.constexpr, drops: tl.constexpr, d: tl.constexpr, e: tl.constexpr, width: tl.constexpr,
             e_width: tl.constexpr, precision: tl.constexpr,
             tile_m: tl.constexpr, tile_n: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    tile = tl.program_id(0)
    if causal:
        tile = tl.num_programs(0) - 1 - tile
    m = tile * tile_m + tl.arange(0, tile_m)
    batch, head = tl.program_id(1).to(tl.int64) // h, tl.program_id(1).to(tl.int64) % h
    group = head // (h // g)
    ahead = starts[2] - starts[3]
    first, second = m, m
    if drops:
        row = ((batch + starts[0]) * whole[1] + head + starts[1]) * whole[2] + starts[2] + m
        first, second = row_key(tl.load(seed), key, row.to(tl.uint64))
    queries = _rows(q, batch * qs[0] + head * qs[1], m, qs[2], s, width, d, True)
    top = tl.full((tile_m,), float("-inf"), tl.float32)
    total = tl.zeros((tile_m,), tl.float32)
    acc = tl.zeros((tile_m, e_width), tl.float32)
    k_base, v_base = batch * ks[0] + group * ks[1], batch * vs[0] + group * vs[1]
    mask_base = batch * masks[0] + head * masks[1]
    stop, unchecked = t, t // tile_n * tile_n
    if causal:
        stop = tl.minimum(t, tl.maximum((tile + 1) * tile_m + ahead, 0))
        unchecked = tl.minimum(unchecked, tl.maximum(tile * tile_m + ahead + 1, 0) // tile_n * tile_n)
    for start in range(0, unchecked, tile_n):
        top, total, acc = _forward_tile(
            start, queries, k, v, k_base, v_base, ks[2], vs[2], mask, mask_base, masks[2], masks[3], m, s, t, ahead,
            scale, first, second, starts[3], top, total, acc, threshold, has_mask, bool_mask, causal, drops, d, e,
            width, e_width, tile_n, precision, False,
        )  # fmt: skip
    for start in range(unchecked, stop, tile_n):
        top, total, acc = _forward_tile(
            start, queries, k, v, k_base, v_base, ks[2], vs[2], mask, mask_base, masks[2], masks[3], m, s, t, ahead,
            scale, first, second, starts[3], top, total, acc, threshold, has_mask, bool_mask, causal, drops, d, e,
            width, e_width, tile_n, precision, True,
        )  # fmt: skip
    some = total > 0
    acc = tl.where(some[:, None], acc * (drop_scale / tl.where(some, total, 1.0))[:, None], 0.0)
    found = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) / LOG2E, float("-inf"))
    _write(out, batch * os[0] + head * os[1], m, os[2], s, acc, e_width, e)
    tl.store(lse + (batch * h + head) * s + m, found, mask=m < s)


@triton.jit
def _delta(g_out, out, delta, gs, os, h, s, e: tl.constexpr, e_width: tl.constexpr, tile_m: tl.constexpr):  # type: ignore[no-untyped-def]
    m = tl.program_id(0) * tile_m + tl.arange(0, tile_m)
    batch, head = tl.program_id(1).to(tl.int64) // h, tl.program_id(1).to(tl.int64) % h
    grad = _rows(g_out, batch * gs[0] + head * gs[1], m, gs[2], s, e_width, e, True).to(tl.float32)
    made = _rows(out, batch * os[0] + head * os[1], m, os[2], s, e_width, e, True).to(tl.float32)
    tl.store(delta + (batch * h + head) * s + m, tl.sum(grad * made, 1), mask=m < s)


@triton.jit
def _log_sums(lse, place, m, s):  # type: ignore[no-untyped-def]
    """log2 of the sums of exp S; +inf, so that probabilities are zero, where there is nothing to sum."""
    found = tl.load(lse + place + m, mask=m < s, other=float("inf"))
    return tl.where(found == float("-inf"), float("inf"), found * LOG2E)


@triton.jit
def _tile_grad(scores, inner, log_sums, delta, first, second, n, threshold: tl.constexpr, drop_scale: tl.constexpr,
               drops: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """P, zero where dropped but not scaled, and the gradient of S, of a tile either way round; all are broadcast."""
    probs = tl.exp2(scores - log_sums)
    dropped = probs
    if drops:
        kept = finish(first, second, n) >= threshold
        dropped = tl.where(kept, probs, 0.0)
        inner = tl.where(kept, inner * drop_scale, 0.0)
    return dropped, probs * (inner - delta)


@triton.jit
def _key_tile(start, keys, values, q, g_out, q_base, g_base, q_stride, g_stride, mask, mask_base, mask_m, mask_n, lse,
              delta, place, seed, key, row, n, s, t, ahead, scale, key_start, to_keys, to_values,
              threshold: tl.constexpr, drop_scale: tl.constexpr, has_mask: tl.constexpr, bool_mask: tl.constexpr,
              causal: tl.constexpr, drops: tl.constexpr, d: tl.constexpr, e: tl.constexpr, width: tl.constexpr,
              e_width: tl.constexpr, tile_m: tl.constexpr, precision: tl.constexpr,
              checked: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Gradients of a tile of keys and values with one more tile of queries, keys down, queries across."""
    m = start + tl.arange(0, tile_m)
    queries = _rows(q, q_base, m, q_stride, s, width, d, True)
    grad = _rows(g_out, g_base, m, g_stride, s, e_width, e, True)
    first, second = m, m
    if drops:
        first, second = row_key(tl.load(seed), key, (row + m).to(tl.uint64))
    scores = tl.dot(keys, tl.trans(queries), input_precision=precision)
    scores = _added(scores, mask, m[None, :], n[:, None], s, t, mask_base, mask_m, mask_n, scale, has_mask, bool_mask)
    scores = _attended(scores, m[None, :], n[:, None], t, ahead, causal, checked, False)
    inner = tl.dot(values, tl.trans(grad), input_precision=precision)
    given = tl.load(delta + place + m, mask=m < s, other=0.0)
    dropped, ds = _tile_grad(
        scores, inner, _log_sums(lse, place, m, s)[None, :], given[None, :], first[None, :], second[None, :],
        (n + key_start).to(tl.uint32)[:, None], threshold, drop_scale, drops,
    )  # fmt: skip
    to_values = tl.dot(dropped.to(grad.dtype), grad, to_values, input_precision=precision)
    to_keys = tl.dot(ds.to(queries.dtype), queries, to_keys, input_precision=precision)
    return to_keys, to_values


@triton.jit
def _key_grads(g_out, q, k, v, mask, seed, lse, delta, dk, dv, gs, qs, ks, vs, dks, dvs, masks, whole, starts,
               h, g, s, t, scale, key,
               threshold: tl.constexpr, drop_scale: tl.constexpr, has_mask: tl.constexpr, bool_mask: tl.constexpr,
               causal: tl.constexpr, drops: tl.constexpr, d: tl.constexpr, e: tl.constexpr, width: tl.constexpr,
               e_width: tl.constexpr, precision: tl.constexpr,
               tile_m: tl.constexpr, tile_n: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    n = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
    batch, group = tl.program_id(1).to(tl.int64) // g, tl.program_id(1).to(tl.int64) % g
    ahead = starts[2] - starts[3]
    keys = _rows(k, batch * ks[0] + group * ks[1], n, ks[2], t, width, d, True)
    values = _rows(v, batch * vs[0] + group * vs[1], n, vs[2], t, e_width, e, True)
    to_keys = tl.zeros((tile_n, width), tl.float32)
    to_values = tl.zeros((tile_n, e_width), tl.float32)
    begin, unchecked = 0, 0
    if causal:
        begin = tl.maximum(tl.program_id(0) * tile_n - ahead, 0) // tile_m * tile_m
        unchecked = tl.maximum((tl.program_id(0) + 1) * tile_n - 1 - ahead, 0)
        unchecked = tl.minimum((unchecked + tile_m - 1) // tile_m * tile_m, s)
    for member in range(0, h // g):
        head = group * (h // g) + member
        q_base, g_base = batch * qs[0] + head * qs[1], batch * gs[0] + head * gs[1]
        mask_base = batch * masks[0] + head * masks[1]
        row = ((batch + starts[0]) * whole[1] + head + starts[1]) * whole[2] + starts[2]
        place = (batch * h + head) * s
        for start in range(begin, unchecked, tile_m):
            to_keys, to_values = _key_tile(
                start, keys, values, q, g_out, q_base, g_base, qs[2], gs[2], mask, mask_base, masks[2], masks[3], lse,
                delta, place, seed, key, row, n, s, t, ahead, scale, starts[3], to_keys, to_values, threshold,
                drop_scale, has_mask, bool_mask, causal, drops, d, e, width, e_width, tile_m, precision, True,
            )  # fmt: skip
        for start in range(unchecked, s, tile_m):
            to_keys, to_values = _key_tile(
                start, keys, values, q, g_out, q_base, g_base, qs[2], gs[2], mask, mask_base, masks[2], masks[3], lse,
                delta, place, seed, key, row, n, s, t, ahead, scale, starts[3], to_keys, to_values, threshold,
                drop_scale, has_mask, bool_mask, causal, drops, d, e, width, e_width, tile_m, precision, False,
            )  # fmt: skip
    _write(dk, batch * dks[0] + group * dks[1], n, dks[2], t, to_keys * scale, width, d)
    _write(dv, batch * dvs[0] + group * dvs[1], n, dvs[2], t, to_values * drop_scale, e_width, e)


@triton.jit
def _query_tile(start, queries, grad, log_sums, given, k, v, k_base, v_base, k_stride, v_stride, mask, mask_base,
                mask_m, mask_n, first, second, m, s, t, ahead, scale, key_start, acc,
                threshold: tl.constexpr, drop_scale: tl.constexpr, has_mask: tl.constexpr, bool_mask: tl.constexpr,
                causal: tl.constexpr, drops: tl.constexpr, d: tl.constexpr, e: tl.constexpr, width: tl.constexpr,
                e_width: tl.constexpr, tile_n: tl.constexpr, precision: tl.constexpr,
                checked: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """The gradient of a tile of queries with one more tile of keys, or, where `width` is 0, of the scores alone."""
    n = start + tl.arange(0, tile_n)
    keys = _rows(k, k_base, n, k_stride, t, width, d, checked)
    values = _rows(v, v_base, n, v_stride, t, e_width, e, checked)
    scores = tl.dot(queries, tl.trans(keys), input_precision=precision)
    scores = _added(scores, mask, m[:, None], n[None, :], s, t, mask_base, mask_m, mask_n, scale, has_mask, bool_mask)
    scores = _attended(scores, m[:, None], n[None, :], t, ahead, causal, checked, True)
    inner = tl.dot(grad, tl.trans(values), input_precision=precision)
    _, ds = _tile_grad(
        scores, inner, log_sums[:, None], given[:, None], first[:, None], second[:, None],
        (n + key_start).to(tl.uint32)[None, :], threshold, drop_scale, drops,
    )  # fmt: skip
    return tl.dot(ds.to(keys.dtype), keys, acc, input_precision=precision)


@triton.jit
def _query_grads(g_out, q, k, v, mask, seed, lse, delta, dq, gs, qs, ks, vs, dqs, masks, whole, starts,
                 h, g, s, t, scale, key,
                 threshold: tl.constexpr, drop_scale: tl.constexpr, has_mask: tl.constexpr, bool_mask: tl.constexpr,
                 causal: tl.constexpr, drops: tl.constexpr, d: tl.constexpr, e: tl.constexpr, width: tl.constexpr,
                 e_width: tl.constexpr, precision: tl.constexpr,
                 tile_m: tl.constexpr, tile_n: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    tile = tl.program_id(0)
    if causal:
        tile = tl.num_programs(0) - 1 - tile
    m = tile * tile_m + tl.arange(0, tile_m)
    batch, head = tl.program_id(1).to(tl.int64) // h, tl.program_id(1).to(tl.int64) % h
    group = head // (h // g)
    ahead = starts[2] - starts[3]
    first, second = m, m
    if drops:
        row = ((batch + starts[0]) * whole[1] + head + starts[1]) * whole[2] + starts[2] + m
        first, second = row_key(tl.load(seed), key, row.to(tl.uint64))
    queries = _rows(q, batch * qs[0] + head * qs[1], m, qs[2], s, width, d, True)
    grad = _rows(g_out, batch * gs[0] + head * gs[1], m, gs[2], s, e_width, e, True)
    place = (batch * h + head) * s
    log_sums = _log_sums(lse, place, m, s)
    given = tl.load(delta + place + m, mask=m < s, other=0.0)
    acc = tl.zeros((tile_m, width), tl.float32)
    k_base, v_base = batch * ks[0] + group * ks[1], batch * vs[0] + group * vs[1]
    mask_base = batch * masks[0] + head * masks[1]
    stop, unchecked = t, t // tile_n * tile_n
    if causal:
        stop = tl.minimum(t, tl.maximum((tile + 1) * tile_m + ahead, 0))
        unchecked = tl.minimum(unchecked, tl.maximum(tile * tile_m + ahead + 1, 0) // tile_n * tile_n)
    for start in range(0, unchecked, tile_n):
        acc = _query_tile(
            start, queries, grad, log_sums, given, k, v, k_base, v_base, ks[2], vs[2], mask, mask_base, masks[2],
            masks[3], first, second, m, s, t, ahead, scale, starts[3], acc, threshold, drop_scale, has_mask, bool_mask,
            causal, drops, d, e, width, e_width, tile_n, precision, False,
        )  # fmt: skip
    for start in range(unchecked, stop, tile_n):
        acc = _query_tile(
            start, queries, grad, log_sums, given, k, v, k_base, v_base, ks[2], vs[2], mask, mask_base, masks[2],
            masks[3], first, second, m, s, t, ahead, scale, starts[3], acc, threshold, drop_scale, has_mask, bool_mask,
            causal, drops, d, e, width, e_width, tile_n, precision, True,
        )  # fmt: skip
    _write(dq, batch * dqs[0] + head * dqs[1], m, dqs[2], s, acc * scale, width, d)


@triton.jit
def _mask_grad(g_out, q, k, v, mask, seed, lse, delta, dmask, gs, qs, ks, vs, dms, shared, masks, whole, starts,
               h, g, s, t, scale, key,
               threshold: tl.constexpr, drop_scale: tl.constexpr, has_mask: tl.constexpr, bool_mask: tl.constexpr,
               causal: tl.constexpr, drops: tl.constexpr, d: tl.constexpr, e: tl.constexpr, width: tl.constexpr,
               e_width: tl.constexpr, precision: tl.constexpr,
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
        first, second = m, m
        if drops:
            row = ((batch + starts[0]) * whole[1] + head + starts[1]) * whole[2] + starts[2] + m
            first, second = row_key(tl.load(seed), key, row.to(tl.uint64))
        queries = _rows(q, batch * qs[0] + head * qs[1], m, qs[2], s, width, d, True)
        grad = _rows(g_out, batch * gs[0] + head * gs[1], m, gs[2], s, e_width, e, True)
        keys = _rows(k, batch * ks[0] + group * ks[1], n, ks[2], t, width, d, True)
        values = _rows(v, batch * vs[0] + group * vs[1], n, vs[2], t, e_width, e, True)
        scores = tl.dot(queries, tl.trans(keys), input_precision=precision)
        scores = _added(scores, mask, m[:, None], n[None, :], s, t, batch * masks[0] + head * masks[1], masks[2],
                        masks[3], scale, has_mask, bool_mask)  # fmt: skip
        scores = _attended(scores, m[:, None], n[None, :], t, ahead, causal, True, False)
        inner = tl.dot(grad, tl.trans(values), input_precision=precision)
        place = (batch * h + head) * s
        given = tl.load(delta + place + m, mask=m < s, other=0.0)
        _, ds = _tile_grad(
            scores, inner, _log_sums(lse, place, m, s)[:, None], given[:, None], first[:, None], second[:, None],
            (n + starts[3]).to(tl.uint32)[None, :], threshold, drop_scale, drops,
        )  # fmt: skip
        total += ds
    there = (m[:, None] < s) & (n[None, :] < t)
    place = dmask + own_batch * dms[0] + own_head * dms[1] + m.to(tl.int64)[:, None] * dms[2] + n[None, :] * dms[3]
    tl.store(place, total.to(dmask.dtype.element_ty), mask=there)


class Tiles(NamedTuple):
    """Sizes of a kernel's tiles, and how it is compiled.

    Attributes:
        m, n: queries and keys of a tile.
        warps: of a program.
        stages: tiles of its loop in flight at once.
    """

    m: int
    n: int
    warps: int
    stages: int


def shared_bytes(kernel: str, tiles: Tiles, widths: tuple[int, int], element_bytes: int, mask_bytes: int) -> int:
    """An upper bound of the shared memory that Triton gives a kernel.

    Its own rows, the rows of every stage of its loop, the mask's tile likewise, one tile of scores and what it holds of
    every row.

    Args:
        kernel: "forward", "key_grads", "query_grads" or "mask_grad".
        tiles: its tiles.
        widths: of a row of queries or keys, and of values, padded.
        element_bytes, mask_bytes: of an element of them, and of the mask; 0 where there is none.
    """
    row = sum(widths) * element_bytes
    own, loop = {
        "forward": (tiles.m * widths[0] * element_bytes, tiles.n * row),
        "key_grads": (tiles.n * row, tiles.m * row),
        "query_grads": (tiles.m * row, tiles.n * row),
        "mask_grad": (0, (tiles.m + tiles.n) * row),
    }[kernel]
    if element_bytes == 4:  # split into parts in TF32, and turned, for products take either only one way round
        own, more = 2 * own, loop
    else:
        more = loop // 2
    scores = (tiles.m + 8) * (tiles.n + 8) * 4
    return own + more + tiles.stages * (loop + tiles.m * tiles.n * mask_bytes + 8 * tiles.m) + scores + 2048


LOOPS = {
    "forward": ((128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1)),
    "key_grads": ((64, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 4, 1), (16, 16, 4, 1)),
    "query_grads": ((128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 1), (16, 16, 4, 1)),
    "mask_grad": ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 1), (16, 16, 4, 1)),
}
"""Tiles by kernel, those to be preferred first: queries, keys, warps, stages."""
HOPPER_BYTES = 232448
DELTA_ROWS = 32


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on a device; Hopper's where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def choose_tiles(kernel: str, limit: int, widths: tuple[int, int], element_bytes: int, mask_bytes: int) -> Tiles:
    """The first tiles of a kernel that fit a device's shared memory; the last where none do."""
    found = [Tiles(*each) for each in LOOPS[kernel]]
    if element_bytes == 4:
        found = found[2:]
    fits = [each for each in found if shared_bytes(kernel, each, widths, element_bytes, mask_bytes) <= limit]
    return fits[0] if fits else found[-1]


def _precision(q: Tensor) -> str:
    """Of products in float32: of three in TF32 where a device has them."""
    has = q.device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability(q.device)[0] >= 8
    return "tf32x3" if q.dtype == torch.float32 and has else "ieee"


class _Given(NamedTuple):
    """What all kernels take the same of, as their last arguments: numbers, then compile-time constants."""

    masks: tuple[int, ...]
    whole: tuple[int, ...]
    starts: tuple[int, ...]
    numbers: tuple[float, ...]
    fixed: tuple[object, ...]
    limit: int
    sizes: tuple[tuple[int, int], int, int]

    def tiles(self, kernel: str) -> Tiles:
        """A kernel's."""
        return choose_tiles(kernel, self.limit, *self.sizes)


def _given(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: AttentionCall) -> _Given:
    (_, h, s, d), (g, t, e) = q.shape, v.shape[1:]
    widths = max(16, triton.next_power_of_2(d)), max(16, triton.next_power_of_2(e))
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
        d,
        e,
        *widths,
        _precision(q),
    )
    numbers = (h, g, s, t, call.scale, slot_key(call.slot))
    sizes = widths, q.element_size(), 0 if mask is None else mask.element_size()
    return _Given(masks, tuple(call.global_shape), tuple(call.starts), numbers, fixed, shared_limit(q.device), sizes)


def _cdiv(count: int, by: int) -> int:
    return -(-count // by)


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[object, ...],
    tiles: Tiles,
    read: tuple[Tensor, ...],
    written: tuple[Tensor, ...],
) -> None:
    launch(kernel, grid, (*args, tiles.m, tiles.n), read, written, tiles.warps, tiles.stages)


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
    tiles = given.tiles("forward")
    args = *tensors, out, lse, *strides, given.masks, given.whole, given.starts, *given.numbers, *given.fixed
    _launch(_forward, (_cdiv(s, tiles.m), b * h), args, tiles, tensors, (out, lse))
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
    args = g_out, out, delta, g_out.stride()[:3], out.stride()[:3], h, s, e, given.sizes[0][1], DELTA_ROWS
    launch(_delta, (_cdiv(s, DELTA_ROWS), b * h), args, (g_out, out), (delta,))
    tensors = g_out, q, k, v, _bytes(mask, q), lse if seed is None else seed, lse, delta
    strides = tuple(x.stride()[:3] for x in (g_out, q, k, v))
    rest = given.masks, given.whole, given.starts, *given.numbers, *given.fixed
    args, tiles = (*tensors, dk, dv, *strides, dk.stride()[:3], dv.stride()[:3], *rest), given.tiles("key_grads")
    _launch(_key_grads, (_cdiv(t, tiles.n), b * g), args, tiles, tensors, (dk, dv))
    args, tiles = (*tensors, dq, *strides, dq.stride()[:3], *rest), given.tiles("query_grads")
    _launch(_query_grads, (_cdiv(s, tiles.m), b * h), args, tiles, tensors, (dq,))
    if dmask is not None:
        here, tiles = dmask.narrow(-1, call.starts[3] if dmask.shape[-1] > t else 0, t), given.tiles("mask_grad")
        shared = (b // dmask.shape[0], h // dmask.shape[1])
        grid = (_cdiv(s, tiles.m) * _cdiv(t, tiles.n), dmask.shape[0] * dmask.shape[1])
        _launch(_mask_grad, grid, (*tensors, here, *strides, here.stride(), shared, *rest), tiles, tensors, (here,))
    return dq, dk, dv, dmask
