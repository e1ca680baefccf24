"""The Triton kernels of tiled attention; `tiled` says what they compute and launches them.

Each has a program for a tile of queries or keys of one head, and goes over the other in two loops: tiles that may be
on the diagonal or beyond the end, and those that are whole and need no check.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paraplan.kernels.gpu.attention.tile_parts import (
    LOG2E,
    attended,
    kept_of,
    log_sums_of,
    matrix,
    row_keys,
    rows_of,
    scores_of,
    stream_of_call,
    tile_grad,
    write_rows,
)


@triton.jit
def _batch_and_head(heads):  # type: ignore[no-untyped-def]
    return tl.program_id(1).to(tl.int64) // heads, tl.program_id(1).to(tl.int64) % heads


@triton.jit
def _tile_of_queries(causal: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of this program: those with the most keys first."""
    tile = tl.program_id(0)
    if causal:
        tile = tl.num_programs(0) - 1 - tile
    return tile


@triton.jit
def _keys_of_tile(tile, call, of: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the keys of a tile of queries end, and until where no tile of them needs a check."""
    stop, unchecked = call.t, call.t // of.n * of.n
    if of.causal:
        ahead = call.m_start - call.n_start
        stop = tl.minimum(call.t, tl.maximum((tile + 1) * of.m + ahead, 0))
        unchecked = tl.minimum(unchecked, tl.maximum(tile * of.m + ahead + 1, 0) // of.n * of.n)
    return stop, unchecked


@triton.jit
def _queries_of_tile(tile, call, of: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the queries of a tile of keys begin, and from where on no tile of them needs a check."""
    begin, unchecked = tile * 0, tile * 0
    if of.causal:
        ahead = call.m_start - call.n_start
        begin = tl.maximum(tile * of.n - ahead, 0) // of.m * of.m
        unchecked = tl.maximum((tile + 1) * of.n - 1 - ahead, 0)
        unchecked = tl.minimum((unchecked + of.m - 1) // of.m * of.m, call.s)
    return begin, unchecked


@triton.jit
def _forward_tile(
    start, queries, k, v, mask, m, first, second, top, total, acc, call, checked: tl.constexpr, of: tl.constexpr
):  # type: ignore[no-untyped-def]
    """Running maximum, sum and result with one more tile of keys."""
    tile_n: tl.constexpr = of.n
    n = start + tl.arange(0, tile_n)
    keys = rows_of(k, n, call.t, of.width, of.d, checked)
    products = tl.dot(queries, tl.trans(keys), input_precision=of.precision)
    scores = scores_of(products, mask, m[:, None], n[None, :], call, of)
    scores = attended(scores, m[:, None], n[None, :], call, checked, True, of)
    new = tl.maximum(top, tl.max(scores, 1))
    safe = new
    if of.has_mask or (checked and of.causal):
        safe = tl.where(new == float("-inf"), 0.0, new)
    probs = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(probs, 1)
    if of.drops:
        probs = tl.where(kept_of(first[:, None], second[:, None], n[None, :], call, of), probs, 0.0)
    values = rows_of(v, n, call.t, of.e_width, of.e, checked)
    acc = tl.dot(probs.to(values.dtype), values, acc * shrink[:, None], input_precision=of.precision)
    return new, total, acc


@triton.jit
def _forward(q, k, v, mask, seed, out, lse, qs, ks, vs, os, masks, call, of: tl.constexpr):  # type: ignore[no-untyped-def]
    tile_m: tl.constexpr = of.m
    e_width: tl.constexpr = of.e_width
    tile = _tile_of_queries(of.causal)
    m = tile * tile_m + tl.arange(0, tile_m)
    batch, head = _batch_and_head(call.h)
    group = head // (call.h // call.g)
    first, second = row_keys(stream_of_call(seed, call, of), batch, head, m, call, of)
    queries = rows_of(matrix(q, qs, batch, head), m, call.s, of.width, of.d, True)
    keys, values = matrix(k, ks, batch, group), matrix(v, vs, batch, group)
    added = (mask, batch * masks[0] + head * masks[1], masks[2], masks[3])
    top = tl.full((tile_m,), float("-inf"), tl.float32)
    total = tl.zeros((tile_m,), tl.float32)
    acc = tl.zeros((tile_m, e_width), tl.float32)
    stop, unchecked = _keys_of_tile(tile, call, of)
    for start in range(0, unchecked, of.n):
        top, total, acc = _forward_tile(
            start, queries, keys, values, added, m, first, second, top, total, acc, call, False, of
        )
    for start in range(unchecked, stop, of.n):
        top, total, acc = _forward_tile(
            start, queries, keys, values, added, m, first, second, top, total, acc, call, True, of
        )
    some = total > 0
    acc = tl.where(some[:, None], acc * (of.drop_scale / tl.where(some, total, 1.0))[:, None], 0.0)
    found = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) / LOG2E, float("-inf"))
    write_rows(matrix(out, os, batch, head), m, call.s, acc, e_width, of.e)
    tl.store(lse + (batch * call.h + head) * call.s + m, found, mask=m < call.s)


