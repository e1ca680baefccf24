"""Bytes the norm kernels (`kernels/norm_kernels.py`) allocate and drop inside, from local shapes."""

from __future__ import annotations

import math

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.model.graph import Arg
from paraplan.ir.model.strides import is_contiguous
from paraplan.rules.workspace.workspace import Values, compute_size, size_of


def _copied(*values: LocalValue) -> int:
    return sum(0 if is_contiguous(x.shape, x.strides) else x.nbytes for x in values)


def _wide(x: LocalValue) -> int:
    """Bytes of x in the dtype of sums."""
    return math.prod(x.shape) * compute_size(x)


def rms_norm(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """A half-precision input in float32, and its squares or the result before its cast; row-major copies."""
    x = inputs[0]
    assert x is not None
    return _copied(x) + (2 * _wide(x) if size_of(x) < compute_size(x) else 0)


def rms_norm_grad(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """The normalised input, the weighed gradient and their product, which become the result; row-major copies."""
    grad, x, rstd = inputs[:3]
    assert grad is not None and x is not None and rstd is not None
    return _copied(grad, x) + 3 * _wide(x) - x.nbytes + rstd.nbytes
