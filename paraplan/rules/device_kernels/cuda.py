"""The kernels canonical ops run as on CUDA devices; the functions are in `kernels.gpu`."""

from __future__ import annotations

import math
from collections.abc import Callable

from paraplan.ir.execution.rank_program import SUMMED, LocalValue
from paraplan.ir.machine.kernel_choice import Kernel, OpCall, norm_splits, offer, whole_splits
from paraplan.ir.model.strides import is_contiguous, view_strides
from paraplan.ir.model.tensor import DTYPE_BYTES
from paraplan.rules.device_kernels import cuda_conv, cuda_sums  # noqa: F401  (record their kernels)
from paraplan.rules.device_kernels.cuda_attention import HALF
from paraplan.rules.layers.float8 import num_parts
from paraplan.rules.workspace.expert_workspace import grouped_experts, grouped_experts_grad, pieces


def _always(call: OpCall) -> bool:
    return True


def _contiguous_launches(launches: int, *positions: int) -> tuple[Callable[[OpCall], int], Callable[[OpCall], int]]:
    """Launches and workspace of kernels that want these inputs contiguous: one more, and a copy, for every other."""

    def copied(call: OpCall) -> list[LocalValue]:
        inputs = [call.inputs[position] for position in positions]
        return [x for x in inputs if x is not None and not is_contiguous(x.shape, x.strides)]

    return lambda call: launches + len(copied(call)), lambda call: sum(x.nbytes for x in copied(call))


def _scale_of_parts() -> tuple[Callable[[OpCall], int], Callable[[OpCall], int]]:
    """Launches and workspace of a scale: maxima of parts, joined."""
    launches, copied = _contiguous_launches(2, 0)
    return launches, lambda call: copied(call) + 4 * num_parts(call.inputs[0])


def _is_whole_table(v_start: int) -> Callable[[OpCall], bool]:
    """Whether the block of a vocabulary begins where that does, on every rank: it is all of it."""
    return lambda call: call.args[v_start] in (0, "#")


def _plus(
    found: tuple[Callable[[OpCall], int], Callable[[OpCall], int]], workspace: Callable[[OpCall], int]
) -> tuple[Callable[[OpCall], int], Callable[[OpCall], int]]:
    """Launches, and workspace with more of it."""
    return found[0], lambda call: found[1](call) + workspace(call)


def _ids_bytes(call: OpCall) -> int:
    """Row numbers of ids, for a gradient that is summed by them."""
    assert call.inputs[1] is not None
    return 8 * math.prod(call.inputs[1].shape)


_local_ids = _plus(_contiguous_launches(2, 0, 1), _ids_bytes)


def _sums_over_samples(*positions: int) -> tuple[Callable[[OpCall], int], Callable[[OpCall], int]]:
    """Parts of as many sums as there are tensors to sum over, in float32 at least, and sums nobody wants."""

    def parts(call: OpCall) -> int:
        x = call.inputs[0]
        assert x is not None
        channels, samples = x.shape[1], math.prod(x.shape) // max(x.shape[1], 1)
        absent = sum(out is None for out in call.outputs)
        item = max(DTYPE_BYTES[x.dtype], 4)
        return (len(positions) * norm_splits(samples, channels) + absent) * channels * item

    return _plus(_contiguous_launches(2, *positions), parts)


def _is_wide(call: OpCall) -> bool:
    """Whether a product of halves is to be in float32."""
    made, given = call.outputs[0], call.inputs[0]
    return made is not None and given is not None and made.dtype == "float32" and given.dtype in HALF


def _flat_copies(call: OpCall) -> list[LocalValue]:
    """Operands whose leading dims do not merge in a view."""
    shapes = [(x, (math.prod(x.shape[:-1]), x.shape[-1])) for x in call.inputs if x is not None]
    return [x for x, flat in shapes if view_strides(x.shape, x.strides, flat) is None]


def _splits(call: OpCall) -> tuple[int, int]:
    """Parts in which batch norm over all samples goes over them, and the bytes of two sums of each; none of a whole."""
    x = call.inputs[0]
    assert x is not None
    channels, space = x.shape[1], math.prod(x.shape[2:])
    parts = whole_splits(x.shape[0] * space, channels, space)
    return parts, 2 * parts * channels * max(DTYPE_BYTES[x.dtype], 4) * (parts > 1)


def _strided_planes(call: OpCall) -> list[LocalValue]:
    return [x for x in call.inputs if x is not None and len(x.shape) > 1 and not is_contiguous(x.shape, x.strides)]


_all_samples: tuple[Callable[[OpCall], int], Callable[[OpCall], int]] = (
    lambda call: 1 + (_splits(call)[0] > 1) + len(_strided_planes(call)),
    lambda call: _splits(call)[1] + sum(x.nbytes for x in _strided_planes(call)),
)
"""Launches and workspace of batch norm over all samples: one more where parts are joined."""


def _rotary_fits(call: OpCall) -> bool:
    return call.inputs[0] is not None and len(call.inputs[0].shape) <= 4


