"""Bytes the canonical ops' kernels allocate and drop inside, from local shapes.

Each formula counts the temporaries alive at the kernel's worst moment (`ir/trace/*kernels.py`), as tensors torch's
dispatcher makes; what a C++ kernel allocates and drops by itself is not counted, in prediction and in measurement
alike. Tests hold every formula between the measured workspace and a few percent above it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paraplan.ir.graph import Arg
from paraplan.ir.rank_program import LocalValue
from paraplan.ir.strides import elementwise_strides, is_contiguous, view_strides
from paraplan.ir.tensor import DTYPE_BYTES

Values = Sequence[LocalValue | None]
DROPOUT_CHUNK = 1 << 16
CE_CHUNK = 1 << 20


def _size(value: LocalValue | None) -> int:
    return DTYPE_BYTES[value.dtype] if value is not None else 0


def _compute(value: LocalValue | None) -> int:
    """Item size of the dtype sums are kept in: float32 at least."""
    return max(_size(value), 4)


def _copied(value: LocalValue | None) -> int:
    """Bytes of flattening a value to rows: none where its leading dims merge, whatever its strides."""
    if value is None or not value.shape:
        return 0
    rows = (math.prod(value.shape[:-1]), value.shape[-1])
    return 0 if view_strides(value.shape, value.strides, rows) is not None else value.nbytes


def _dropout_bytes(rows: int, columns: int) -> int:
    """Row keys (int64 hashing, then two int32); then one chunk of int32 hashes and folds."""
    width = min(columns, DROPOUT_CHUNK)
    chunk = min(rows, max(1, DROPOUT_CHUNK // max(width, 1))) * width
    return max(40 * rows, 8 * rows + 4 * width + 8 * chunk) + 64


def dropout(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Keys, hashes, and a flat copy of a strided input."""
    x = inputs[0]
    assert x is not None
    columns = x.shape[-1] if x.shape else 1
    return _dropout_bytes(math.prod(x.shape[:-1]), columns) + _copied(x)


