"""Bytes the attention kernels allocate and drop inside, from local shapes, moment by moment.

Those of `kernels/attention_kernels.py`: the math path takes a batch row at a time, and its functions below follow its
lines in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.model.graph import Arg
from paraplan.ir.model.strides import elementwise_strides, is_contiguous, view_strides
from paraplan.rules.workspace.workspace import Values, compute_size, dropout_bytes, size_of


def attention(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Flash: repeated keys and values of grouped heads, a float mask, then copies of lse and, where the kernel's result
    lies otherwise, of it; a test of the mask. Math path: one row's scores, twice with dropout, and its product with the
    values."""
    query, key, value = inputs[0], inputs[1], inputs[2]
    assert query is not None and key is not None and value is not None
    masked, causal, p = args[3] is not None, bool(args[7]), float(args[5])
    mask = inputs[3] if masked else None
    if _is_flash(query, key, value, causal, p, masked, args[9]):
        added = _flash_mask_bytes(mask, query, key, causal, args[9])
        test = 0 if mask is None else math.prod(mask.shape[:-1])
        test += 0 if mask is None or mask.dtype == "bool" else _mask_numel(mask, key)
        return max(_repeated(query, key, value) + added, _lse_bytes(query) + _turned_bytes(query), test)
    row = _Row(query, key, value)
    scored = row.casts(query, key) + row.scoring(mask, causal)
    dropped = row.scores if p else 0
    drops = row.scores + row.dropping(p)
    return max(scored, row.weighing, drops, row.scores + dropped + row.casts(value) + row.result)


