"""Bytes the kernels of experts, tables and indexing allocate and drop inside, from local shapes (see `workspace`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.machine.kernel_choice import grouped_rows
from paraplan.ir.model.graph import Arg
from paraplan.ir.model.strides import is_contiguous
from paraplan.ir.model.tensor import DTYPE_BYTES

Values = Sequence[LocalValue | None]
BLOCK_ROWS = 2048


def _item(value: LocalValue | None) -> int:
    assert value is not None
    return DTYPE_BYTES[value.dtype]


def _copied(value: LocalValue | None) -> int:
    return 0 if value is None or is_contiguous(value.shape, value.strides) else value.nbytes


def index(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Row-major copies of strided inputs."""
    return sum(map(_copied, inputs))


def _mixture(
    x: LocalValue | None, ids: LocalValue | None, weights: LocalValue | None, w_in: LocalValue | None, widths: int
) -> int:
    """Buffers of one block, `widths` columns wide, made first; then sorting, or the order and a block's rows."""
    assert x is not None and ids is not None and weights is not None and w_in is not None
    chosen, rows = math.prod(ids.shape), min(x.shape[0], BLOCK_ROWS)
    sorting = 24 * chosen + 8 * w_in.shape[0]
    block = 8 * chosen + rows * (16 + 2 * _item(weights))
    return rows * widths * _item(x) + max(sorting, block) + _copied(ids)


def experts(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Tokens, hidden values and results of one block."""
    x, ids, weights, w_in, w_out = inputs
    assert w_in is not None and w_out is not None
    return _mixture(x, ids, weights, w_in, w_in.shape[3] + w_in.shape[1] * w_in.shape[2] + w_out.shape[1])


def experts_grad(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Those of the forward pass, and three buffers of hidden values."""
    _, x, ids, weights, w_in, w_out = inputs
    assert w_in is not None and w_out is not None
    width = w_in.shape[2]
    return _mixture(x, ids, weights, w_in, w_in.shape[3] + (w_in.shape[1] + 3) * width + w_out.shape[1])


def pieces(ids: LocalValue, held: int, total: int) -> int:
    """Pieces in which rows are multiplied by grouped products.

    Args:
        ids: of the experts that rows go to.
        held: experts of the rank.
        total: experts of all ranks.
    """
    chosen = math.prod(ids.shape)
    return -(-chosen // grouped_rows(chosen, held, total))


def grouped_experts(inputs: Values, total: int) -> int:
    """By grouped products: copies of strided inputs; sorting, or a piece's tokens or results beside hidden values."""
    x, ids, _, w_in, w_out = inputs
    assert x is not None and ids is not None and w_in is not None and w_out is not None
    inner, row = w_in.shape[1] * w_in.shape[2], max(x.shape[1], w_out.shape[1])
    return _grouped(inputs, ids, w_in, total, lambda rows: rows * (inner + row) * _item(x))


def grouped_experts_grad(inputs: Values, total: int, train: bool) -> int:
    """Likewise with tokens, gradients, hidden values and theirs. Of stacks' gradients those of pieces after the first;
    in the first piece the inner stack's, a result, is not there yet when most else is.

    Args:
        inputs: local tensors of the op.
        total: experts of all ranks.
        train: whether gradients of the stacks are made.
    """
    _, x, ids, _, w_in, w_out = inputs
    assert x is not None and ids is not None and w_in is not None and w_out is not None
    hidden, width, inner, n = x.shape[1], w_in.shape[2], w_in.shape[1] * w_in.shape[2], w_out.shape[1]
    again = train and pieces(ids, w_in.shape[0], total) > 1

    def of_a_piece(rows: int) -> int:
        stacks = w_out.nbytes if again else -w_in.nbytes * train
        return max(
            rows * (hidden + n + inner + width) * _item(x) + stacks,
            rows * (hidden + inner) * _item(x) + again * w_in.nbytes,
        )

    return _grouped(inputs, ids, w_in, total, of_a_piece)


def _grouped(inputs: Values, ids: LocalValue, w_in: LocalValue, total: int, of_a_piece: Callable[[int], int]) -> int:
    chosen, held = math.prod(ids.shape), w_in.shape[0]
    kept = 12 * chosen + 8 + 4 * held * pieces(ids, held, total)
    sorting = 32 * chosen  # sorted numbers, and inside of torch's sort of many both sides of a radix sort
    return sum(map(_copied, inputs)) + kept + max(sorting, of_a_piece(grouped_rows(chosen, held, total)))


def route_plan(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Who goes where (a byte per token and rank, and for nobody), the first experts, and sorting; or ids as ranks."""
    ids, n = inputs[0], int(args[1])
    assert ids is not None
    count, chosen = ids.shape[0], math.prod(ids.shape)
    return (n + 2) * count + 8 * (n + 1) + max(8 * chosen + _copied(ids), 9 * n * count)


def route_here(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """The tests of every choice, then one per token and their sorting."""
    ids = inputs[0]
    assert ids is not None
    return max(3 * math.prod(ids.shape), 10 * ids.shape[0])


def embedding_tables(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Row numbers and the tests for lying outside."""
    return math.prod(inputs[1].shape) * 11 + _copied(inputs[0])  # type: ignore[union-attr]


def embedding_tables_grad(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """The same, and the gradient with foreign rows cleared."""
    grad, ids = inputs[0], inputs[1]
    assert grad is not None and ids is not None
    return math.prod(ids.shape) * 9 + grad.nbytes
