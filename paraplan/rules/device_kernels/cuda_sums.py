"""Sums over rows as torch runs them on CUDA: blocks share out the rows, and their parts lie in a buffer meanwhile.

The buffer has a float32 for every thread, not for every column, of every block: of a bias' gradient it is several times
what is summed. Its size follows `setReduceConfig` and `global_memory_size` of ATen/native/cuda/Reduce.cuh in torch 2.11
to 2.13, for a device of 132 multiprocessors; torch 2.11 allocated as much on an H200, rounded up to its blocks.
"""

from __future__ import annotations

import math

from paraplan.ir.machine.kernel_choice import Kernel, OpCall, offer
from paraplan.ir.model.strides import is_contiguous

SUM_ROWS = "aten.sum.dim_IntList"
MULTIPROCESSORS, THREADS_EACH = 132, 2048
MOST_THREADS, WARP = 512, 32
LEAST_VALUES, MOST_VALUES = 16, 256
_PART_BYTES = 4


def _pow2(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def buffer_bytes(rows: int, columns: int) -> int:
    """What a sum over the rows of a row-major matrix holds between its blocks; 0 where one block has all rows.

    Args:
        rows, columns: of the matrix.
    """
    vector = next(size for size in (4, 2, 1) if columns % size == 0)
    most = MOST_THREADS // vector
    wide, high = min(_pow2(columns // vector), most), min(_pow2(rows), most)
    height = min(high, most // min(wide, WARP))
    width = min(wide, most // height)
    if rows < min(16 * height, MOST_VALUES):
        return 0  # each warp has columns of its own
    values = -(-rows // height)
    grid = -(-columns // (width * vector))
    target = MULTIPROCESSORS * (THREADS_EACH // (width * height))
    if values < MOST_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    return _PART_BYTES * columns * blocks * width * vector if blocks > 1 else 0


def _matrix(call: OpCall) -> tuple[int, int]:
    """Rows and columns of what is summed over its first dims alone; (0, 0) of other sums."""
    x, dims = call.inputs[0], call.args[1] if len(call.args) > 1 else ()
    if x is None or not isinstance(dims, (tuple, list)) or not dims or 0 in x.shape:
        return 0, 0
    if x.dtype not in ("bfloat16", "float16", "float32") or not is_contiguous(x.shape, x.strides):
        return 0, 0
    summed = sorted(int(dim) % len(x.shape) for dim in dims)  # type: ignore[call-overload]
    if summed != list(range(len(summed))) or len(summed) == len(x.shape):
        return 0, 0
    return math.prod(x.shape[: len(summed)]), math.prod(x.shape[len(summed) :])


def _buffer(call: OpCall) -> int:
    rows, columns = _matrix(call)
    return buffer_bytes(rows, columns) if rows else 0


offer("cuda", SUM_ROWS, Kernel("in_blocks", lambda call: _buffer(call) > 0, lambda call: 1, _buffer))