def _without_dense_rows(call: OpCall) -> list[LocalValue]:
    """Inputs that cannot be seen as dense rows one pitch apart."""

    def copied(x: LocalValue) -> bool:
        columns = x.shape[-1] if x.shape else 1
        strides = view_strides(x.shape, x.strides, (math.prod(x.shape) // max(columns, 1), columns))
        return strides is None or (columns > 1 and strides[1] != 1)

    return [x for x in call.inputs if x is not None and copied(x)]


_dense_rows_launches: tuple[Callable[[OpCall], int], Callable[[OpCall], int]] = (
    lambda call: 1 + len(_without_dense_rows(call)),
    lambda call: sum(x.nbytes for x in _without_dense_rows(call)),
)


def _mixture(call: OpCall) -> tuple[list[LocalValue], int]:
    """Inputs of a mixture, gradients first, and the number of experts on all ranks."""
    inputs = [x for x in call.inputs if x is not None]
    return inputs, int(call.args[len(inputs) + 1])


def _grouped_fits(call: OpCall) -> bool:
    """Rows and stacks of one dtype, none of them empty."""
    *_, w_in, w_out = inputs = _mixture(call)[0]
    dtypes = {x.dtype for x in (*inputs[:-4], w_in, w_out)}
    some = all(0 not in x.shape for x in inputs)
    return some and w_in.shape[0] <= 1023 and len(dtypes) == 1 and w_in.dtype in (*HALF, "float32")


def _grouped_launches(call: OpCall) -> int:
    """Sorting and finding ends; in each piece five, or with gradients six and two for those of the stacks, which later
    pieces add to those of the first."""
    inputs, total = _mixture(call)
    count = pieces(inputs[-4], inputs[-2].shape[0], total)
    copies = sum(not is_contiguous(x.shape, x.strides) for x in inputs)
    if len(inputs) == 5:
        return copies + 2 + 5 * count
    return copies + 3 + 6 * count + bool(call.args[9]) * (4 * count - 2)


offer("cuda", "paraplan.constant", Kernel("kept", _always, *_contiguous_launches(1)))
offer(
    "cuda",
    "paraplan.embedding",
    Kernel("aten", _is_whole_table(2), *_contiguous_launches(1)),
    Kernel("triton", _always, *_contiguous_launches(1, 0, 1)),
)
offer(
    "cuda",
    "paraplan.embedding_grad",
    Kernel("aten", _is_whole_table(4), *_contiguous_launches(1, 0, 1)),
    Kernel("triton", _always, *_local_ids),
)
offer("cuda", "paraplan.embedding_tables", Kernel("triton", _always, *_contiguous_launches(1, 0, 1)))
offer("cuda", "paraplan.embedding_tables_grad", Kernel("triton", _always, *_local_ids))
offer(
    "cuda",
    SUMMED,
    Kernel(
        "wide",
        _is_wide,
        lambda call: 1 + len(_flat_copies(call)),
        lambda call: sum(x.nbytes for x in _flat_copies(call)),
    ),
)
offer("cuda", "paraplan.rms_norm", Kernel("fused", _always, *_contiguous_launches(1, 0)))
offer("cuda", "paraplan.rms_norm_grad", Kernel("fused", _always, *_contiguous_launches(1, 0, 1)))
offer("cuda", "paraplan.dropout", Kernel("triton", _always, *_contiguous_launches(1, 0)))
offer("cuda", "paraplan.uniform", Kernel("triton", _always, *_contiguous_launches(1)))
offer("cuda", "paraplan.float8_scale", Kernel("triton", _always, *_scale_of_parts()))
offer("cuda", "paraplan.float8_cast", Kernel("triton", _always, *_contiguous_launches(1, 0)))
offer("cuda", "paraplan.float8_cast_both", Kernel("triton", _always, *_contiguous_launches(1, 0)))
offer("cuda", "paraplan.ce_max", Kernel("triton", _always, *_contiguous_launches(1, 0)))
offer("cuda", "paraplan.ce_sumexp", Kernel("triton", _always, *_contiguous_launches(1, 0, 1)))
offer("cuda", "paraplan.ce_target", Kernel("triton", _always, *_contiguous_launches(1, 0, 1)))
offer("cuda", "paraplan.ce_loss", Kernel("triton", _always, *_contiguous_launches(1, 0, 1, 2, 3)))
offer("cuda", "paraplan.ce_grad", Kernel("triton", _always, *_contiguous_launches(1, 1, 2, 3, 4)))
offer("cuda", "paraplan.rotary", Kernel("triton", _rotary_fits, *_contiguous_launches(1)))
offer("cuda", "paraplan.gated", Kernel("triton", _always, *_dense_rows_launches))
offer("cuda", "paraplan.gated_grad", Kernel("triton", _always, *_dense_rows_launches))
offer("cuda", "paraplan.bn_squares", Kernel("triton", _always, *_sums_over_samples(0)))
offer("cuda", "paraplan.bn_grad_affine", Kernel("triton", _always, *_sums_over_samples(0, 1)))
offer("cuda", "paraplan.bn_rstd", Kernel("triton", _always, *_contiguous_launches(1, 0)))
offer("cuda", "paraplan.bn_running", Kernel("triton", _always, *_contiguous_launches(1, 0, 1)))
offer("cuda", "paraplan.bn_apply", Kernel("triton", _always, *_contiguous_launches(1, 0)))
offer("cuda", "paraplan.bn_grad_input", Kernel("triton", _always, *_contiguous_launches(1, 0, 1)))
offer("cuda", "paraplan.bn_whole", Kernel("triton", _always, *_all_samples))
offer("cuda", "paraplan.bn_whole_grad", Kernel("triton", _always, *_all_samples))
offer(
    "cuda",
    "paraplan.experts",
    Kernel("grouped", _grouped_fits, _grouped_launches, lambda call: grouped_experts(call.inputs, _mixture(call)[1])),
)
offer(
    "cuda",
    "paraplan.experts_grad",
    Kernel(
        "grouped",
        _grouped_fits,
        _grouped_launches,
        lambda call: grouped_experts_grad(call.inputs, _mixture(call)[1], bool(call.args[9])),
    ),
)
