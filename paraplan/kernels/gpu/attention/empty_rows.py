"""Log-sums of queries that attend to nothing, which torch's memory-efficient kernel gives as 0: one Triton kernel.

Of a row whose scores are all -inf that kernel makes an output of zeros, as the reference does, and lse = 0, which is
also that of a single key whose score is 0. So of the rows with lse = 0, and of no others, the mask is read until a key
is found. It is found as the kernel sees it, which multiplies scores by log2(e) in float32: biases below -2.36e38, such
as the least number of bfloat16 and float32, are -inf to it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paraplan.kernels.gpu.triton_launch import launch

ROWS, COLUMNS = 16, 128


@triton.jit
def _clear(  # type: ignore[no-untyped-def]
    lse,
    bias,
    out,
    bias_b,
    bias_h,
    bias_m,
    h,
    s,
    t,
    padded,
    causal: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    m = tl.program_id(0) * rows + tl.arange(0, rows)
    pair = tl.program_id(1).to(tl.int64)
    base = pair // h * bias_b + pair % h * bias_h
    found = tl.load(lse + pair * padded + m, mask=m < s, other=1.0)
    empty = found == 0.0
    left = tl.sum(empty.to(tl.int32), 0)
    start = 0
    while (start < t) & (left > 0):
        n = start + tl.arange(0, columns)
        there = empty[:, None] & (n[None, :] < t)
        if causal:
            there = there & (n[None, :] <= m[:, None])
        at = bias + base + m.to(tl.int64)[:, None] * bias_m + n[None, :]
        score = tl.load(at, mask=there, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        empty = empty & (tl.max(score, 1) == float("-inf"))
        left = tl.sum(empty.to(tl.int32), 0)
        start += columns
    tl.store(out + pair * s + m, tl.where(empty, float("-inf"), found), mask=m < s)


def clear_empty_rows(lse: Tensor, bias: Tensor, causal: bool) -> Tensor:
    """The log-sums [b, h, s] without padding, -inf where a row attends to nothing; in place where none is padded.

    Args:
        lse: [b, h, at least s], contiguous, as torch's kernel gives it.
        bias: [b, h, s, t], as it was added to the scores; rows without gaps.
        causal: whether query i attended to keys 0..i alone.
    """
    b, h, s, t = bias.shape
    out = lse if lse.shape[2] == s else lse.new_empty((b, h, s))
    args = lse, bias, out, *bias.stride()[:3], h, s, t, lse.shape[2], causal, ROWS, COLUMNS
    launch(_clear, (triton.cdiv(s, ROWS), b * h), args, (lse, bias), (out,))
    return out
