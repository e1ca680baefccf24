"""Bytes the canonical ops' kernels allocate and drop inside, from local shapes.

Each formula counts the temporaries alive at the kernel's worst moment (`kernels/`), as tensors torch's
dispatcher makes; what a C++ kernel allocates and drops by itself is not counted, in prediction and in measurement
alike. Tests hold every formula between the measured workspace and a few percent above it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.model.graph import Arg
from paraplan.ir.model.strides import is_contiguous, merges_batch, view_strides
from paraplan.ir.model.tensor import DTYPE_BYTES

Values = Sequence[LocalValue | None]
DROPOUT_CHUNK = 1 << 16
CE_CHUNK = 1 << 20


def size_of(value: LocalValue | None) -> int:
    """Item size in bytes; 0 of nothing."""
    return DTYPE_BYTES[value.dtype] if value is not None else 0


def compute_size(value: LocalValue | None) -> int:
    """Item size of the dtype sums are kept in: float32 at least."""
    return max(size_of(value), 4)


def _copied(value: LocalValue | None) -> int:
    """Bytes of flattening a value to rows: none where its leading dims merge, whatever its strides."""
    if value is None or not value.shape:
        return 0
    rows = (math.prod(value.shape[:-1]), value.shape[-1])
    return 0 if view_strides(value.shape, value.strides, rows) is not None else value.nbytes


def dropout_bytes(rows: int, columns: int) -> int:
    """Row keys (int64 hashing, then two int32); then one chunk of int32 hashes and folds."""
    width = min(columns, DROPOUT_CHUNK)
    chunk = min(rows, max(1, DROPOUT_CHUNK // max(width, 1))) * width
    return max(40 * rows, 8 * rows + 4 * width + 8 * chunk) + 64


def dropout(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Keys, hashes, and a flat copy of a strided input."""
    x = inputs[0]
    assert x is not None
    columns = x.shape[-1] if x.shape else 1
    return dropout_bytes(math.prod(x.shape[:-1]), columns) + _copied(x)


def uniform(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Keys and hashes."""
    x = inputs[0]
    assert x is not None
    return dropout_bytes(math.prod(x.shape[:-1]), x.shape[-1] if x.shape else 1)


def linear(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """A strided input is multiplied batch by batch, copied where batch dims do not merge, and the bias added after."""
    x, out = inputs[0], outputs[0]
    assert x is not None and out is not None
    biased = out.nbytes if len(inputs) == 3 and not is_contiguous(x.shape, x.strides) else 0
    return max(biased, batched_product(inputs[:1], outputs, args))


def linear_grad_weight(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Flat copies of strided inputs."""
    return sum(map(_copied, inputs))


def unmerged(inputs: Values) -> list[LocalValue]:
    """Operands of a batched product that it copies, for their leading dims do not merge in a view."""
    return [x for x in inputs if x is not None and len(x.shape) > 2 and not merges_batch(x.shape, x.strides)]


def batched_product(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Those copies."""
    return sum(x.nbytes for x in unmerged(inputs))


def linear_grad_input(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """A copy of a strided gradient whose batch dims do not merge."""
    return batched_product(inputs[:1], outputs, args)


def embedding(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Which ids lie outside, beside the rows; over a split vocabulary the shifted and the clamped ids too."""
    out, ids = outputs[0], inputs[1]
    assert out is not None and ids is not None
    count = math.prod(ids.shape)
    shifted = 8 if args[2] not in (0, "#") else 0
    return max(count * (3 + shifted) - out.nbytes, count * (1 + 2 * shifted))


def embedding_grad(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """The same; where some contribute nothing also the masked ids and gradient."""
    grad, ids, out = inputs[0], inputs[1], outputs[0]
    assert grad is not None and ids is not None and out is not None
    count = math.prod(ids.shape)
    shifted = 8 if args[4] not in (0, "#") else 0
    masked = grad.nbytes + 8 * count if shifted or int(args[3]) >= 0 else 0
    return max(count * (3 + shifted) - out.nbytes, count * (1 + shifted) + masked)


def ce_rows(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """`ce_sumexp`: one chunk of rows in the compute dtype, twice while it is cast."""
    logits = inputs[0]
    assert logits is not None
    columns = logits.shape[-1]
    rows = min(math.prod(logits.shape[:-1]), max(1, CE_CHUNK // max(columns, 1)))
    cast = 2 if size_of(logits) < compute_size(logits) else 1
    return rows * columns * compute_size(logits) * cast + rows * compute_size(logits) + _copied(logits)


def ce_max(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """The maximum before its cast."""
    out, logits = outputs[0], inputs[0]
    return 0 if size_of(out) == size_of(logits) else math.prod(out.shape) * size_of(logits)  # type: ignore[union-attr]


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
    chunk = min(rows, max(1, CE_CHUNK // max(columns, 1))) * columns * compute_size(logits)
    cast = 2 if size_of(logits) < compute_size(logits) else 1
    return chunk * cast + rows * (8 + 1 + 2 * compute_size(logits)) + _copied(logits)
