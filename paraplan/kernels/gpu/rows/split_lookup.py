"""Rows of tables that are split over ranks, or of many tables, in one Triton kernel; their gradients by torch's.

Ids of rows that other ranks hold, and of padding, become −1 for the gradient: what torch's kernel is told to leave out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraplan.kernels.gpu.triton_launch import launch, row_major

BLOCK = 1024
aten = torch.ops.aten


@triton.jit
def _rows(w, ids, out, width, rows, v_start, tables, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64)
    local = tl.load(ids + place) - v_start
    found = tl.where((local >= 0) & (local < rows), width, 0)
    source = place % tables * rows + local
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        value = tl.load(w + source * width + column, mask=column < found, other=0.0)
        tl.store(out + place * width + column, value, mask=column < width)


@triton.jit
def _local(ids, out, count, rows, v_start, tables, padding, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    given = tl.load(ids + place, mask=place < count, other=0).to(tl.int64)
    local = given - v_start
    inside = (local >= 0) & (local < rows) & (given != padding)
    tl.store(out + place, tl.where(inside, place % tables * rows + local, -1), mask=place < count)


def _looked_up(w: Tensor, ids: Tensor, v_start: int, tables: int) -> Tensor:
    w, ids = row_major(w), row_major(ids)
    rows, width = w.shape[-2:]
    out = w.new_empty((*ids.shape, width))
    block = min(triton.next_power_of_2(width), BLOCK)
    launch(_rows, (ids.numel(),), (w, ids, out, width, rows, v_start, tables, block), (w, ids), (out,))
    return out


def _summed(g: Tensor, ids: Tensor, rows: int, v_start: int, tables: int, padding: int) -> Tensor:
    g, ids = row_major(g), row_major(ids)
    local = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    args = ids, local, ids.numel(), rows, v_start, tables, padding, BLOCK
    launch(_local, (triton.cdiv(ids.numel(), BLOCK),), args, (ids,), (local,))
    return aten.embedding_dense_backward.default(g, local, tables * rows, -1, False)  # type: ignore[no-any-return]


def embedding(w: Tensor, ids: Tensor, v_start: int = 0, rows: int = -1) -> Tensor:
    """As `kernels.reference_kernels.embedding`; ids that are no rows at all give zeros, for to raise the host would
    wait."""
    return _looked_up(w, ids, v_start, 1)


def embedding_grad(g: Tensor, ids: Tensor, num_rows: int, padding_idx: int = -1, v_start: int = 0) -> Tensor:
    """As `kernels.reference_kernels.embedding_grad`."""
    return _summed(g, ids, num_rows, v_start, 1, padding_idx)


def embedding_tables(w: Tensor, ids: Tensor, v_start: int = 0, rows: int = -1) -> Tensor:
    """As `kernels.expert_kernels.embedding_tables`; ids that are no rows at all give zeros."""
    return _looked_up(w, ids, v_start, w.shape[0])


def embedding_tables_grad(g: Tensor, ids: Tensor, num_rows: int, v_start: int = 0) -> Tensor:
    """As `kernels.expert_kernels.embedding_tables_grad`."""
    tables = ids.shape[-1]
    return _summed(g, ids, num_rows, v_start, tables, -1).view(tables, num_rows, g.shape[-1])
