"""Bytes the vision kernels (`kernels/vision_kernels.py`) allocate and drop inside, from local shapes.

As in `workspace`: the temporaries alive at a kernel's worst moment, as torch's dispatcher makes them. What the
convolution and pooling libraries allocate by themselves is not in it: oneDNN copies gradient, weight and input into
blocks of 16 channels (all three for the usual 3x3, three times the input where strided, nothing for 1x1), or unfolds
them, by its instruction set, the number of threads and the batch. On one CPU a 1x1 of [4, 64, 28, 28] makes 16 KiB
inside its weight's gradient with one thread and 1.6 MiB with two: no formula of shapes holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.model.graph import Arg
from paraplan.ir.model.strides import is_contiguous
from paraplan.ir.model.tensor import DTYPE_BYTES

Values = Sequence[LocalValue | None]


def _copied(value: LocalValue | None) -> int:
    return 0 if value is None or is_contiguous(value.shape, value.strides) else value.nbytes


def _item(value: LocalValue | None) -> int:
    assert value is not None
    return DTYPE_BYTES[value.dtype]


def _wide_item(value: LocalValue | None) -> int:
    return max(_item(value), 4)


def _widened(value: LocalValue | None) -> int:
    """Bytes of a row-major copy in the dtype of statistics: none where the value is that already."""
    assert value is not None
    if _item(value) < _wide_item(value):
        wide = math.prod(value.shape) * _wide_item(value)
        return wide + _copied(value)
    return _copied(value)


def flat_copies(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Row-major copies of strided planes and weights."""
    return sum(_copied(value) for value in inputs if value is not None and len(value.shape) > 2)


def shape_reader(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """The same, beside the one element whose expansion stands for a tensor of which only the shape is read."""
    return flat_copies(inputs, outputs, args) + _item(inputs[0])


def bn_squares(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """The block's variance beside its mean, which becomes the result."""
    return _widened(inputs[0]) + outputs[0].nbytes  # type: ignore[union-attr]


def bn_rstd(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """A cast of narrow statistics."""
    return outputs[0].nbytes if _item(inputs[0]) < _wide_item(inputs[0]) else 0  # type: ignore[union-attr]


def bn_running(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """A cast of the sum."""
    return outputs[0].nbytes if _item(inputs[0]) != _item(inputs[1]) else 0  # type: ignore[union-attr]


def _channels(value: LocalValue | None) -> int:
    assert value is not None
    return value.shape[1] * _wide_item(value)


def _twice_wide(x: LocalValue | None) -> int:
    """A narrow input and the result both in the dtype of statistics, less the narrow result; else a strided copy."""
    assert x is not None
    wide = math.prod(x.shape) * _wide_item(x)
    return 2 * wide - x.nbytes if _item(x) < _wide_item(x) else _copied(x)


def bn_apply(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """The scale of every channel, and wide copies where the input is narrow."""
    return (_channels(inputs[0]) if args[3] is not None else 0) + _twice_wide(inputs[0])


def bn_grad_affine(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Ones for the deviations, copies of strided or narrow inputs, and a sum nobody may want."""
    absent = sum(_channels(inputs[0]) for value in outputs if value is None)
    return _widened(inputs[0]) + _widened(inputs[1]) + _channels(inputs[0]) + absent


def bn_grad_input(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    """Per-channel factors, three at once, and wide copies where the input is narrow."""
    return 3 * _channels(inputs[1]) + _twice_wide(inputs[1])