def attention_grad(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """As `attention`, with the gradient of the scores before and after dropout beside the probabilities."""
    query, key, value = inputs[1], inputs[2], inputs[3]
    assert query is not None and key is not None and value is not None
    masked, causal, p = args[4] is not None, bool(args[10]), float(args[8])
    mask = inputs[4] if masked else None
    if not args[14] and _is_flash(query, key, value, causal, p, masked, args[12]):
        repeated = _repeated(query, key, value)
        folded = 2 * repeated - key.nbytes - value.nbytes if repeated else 0
        return folded + _flash_mask_bytes(mask, query, key, causal, args[12]) + (_lse_bytes(query) if masked else 0)
    grad, out, row = inputs[0], inputs[-2], _Row(query, key, value)
    assert grad is not None and out is not None
    grouped, scores, dropped = row.regrouped(grad), row.scores, (row.scores if p else 0)
    summed = row.summed(mask) if args[14] and mask is not None else 0
    worst = max(
        row.scoring(mask, causal),
        row.weighing,
        grouped + scores + row.dropping(p),
        grouped + scores + dropped + row.of_values,
        grouped + scores + row.casts(out) + row.result + row.statistics,
        grouped + row.statistics + 2 * scores + row.dropping(p),
        grouped + row.statistics + scores + summed,
        grouped + row.statistics + scores + max(row.of_queries, row.regrouped(query) + row.of_keys),
    )
    if args[14] and mask is not None and size_of(mask) < row.item:
        worst += math.prod(mask.shape) * row.item
    return row.casts(query, key, value, grad) + worst


class _Row(NamedTuple):
    """One batch row of the math path, in the dtype of sums."""

    query: LocalValue
    key: LocalValue
    value: LocalValue

    @property
    def item(self) -> int:
        return compute_size(self.query)

    @property
    def rows(self) -> int:
        """Heads x queries."""
        return self.query.shape[1] * self.query.shape[2]

    @property
    def scores(self) -> int:
        return self.rows * self.key.shape[2] * self.item

    @property
    def statistics(self) -> int:
        return self.rows * self.item

    @property
    def result(self) -> int:
        return self.rows * self.value.shape[3] * self.item

    @property
    def of_queries(self) -> int:
        return math.prod(self.query.shape[1:]) * self.item

    @property
    def of_keys(self) -> int:
        return math.prod(self.key.shape[1:]) * self.item

    @property
    def of_values(self) -> int:
        return math.prod(self.value.shape[1:]) * self.item

    @property
    def weighing(self) -> int:
        """Probabilities in the scores' place: which statistics are finite, told from their magnitudes."""
        return self.scores + self.statistics + 2 * self.rows

    def casts(self, *values: LocalValue) -> int:
        """A row of each in the dtype of sums, where it has another."""
        return sum(math.prod(x.shape[1:]) * self.item for x in values if size_of(x) < self.item)

    def regrouped(self, x: LocalValue) -> int:
        """A copy of a row [h, s, n] as [g, h / g · s, n], where its heads and queries do not merge."""
        groups = self.key.shape[1]
        into = (groups, x.shape[1] // groups * x.shape[2], x.shape[3])
        merged = view_strides(x.shape[1:], x.strides[1:], into) is not None
        return 0 if merged else math.prod(into) * self.item

    def scoring(self, mask: LocalValue | None, causal: bool) -> int:
        """Scores, with the regrouped queries, then a mask's opposite or cast, then the future."""
        beside = [self.regrouped(self.query), self.query.shape[2] * self.key.shape[2] if causal else 0]
        if mask is not None:
            pairs = self.rows * self.key.shape[2]
            beside.append(pairs if mask.dtype == "bool" else pairs * self.item if size_of(mask) < self.item else 0)
        return self.scores + max(beside)

    def dropping(self, p: float) -> int:
        """Beside what dropout is applied to."""
        return self.scores + dropout_bytes(self.rows, self.key.shape[2]) if p else 0

    def summed(self, mask: LocalValue) -> int:
        """A gradient of the scores, summed to a row of the mask of these keys."""
        whole = (*self.query.shape[1:3], self.key.shape[2])
        into = (*mask.shape[1:3], self.key.shape[2] if mask.shape[3] > 1 else 1)
        return 0 if into == whole else math.prod(into) * self.item


def attention_merge(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """The finite lse and one side's shares; what is not in the dtype of sums is cast to it; the result comes last."""
    out, lse, other = outputs[0], outputs[1], inputs[2]
    assert out is not None and lse is not None and other is not None
    wide = math.prod(out.shape) * size_of(lse)
    joined = 2 * lse.nbytes + (wide if other.dtype != lse.dtype else 0)
    return joined if out.dtype == lse.dtype else max(wide, joined + wide - out.nbytes)


def _is_whole(query: LocalValue, key: LocalValue, scores: Sequence[int]) -> bool:
    """Whether this is the whole score matrix, not a block of it."""
    return (query.shape[2], key.shape[2]) == tuple(scores[2:])


def _is_flash(
    query: LocalValue, key: LocalValue, value: LocalValue, causal: bool, p: float, masked: bool, scores: Sequence[int]
) -> bool:
    square = query.shape[2] == key.shape[2] or not _is_whole(query, key, scores)
    same = query.shape[-1] == value.shape[-1] and (not causal or (not masked and square))
    dense = all(x.strides[-1] == 1 for x in (query, key, value))
    return p == 0.0 and same and dense


def _repeated(query: LocalValue, key: LocalValue, value: LocalValue) -> int:
    """Keys and values repeated for every head of their group."""
    times = query.shape[1] // key.shape[1]
    return times * (key.nbytes + value.nbytes) if times > 1 else 0


def _mask_numel(mask: LocalValue, key: LocalValue) -> int:
    """Elements of a mask's columns for these keys."""
    return math.prod(mask.shape[:-1]) * min(mask.shape[-1], key.shape[2])


def _flash_mask_bytes(
    mask: LocalValue | None, query: LocalValue, key: LocalValue, causal: bool, scores: Sequence[int]
) -> int:
    """The float mask made for the flash kernel: from one of another dtype, or of the future of a block."""
    if causal and not _is_whole(query, key, scores):
        return query.shape[2] * key.shape[2] * size_of(query)
    return 0 if mask is None or mask.dtype == query.dtype else _mask_numel(mask, key) * size_of(query)


def _turned_bytes(query: LocalValue) -> int:
    """The flash kernel's result, which lies as the queries do, where it has to be copied to lie heads last."""
    lies = elementwise_strides(query.shape, [(query.shape, query.strides)])
    heads_last = [tuple(of[dim] for dim in (0, 2, 1, 3)) for of in (query.shape, lies)]
    return 0 if is_contiguous(*heads_last) else math.prod(query.shape) * size_of(query)


def _lse_bytes(query: LocalValue) -> int:
    return math.prod(query.shape[:3]) * compute_size(query)