def uniform(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Keys and hashes."""
    x = inputs[0]
    assert x is not None
    return _dropout_bytes(math.prod(x.shape[:-1]), x.shape[-1] if x.shape else 1)


def linear(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """A strided input is multiplied batch by batch, and the bias added afterwards."""
    x, out = inputs[0], outputs[0]
    assert x is not None and out is not None
    return out.nbytes if len(inputs) == 3 and not is_contiguous(x.shape, x.strides) else 0


def linear_grad_weight(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Flat copies of strided inputs."""
    return sum(map(_copied, inputs))


def embedding(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Shifted ids and the tests for lying outside."""
    count = math.prod(inputs[1].shape)  # type: ignore[union-attr]
    shifted = args[2] not in (0, "#")
    return count * (3 + (8 if shifted else 0) + (8 if shifted else 0))


def embedding_grad(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """The same tests; over a split vocabulary also the masked ids and gradient."""
    grad, ids = inputs[0], inputs[1]
    assert grad is not None and ids is not None
    count = math.prod(ids.shape)
    split = args[4] not in (0, "#") or int(args[3]) >= 0
    return count * 5 + (grad.nbytes + 16 * count if split else 0)


def attention(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Flash: repeated keys and values of grouped heads, a float mask, then copies of lse and, where the kernel's result
    lies otherwise, of it; a test of the mask. Math path: one row's scores, twice with dropout, and its product with the
    values."""
    query, key, value = inputs[0], inputs[1], inputs[2]
    assert query is not None and key is not None and value is not None
    masked, causal, p = args[3] is not None, bool(args[7]), float(args[5])
    if _is_flash(query, key, value, causal, p, masked, args[9]):
        mask = inputs[3] if masked else None
        added = _flash_mask_bytes(mask, query, key, causal, args[9])
        test = 0 if mask is None else math.prod(mask.shape[:-1])
        test += 0 if mask is None or mask.dtype == "bool" else _mask_numel(mask, key)
        return max(_repeated(query, key, value) + added, _lse_bytes(query) + _turned_bytes(query), test)
    scores, block = _score_bytes(query, key), _row_bytes(query)
    first = scores + _scores_extra(inputs[3] if masked else None, query, key, causal) + _casts(query, key, value)
    if p == 0.0:
        return max(first, scores + 2 * block + _casts(query, key, value))
    heads_rows = query.shape[1] * query.shape[2]
    product = 2 * block + _casts(value)
    return max(first, 2 * scores + max(_dropout_bytes(heads_rows, key.shape[2]), product))


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
    scores, item = _score_bytes(query, key), _compute(query)
    heads_rows = query.shape[1] * query.shape[2]
    total = _casts(query, key, value) + heads_rows * item
    if args[14] and mask is not None and _size(mask) < item:
        total += math.prod(mask.shape) * item
    if _size(query) < item:
        total += _row_bytes(query)
    grad = inputs[0]
    if query.shape[1] != key.shape[1] and grad is not None and not is_contiguous(grad.shape[1:], grad.strides[1:]):
        total += _row_bytes(query)
    extra = _scores_extra(mask, query, key, causal)
    if p == 0.0:
        return total + 2 * scores + max(extra - scores, 3 * _row_bytes(query))
    return total + 3 * scores + max(_dropout_bytes(heads_rows, key.shape[2]), 0)


def attention_merge(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """The finite lse and one side's shares; what is not in the dtype of sums is cast to it; the result comes last."""
    out, lse, other = outputs[0], outputs[1], inputs[2]
    assert out is not None and lse is not None and other is not None
    wide = math.prod(out.shape) * _size(lse)
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
        return query.shape[2] * key.shape[2] * _size(query)
    return 0 if mask is None or mask.dtype == query.dtype else _mask_numel(mask, key) * _size(query)


def _turned_bytes(query: LocalValue) -> int:
    """The flash kernel's result, which lies as the queries do, where it has to be copied to lie heads last."""
    lies = elementwise_strides(query.shape, [(query.shape, query.strides)])
    heads_last = [tuple(of[dim] for dim in (0, 2, 1, 3)) for of in (query.shape, lies)]
    return 0 if is_contiguous(*heads_last) else math.prod(query.shape) * _size(query)


def _lse_bytes(query: LocalValue) -> int:
    return math.prod(query.shape[:3]) * _compute(query)


def _score_bytes(query: LocalValue, key: LocalValue) -> int:
    """One batch row of scores [h, s, t] in the compute dtype."""
    return query.shape[1] * query.shape[2] * key.shape[2] * _compute(query)


def _row_bytes(query: LocalValue) -> int:
    """One batch row [h, s, d] in the compute dtype."""
    return math.prod(query.shape[1:]) * _compute(query)


def _casts(*values: LocalValue) -> int:
    """One batch row of each cast to the compute dtype, where that differs."""
    return sum(math.prod(x.shape[1:]) * _compute(x) for x in values if _size(x) < _compute(x))


def _scores_extra(mask: LocalValue | None, query: LocalValue, key: LocalValue, causal: bool) -> int:
    """Masks and statistics alive beside the scores while they are made."""
    heads_rows = query.shape[1] * query.shape[2]
    total = heads_rows * (2 * _compute(query) + 2)
    if mask is not None:
        total += heads_rows * key.shape[2] * (1 if mask.dtype == "bool" else _compute(query))
    if causal:
        total += query.shape[2] * key.shape[2]
    if query.shape[1] != key.shape[1]:
        total += _row_bytes(query)
    return total


def ce_rows(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """`ce_sumexp`: one chunk of rows in the compute dtype, twice while it is cast."""
    logits = inputs[0]
    assert logits is not None
    columns = logits.shape[-1]
    rows = min(math.prod(logits.shape[:-1]), max(1, CE_CHUNK // max(columns, 1)))
    cast = 2 if _size(logits) < _compute(logits) else 1
    return rows * columns * _compute(logits) * cast + rows * _compute(logits) + _copied(logits)


def ce_max(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """The maximum before its cast."""
    out, logits = outputs[0], inputs[0]
    return 0 if _size(out) == _size(logits) else math.prod(out.shape) * _size(logits)  # type: ignore[union-attr]


def ce_target(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Shifted and clamped labels with the tests for lying inside."""
    labels = inputs[1]
    return math.prod(labels.shape) * 21  # type: ignore[union-attr]


def ce_loss(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Three rows of intermediate sums."""
    return 2 * inputs[0].nbytes + math.prod(inputs[0].shape)  # type: ignore[union-attr]


def ce_grad(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """One chunk of probabilities and the per-row terms."""
    logits = inputs[1]
    assert logits is not None
    columns, rows = logits.shape[-1], math.prod(logits.shape[:-1])
    chunk = min(rows, max(1, CE_CHUNK // max(columns, 1))) * columns * _compute(logits)
    cast = 2 if _size(logits) < _compute(logits) else 1
    return chunk * cast + rows * (8 + 1 + 2 * _compute(logits)) + _copied(logits)
