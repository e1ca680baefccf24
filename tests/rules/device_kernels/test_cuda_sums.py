"""Buffers of sums over rows on CUDA, against what torch 2.11 allocated on an H200."""

from __future__ import annotations

import pytest

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.machine.kernel_choice import OpCall, fitting
from paraplan.ir.model.strides import contiguous_strides
from paraplan.rules.device_kernels.cuda_sums import SUM_ROWS, buffer_bytes

ROUNDED = 2 << 20
"""What large blocks are multiples of."""
SEEN = {
    (4096, 4096): 134_217_728,
    (4096, 3072): 100_663_296,
    (4096, 1024): 33_554_432,
    (6304, 4096): 138_412_032,
    (6304, 1024): 52_428_800,
    (32, 10): 0,
    (32, 201_728): 0,
}


@pytest.mark.parametrize(("rows", "columns"), SEEN)
def test_bytes_are_those_seen(rows: int, columns: int) -> None:
    assert 0 <= SEEN[rows, columns] - buffer_bytes(rows, columns) < ROUNDED


def _call(
    shape: tuple[int, ...], dims: tuple[int, ...], strides: tuple[int, ...] = (), dtype: str = "bfloat16"
) -> OpCall:
    lie = strides or contiguous_strides(shape)
    x = LocalValue(dtype=dtype, shape=shape, strides=lie, base="x", storage_bytes=1)
    return OpCall([x], [None], ("%0", dims, False))


def test_first_dims_of_what_is_row_major_are_summed_so() -> None:
    (kernel,) = fitting("cuda", SUM_ROWS, _call((4, 1024, 4096), (0, 1)))
    assert kernel.workspace(_call((4, 1024, 4096), (-3, 1))) == SEEN[4096, 4096]
    for other in (
        _call((4, 1024, 4096), (2,)),
        _call((4, 1024, 4096), (0, 2)),
        _call((4096, 4096), (0, 1)),
        _call((4, 1024, 4096), (0, 1), (1024, 1, 4096)),
        _call((4, 1024, 4096), (0, 1), dtype="int64"),
    ):
        assert not fitting("cuda", SUM_ROWS, other)
