"""How many kernels an instruction launches on a device: its kernel's own number, or that of the reference kernel.

A canonical op without a kernel for the device is a composition of torch's ops: the numbers here are theirs, held
against counts of a dry run. Ops of torch's own are one, what only reserves or reinterprets memory none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from paraplan.ir.execution.rank_program import SUM, LocalValue
from paraplan.ir.machine.kernel_choice import OpCall, offered
from paraplan.ir.model.scan import SCAN, scan_of
from paraplan.ir.model.strides import is_contiguous, view_strides
from paraplan.rules.layers.float8 import filled
from paraplan.rules.workspace import loop_workspace
from paraplan.rules.workspace.workspace import unmerged

_RESERVES = frozenset({"aten.empty.memory_format"})


def launch_count(backend: str, target: str, kernel: str, call: OpCall) -> int:
    """Kernels launched by an op on local values.

    Args:
        backend: "cuda"; on a CPU a launch is a call.
        target, kernel: the instruction's.
        call: its values and arguments.
    """
    made = [out for out in call.outputs if out is not None]
    if target in _RESERVES or (made and all(out.storage_bytes == 0 or 0 in out.shape for out in made)):
        return 0
    if kernel:
        record = next(each for each in offered(backend)[target] if each.name == kernel)
        return record.launches(call)
    counted = _COMPOSED.get(target)
    return 1 if counted is None else counted(call)


def _always(count: int) -> Callable[[OpCall], int]:
    return lambda call: count


def _copied(x: LocalValue | None) -> bool:
    return x is not None and not is_contiguous(x.shape, x.strides)


def _flattened(x: LocalValue | None) -> bool:
    """Whether merging all dims but the last copies."""
    if x is None or not x.shape or 0 in x.shape:
        return False
    return view_strides(x.shape, x.strides, (math.prod(x.shape[:-1]), x.shape[-1])) is None


def _linear(call: OpCall) -> int:
    """A strided input is multiplied batch by batch, copied where batch dims do not merge, and the bias added after."""
    biased = len(call.inputs) == 3 and _copied(call.inputs[0]) and _flattened(call.inputs[0])
    return 1 + biased + len(unmerged(call.inputs[:1]))


def _turned(transposed: bool) -> Callable[[OpCall], int]:
    """A product in float8, and a copy of a weight that lies the other way."""
    return lambda call: 1 + (bool(call.args[4]) == transposed)


def _linear_grad_weight(call: OpCall) -> int:
    return 1 + sum(map(_flattened, call.inputs))


def _row_major_planes(call: OpCall) -> int:
    """Copies of strided planes and weights."""
    return 1 + sum(_copied(x) for x in call.inputs if x is not None and len(x.shape) > 2)


def _merge(call: OpCall) -> int:
    """Casts of what is not in the dtype of sums."""
    (out, lse), other = call.outputs, call.inputs[2]
    assert out is not None and lse is not None and other is not None
    return 9 + (other.dtype != lse.dtype) + (out.dtype != lse.dtype)


def _pack(call: OpCall) -> int:
    dims = call.args[2]
    assert isinstance(dims, (tuple, list))
    return len(call.inputs) if any(dims) or any(map(_copied, call.inputs)) else 1


def _unpack_stacked(call: OpCall) -> int:
    return sum(out is not None and 0 not in out.shape for out in call.outputs)


_COMPOSED: dict[str, Callable[[OpCall], int]] = {
    "paraplan.batched_product": lambda call: 1 + len(unmerged(call.inputs)),
    "paraplan.attention_merge": _merge,
    "paraplan.conv": _row_major_planes,
    "paraplan.conv_grad_input": _row_major_planes,
    "paraplan.conv_grad_weight": _row_major_planes,
    "paraplan.float8_cast_both": _always(2),
    "paraplan.float8_linear": _turned(True),
    "paraplan.float8_linear_grad_input": _turned(False),
    "paraplan.float8_linear_grad_weight": lambda call: 1 + 2 * len(filled(call.inputs)),
    "paraplan.float8_scale": _always(9),
    "paraplan.index_put": _always(2),
    "paraplan.rotary": _always(3),
    "paraplan.linear": _linear,
    "paraplan.linear_grad_input": lambda call: 1 + len(unmerged(call.inputs[:1])),
    "paraplan.linear_grad_weight": _linear_grad_weight,
    SUM: lambda call: _linear_grad_weight(call._replace(inputs=call.inputs[1:])),
    "paraplan.max_pool_grad": _always(2),
    "paraplan.pack": _pack,
    "paraplan.route_add": _always(2),
    "paraplan.route_here": _always(8),
    "paraplan.route_plan": _always(7),
    SCAN: lambda call: loop_workspace.launches(scan_of(call.args)),
    "paraplan.unpack_stacked": _unpack_stacked,
}