@triton.jit
def _delta(g_out, out, seed, delta, gs, os, call, of: tl.constexpr):  # type: ignore[no-untyped-def]
    """δ of a tile of queries; where there is dropout, after all of δ also the keys of the queries, bit by bit, which
    every thread of `_key_grads` would make again for a quarter of a tile."""
    tile_m: tl.constexpr = of.m
    m = tl.program_id(0) * tile_m + tl.arange(0, tile_m)
    batch, head = _batch_and_head(call.h)
    grad = rows_of(matrix(g_out, gs, batch, head), m, call.s, of.e_width, of.e, True).to(tl.float32)
    made = rows_of(matrix(out, os, batch, head), m, call.s, of.e_width, of.e, True).to(tl.float32)
    place = delta + (batch * call.h + head) * call.s + m
    tl.store(place, tl.sum(grad * made, 1), mask=m < call.s)
    if of.drops:
        first, second = row_keys(stream_of_call(seed, call, of), batch, head, m, call, of)
        whole = tl.num_programs(1).to(tl.int64) * call.s
        tl.store(place + whole, first.to(tl.float32, bitcast=True), mask=m < call.s)
        tl.store(place + 2 * whole, second.to(tl.float32, bitcast=True), mask=m < call.s)


@triton.jit
def _key_tile(
    start,
    keys,
    values,
    q,
    g_out,
    mask,
    lse,
    delta,
    place,
    whole,
    n,
    to_keys,
    to_values,
    call,
    checked: tl.constexpr,
    of: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """Gradients of a tile of keys and values with one more tile of queries, keys down, queries across."""
    tile_m: tl.constexpr = of.m
    m = start + tl.arange(0, tile_m)
    queries = rows_of(q, m, call.s, of.width, of.d, True)
    grad = rows_of(g_out, m, call.s, of.e_width, of.e, True)
    first, second = m, m
    if of.drops:
        first = tl.load(delta + whole + place + m, mask=m < call.s, other=0.0).to(tl.uint32, bitcast=True)
        second = tl.load(delta + 2 * whole + place + m, mask=m < call.s, other=0.0).to(tl.uint32, bitcast=True)
    products = tl.dot(keys, tl.trans(queries), input_precision=of.precision)
    scores = scores_of(products, mask, m[None, :], n[:, None], call, of)
    scores = attended(scores, m[None, :], n[:, None], call, checked, False, of)
    inner = tl.dot(values, tl.trans(grad), input_precision=of.precision)
    given = tl.load(delta + place + m, mask=m < call.s, other=0.0)
    sums = log_sums_of(lse, place, m, call.s)
    dropped, ds = tile_grad(
        scores, inner, sums[None, :], given[None, :], first[None, :], second[None, :], n[:, None], call, of
    )
    to_values = tl.dot(dropped.to(grad.dtype), grad, to_values, input_precision=of.precision)
    to_keys = tl.dot(ds.to(queries.dtype), queries, to_keys, input_precision=of.precision)
    return to_keys, to_values


@triton.jit
def _key_grads(g_out, q, k, v, mask, seed, lse, delta, dk, dv, gs, qs, ks, vs, dks, dvs, masks, call, of: tl.constexpr):  # type: ignore[no-untyped-def]
    tile_n: tl.constexpr = of.n
    width: tl.constexpr = of.width
    e_width: tl.constexpr = of.e_width
    n = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
    batch, group = _batch_and_head(call.g)
    keys = rows_of(matrix(k, ks, batch, group), n, call.t, width, of.d, True)
    values = rows_of(matrix(v, vs, batch, group), n, call.t, e_width, of.e, True)
    to_keys = tl.zeros((tile_n, width), tl.float32)
    to_values = tl.zeros((tile_n, e_width), tl.float32)
    whole = (tl.num_programs(1) // call.g * call.h).to(tl.int64) * call.s
    begin, unchecked = _queries_of_tile(tl.program_id(0), call, of)
    for member in range(0, call.h // call.g):
        head = group * (call.h // call.g) + member
        queries, grads = matrix(q, qs, batch, head), matrix(g_out, gs, batch, head)
        added = (mask, batch * masks[0] + head * masks[1], masks[2], masks[3])
        place = (batch * call.h + head) * call.s
        for start in range(begin, unchecked, of.m):
            to_keys, to_values = _key_tile(
                start,
                keys,
                values,
                queries,
                grads,
                added,
                lse,
                delta,
                place,
                whole,
                n,
                to_keys,
                to_values,
                call,
                True,
                of,
            )
        for start in range(unchecked, call.s, of.m):
            to_keys, to_values = _key_tile(
                start,
                keys,
                values,
                queries,
                grads,
                added,
                lse,
                delta,
                place,
                whole,
                n,
                to_keys,
                to_values,
                call,
                False,
                of,
            )
    write_rows(matrix(dk, dks, batch, group), n, call.t, to_keys * call.scale, width, of.d)
    write_rows(matrix(dv, dvs, batch, group), n, call.t, to_values * of.drop_scale, e_width, of.e)


@triton.jit
def _query_tile(
    start, queries, grad, sums, given, k, v, mask, first, second, m, acc, call, checked: tl.constexpr, of: tl.constexpr
):  # type: ignore[no-untyped-def]
    """The gradient of a tile of queries with one more tile of keys."""
    tile_n: tl.constexpr = of.n
    n = start + tl.arange(0, tile_n)
    keys = rows_of(k, n, call.t, of.width, of.d, checked)
    values = rows_of(v, n, call.t, of.e_width, of.e, checked)
    products = tl.dot(queries, tl.trans(keys), input_precision=of.precision)
    scores = scores_of(products, mask, m[:, None], n[None, :], call, of)
    scores = attended(scores, m[:, None], n[None, :], call, checked, True, of)
    inner = tl.dot(grad, tl.trans(values), input_precision=of.precision)
    _, ds = tile_grad(
        scores, inner, sums[:, None], given[:, None], first[:, None], second[:, None], n[None, :], call, of
    )
    return tl.dot(ds.to(keys.dtype), keys, acc, input_precision=of.precision)


@triton.jit
def _query_grads(g_out, q, k, v, mask, seed, lse, delta, dq, gs, qs, ks, vs, dqs, masks, call, of: tl.constexpr):  # type: ignore[no-untyped-def]
    tile_m: tl.constexpr = of.m
    width: tl.constexpr = of.width
    tile = _tile_of_queries(of.causal)
    m = tile * tile_m + tl.arange(0, tile_m)
    batch, head = _batch_and_head(call.h)
    group = head // (call.h // call.g)
    first, second = row_keys(stream_of_call(seed, call, of), batch, head, m, call, of)
    queries = rows_of(matrix(q, qs, batch, head), m, call.s, width, of.d, True)
    grad = rows_of(matrix(g_out, gs, batch, head), m, call.s, of.e_width, of.e, True)
    place = (batch * call.h + head) * call.s
    sums = log_sums_of(lse, place, m, call.s)
    given = tl.load(delta + place + m, mask=m < call.s, other=0.0)
    acc = tl.zeros((tile_m, width), tl.float32)
    keys, values = matrix(k, ks, batch, group), matrix(v, vs, batch, group)
    added = (mask, batch * masks[0] + head * masks[1], masks[2], masks[3])
    stop, unchecked = _keys_of_tile(tile, call, of)
    for start in range(0, unchecked, of.n):
        acc = _query_tile(
            start, queries, grad, sums, given, keys, values, added, first, second, m, acc, call, False, of
        )
    for start in range(unchecked, stop, of.n):
        acc = _query_tile(start, queries, grad, sums, given, keys, values, added, first, second, m, acc, call, True, of)
    write_rows(matrix(dq, dqs, batch, head), m, call.s, acc * call.scale, width, of.d)


@triton.jit
def _mask_grad(
    g_out, q, k, v, mask, seed, lse, delta, dmask, gs, qs, ks, vs, dms, shared, masks, call, of: tl.constexpr
):  # type: ignore[no-untyped-def]
    """A tile of the mask's gradient: dS summed over the batch rows and heads (`shared`) that a row and a head of the
    mask stand for."""
    tile_m: tl.constexpr = of.m
    tile_n: tl.constexpr = of.n
    columns = (call.t + tile_n - 1) // tile_n
    m = tl.program_id(0) // columns * tile_m + tl.arange(0, tile_m)
    n = tl.program_id(0) % columns * tile_n + tl.arange(0, tile_n)
    own_batch, own_head = _batch_and_head(call.h // shared[1])
    stream = stream_of_call(seed, call, of)
    total = tl.zeros((tile_m, tile_n), tl.float32)
    for member in range(0, shared[0] * shared[1]):
        batch = own_batch + member // shared[1]
        head = own_head + member % shared[1]
        group = head // (call.h // call.g)
        first, second = row_keys(stream, batch, head, m, call, of)
        queries = rows_of(matrix(q, qs, batch, head), m, call.s, of.width, of.d, True)
        grad = rows_of(matrix(g_out, gs, batch, head), m, call.s, of.e_width, of.e, True)
        keys = rows_of(matrix(k, ks, batch, group), n, call.t, of.width, of.d, True)
        values = rows_of(matrix(v, vs, batch, group), n, call.t, of.e_width, of.e, True)
        products = tl.dot(queries, tl.trans(keys), input_precision=of.precision)
        added = (mask, batch * masks[0] + head * masks[1], masks[2], masks[3])
        scores = scores_of(products, added, m[:, None], n[None, :], call, of)
        scores = attended(scores, m[:, None], n[None, :], call, True, False, of)
        inner = tl.dot(grad, tl.trans(values), input_precision=of.precision)
        place = (batch * call.h + head) * call.s
        given = tl.load(delta + place + m, mask=m < call.s, other=0.0)
        sums = log_sums_of(lse, place, m, call.s)
        _, ds = tile_grad(
            scores, inner, sums[:, None], given[:, None], first[:, None], second[:, None], n[None, :], call, of
        )
        total += ds
    there = (m[:, None] < call.s) & (n[None, :] < call.t)
    place = dmask + own_batch * dms[0] + own_head * dms[1] + m.to(tl.int64)[:, None] * dms[2] + n[None, :] * dms[3]
    tl.store(place, total.to(dmask.dtype.element_ty), mask=there)
