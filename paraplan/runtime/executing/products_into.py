"""Products that write into what is there: pieces of a product, and gradients of weights that are added up.

In pieces (`rules.expansions.overlap`) one piece's rows are a part of every rank's rows.

Along `dim` rows lie as [n ranks, count pieces, length]; a piece on its own lies stacked, the n ranks' parts one after
another along dim 0, as collectives take and give them. Every part is a matrix product of its own that reads and writes
in place, so nothing is copied and no workspace is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def linear_grad_weight_(total: Tensor, g: Tensor, x: Tensor, transposed: bool) -> None:
    """total += the gradient of `linear` in its weight; of halves in float32 too where torch has that (CUDA).

    Args:
        total: that is added to: [n, k], or [k, n] where `transposed`.
        g: gradient of the product: [..., n].
        x: what was multiplied: [..., k].
        transposed: whether the weight is [k, n].
    """
    g, x = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    left, right = (x.t(), g) if transposed else (g.t(), x)
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)


def linear_into_(  # noqa: PLR0913
    whole: Tensor,
    piece: Tensor,
    w: Tensor,
    bias: Tensor | None,
    transposed: bool,
    n: int,
    count: int,
    index: int,
    dim: int,
) -> None:
    """The rows of `whole` [..., n * count * length, ..., out] that a gathered piece is of: piece * w (+ bias).

    Args:
        whole: that is written.
        piece: gathered rows, stacked.
        w, bias, transposed: as of `linear`.
        n: ranks.
        count: pieces a rank's rows are in.
        index: of this piece.
        dim: that is gathered.
    """
    for rows, out in zip(_stacked(piece, n, dim), _lying(whole, n, count, index, dim), strict=True):
        _product(rows, w, bias, transposed, out)


def linear_rows(
    x: Tensor, w: Tensor, bias: Tensor | None, transposed: bool, n: int, count: int, index: int, dim: int
) -> Tensor:
    """The product of one piece of x's rows [..., n * count * length, ..., k], stacked.

    Args:
        x: all rows.
        w, bias, transposed, n, count, index, dim: as of `linear_into_`.
    """
    length = x.shape[dim] // (n * count)
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 : -1], w.shape[1 if transposed else 0])
    made = x.new_empty((n * shape[0], *shape[1:]))
    for rows, out in zip(_lying(x, n, count, index, dim), _stacked(made, n, dim), strict=True):
        _product(rows, w, bias, transposed, out)
    return made


def _product(rows: Tensor, w: Tensor, bias: Tensor | None, transposed: bool, out: Tensor) -> None:
    """out = rows * w (+ bias); one dim after another where rows are strided, so that nothing has to be copied."""
    if rows.dim() > 2 and not (rows.is_contiguous() and out.is_contiguous()):
        for each, into in zip(rows.unbind(1), out.unbind(1), strict=True):
            _product(each, w, bias, transposed, into)
        return
    right = w if transposed else w.t()
    matrix, made = (rows, out) if rows.dim() == 2 else (rows.view(-1, rows.shape[-1]), out.view(-1, out.shape[-1]))
    if bias is None:
        torch.mm(matrix, right, out=made)
    else:
        torch.addmm(bias, matrix, right, out=made)


def _stacked(piece: Tensor, n: int, dim: int) -> Iterator[Tensor]:
    """Rows [length, ..., columns] of a stacked piece, rank by rank and in the order of the dims before `dim`."""
    for part in piece.chunk(n):
        yield from _behind(part, dim)


def _lying(whole: Tensor, n: int, count: int, index: int, dim: int) -> Iterator[Tensor]:
    """The same where they lie in all rows."""
    length = whole.shape[dim] // (n * count)
    for rank in range(n):
        yield from _behind(whole.narrow(dim, (rank * count + index) * length, length), dim)


def _behind(x: Tensor, dim: int) -> Iterator[Tensor]:
    """x without the dims before `dim`, one after another."""
    if dim == 0:
        yield x
        return
    for each in x.unbind(0):
        yield from _behind(each, dim - 1)
