"""What the tiled kernels of attention have in common: arguments, and steps on one tile of the score matrix."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from paraplan.kernels.gpu.random import finish, keys_of_rows, stream_of

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


class Call(NamedTuple):
    """Numbers of a call, known when a kernel is launched.

    Attributes:
        h, g, s, t: heads, groups, queries and keys of this block.
        scale: factor on q kᵀ.
        key: of dropout's slot.
        heads, queries: of the global score matrix.
        b_start, h_start, m_start, n_start: where the block begins in it: batch row, head, query, key.
    """

    h: int
    g: int
    s: int
    t: int
    scale: float
    key: int
    heads: int
    queries: int
    b_start: int
    h_start: int
    m_start: int
    n_start: int


class Fixed(NamedTuple):
    """Constants a kernel is compiled for.

    Attributes:
        d, e, width, e_width: of a row of queries or keys, and of values; the same padded to powers of 2.
        threshold, drop_scale: of dropout: the least bits that are kept, as int32, and what is kept times this.
        has_mask, bool_mask, causal, drops: what there is.
        precision: of products in float32.
        m, n: queries and keys of a tile.
    """

    d: int
    e: int
    width: int
    e_width: int
    threshold: int
    drop_scale: float
    has_mask: bool
    bool_mask: bool
    causal: bool
    drops: bool
    precision: str
    m: int = 0
    n: int = 0


@triton.jit
def rows_of(x, row, count, width: tl.constexpr, d: tl.constexpr, checked: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads rows of a [count, d] matrix: [m, width], zeros outside.

    Args:
        x: the matrix: a pointer, its first row's offset, a row's stride (`matrix`).
        row: [m], numbers of the rows.
        count: rows of the matrix.
        width: d padded to a power of 2.
        d: columns of the matrix.
        checked: whether some of the rows may be at or beyond `count`.
    """
    column = tl.arange(0, width)
    place = x[0] + x[1] + row.to(tl.int64)[:, None] * x[2] + column[None, :]
    if checked:
        there = row[:, None] < count
        if d < width:
            there = there & (column[None, :] < d)
        found = tl.load(place, mask=there, other=0.0)
    elif d < width:
        found = tl.load(place, mask=(column[None, :] < d) & (row[:, None] >= 0), other=0.0)
    else:
        found = tl.load(place)
    return found


@triton.jit
def write_rows(x, row, count, value, width: tl.constexpr, d: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores rows of a [count, d] matrix; nothing outside.

    Args:
        x, row, count, width, d: as `rows_of` takes them.
        value: [m, width], cast to the matrix's dtype.
    """
    column = tl.arange(0, width)
    there = (row[:, None] < count) & (column[None, :] < d)
    place = x[0] + x[1] + row.to(tl.int64)[:, None] * x[2] + column[None, :]
    tl.store(place, value.to(x[0].dtype.element_ty), mask=there)


@triton.jit
def matrix(x, strides, batch, head):  # type: ignore[no-untyped-def]
    """A head's rows, as `rows_of` takes them.

    Args:
        x: pointer to a [b, heads, rows, d] tensor whose last stride is 1.
        strides: its strides of batch rows, heads and rows.
        batch, head: which of them.
    """
    return x, batch * strides[0] + head * strides[1], strides[2]


@triton.jit
def scores_of(products, mask, m, n, call, of: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of log2(e) · S, either way round; keys in the future are not left out yet (`attended`).

    Args:
        products: the tile of q kᵀ.
        mask: a pointer, this head's offset, strides of a query and of a key; not read where there is no mask.
        m, n: numbers of the tile's queries and keys in this block, as a column and a row or the other way round.
        call: a `Call`.
        of: a `Fixed`.
    """
    scores = products * (call.scale * LOG2E)
    if of.has_mask:
        place = mask[0] + mask[1] + m.to(tl.int64) * mask[2] + n.to(tl.int64) * mask[3]
        added = tl.load(place, mask=(m < call.s) & (n < call.t), other=0)
        if of.bool_mask:
            scores = tl.where(added != 0, scores, float("-inf"))
        else:
            scores += added.to(tl.float32) * LOG2E
    return scores


@triton.jit
def attended(scores, m, n, call, checked: tl.constexpr, ends: tl.constexpr, of: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores, -inf where nothing is attended to.

    Args:
        scores: a tile of them.
        m, n, call, of: as `scores_of` takes them.
        checked: whether the tile may be on the diagonal or beyond the end.
        ends: whether keys beyond the last are to be left out.
    """
    if checked and of.causal:
        scores = tl.where(n <= m + (call.m_start - call.n_start), scores, float("-inf"))
    if checked and ends:
        scores = tl.where(n < call.t, scores, float("-inf"))
    return scores


@triton.jit
def stream_of_call(seed, call, of: tl.constexpr):  # type: ignore[no-untyped-def]
    """Dropout's stream (`random.stream_of`); anything where nothing is dropped.

    Args:
        seed: pointer to an int64; not read where nothing is dropped.
        call: a `Call`.
        of: a `Fixed`.
    """
    if of.drops:
        found = stream_of(tl.load(seed), call.key)
    else:
        found = call.s
    return found


@triton.jit
def row_keys(stream, batch, head, m, call, of: tl.constexpr):  # type: ignore[no-untyped-def]
    """Dropout's two keys (uint32) of queries; anything where nothing is dropped.

    Args:
        stream: what `stream_of_call` gives.
        batch, head: numbers in this block of the scores, int64.
        m: numbers of the queries in it.
        call: a `Call`.
        of: a `Fixed`.
    """
    if of.drops:
        row = ((batch + call.b_start) * call.heads + head + call.h_start) * call.queries + call.m_start + m
        first, second = keys_of_rows(stream, row.to(tl.uint64))
    else:
        first, second = m, m
    return first, second


@triton.jit
def kept_of(first, second, n, call, of: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which scores of a tile dropout keeps.

    Args:
        first, second: the keys of its queries (`row_keys`), broadcast against n.
        n: numbers of its keys in this block of the scores.
        call: a `Call`.
        of: a `Fixed`.
    """
    threshold: tl.constexpr = of.threshold
    return finish(first, second, (n + call.n_start).to(tl.uint32)) >= threshold


@triton.jit
def log_sums_of(lse, place, m, s):  # type: ignore[no-untyped-def]
    """log2 of the sums of exp S; +inf, so that probabilities are zero, where there is nothing to sum.

    Args:
        lse: pointer to natural log-sums [b, h, s], row-major.
        place: offset of this head in them.
        m: numbers of the queries; +inf for those at or beyond s.
        s: queries of this block.
    """
    found = tl.load(lse + place + m, mask=m < s, other=float("inf"))
    return tl.where(found == float("-inf"), float("inf"), found * LOG2E)


@triton.jit
def tile_grad(scores, inner, log_sums, delta, first, second, n, call, of: tl.constexpr):  # type: ignore[no-untyped-def]
    """P, zero where dropped but not scaled, and the gradient of S, of a tile either way round.

    Args:
        scores: the tile of log2(e) · S.
        inner: the tile of g vᵀ.
        log_sums, delta: of its queries: `log_sums_of`, and δ = Σ g · out; broadcast against the tile.
        first, second, n, call, of: as `kept_of` takes them.
    """
    probs = tl.exp2(scores - log_sums)
    dropped = probs
    if of.drops:
        kept = kept_of(first, second, n, call, of)
        dropped = tl.where(kept, probs, 0.0)
        inner = tl.where(kept, inner * of.drop_scale, 0.0)
    return dropped, probs * (inner - delta)
