"""Convolutions as cuDNN runs them on CUDA: in half precision by kernels that read and write channels last.

What is stored channels first, as torch's default is, is copied to channels last before, and the result back: of a layer
of a ResNet these copies take more than its products. Channels are padded to eight. A convolution of one pixel without
stride is a product as it is stored. Bytes are those that torch 2.11 with cuDNN 9.19 allocated on an H200 (`python -m
benchmarks.gpu --only "^inside"`), to 1 MB; weights' gradients take up to a fifth more for partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.machine.kernel_choice import Kernel, OpCall, offer
from paraplan.ir.model.strides import is_contiguous
from paraplan.ir.model.tensor import DTYPE_BYTES
from paraplan.ir.profile import Spec
from paraplan.rules.device_kernels.cuda_attention import HALF
from paraplan.rules.workspace import vision_workspace

CHANNELS = 8
PARTIAL_SUMS = 1.2
_TRANSPOSED = 6


_Roles = Callable[[Sequence[Spec], Spec], tuple[Spec, Spec, Spec]]
_ROLES: dict[str, _Roles] = {
    "paraplan.conv": lambda given, out: (given[0], given[1], out),
    "paraplan.conv_grad_input": lambda given, out: (out, given[1], given[0]),
    "paraplan.conv_grad_weight": lambda given, out: (given[1], out, given[0]),
}
"""Input, weight and output of the convolution, among what each op is given and makes."""
CONVOLUTIONS = frozenset(_ROLES)


def turned_bytes(target: str, inputs: Sequence[Spec], outputs: Sequence[Spec | None]) -> int:
    """Bytes of the channels-last copies of a convolution's input, weight and output; 0 where it makes none.

    Args:
        target: of `CONVOLUTIONS`.
        inputs, outputs: its tensors.
    """
    out = outputs[0]
    if out is None or inputs[0].dtype not in HALF or len(out.shape) < 4:
        return 0
    x, w, y = _ROLES[target](inputs, out)
    if math.prod(w.shape[2:]) == 1 and x.shape[2:] == y.shape[2:]:
        return 0
    return sum(map(_padded, (x, w, y)))


def _padded(spec: Spec) -> int:
    batch, channels, *rest = spec.shape
    return math.prod((batch, -(-channels // CHANNELS) * CHANNELS, *rest)) * DTYPE_BYTES[spec.dtype]


def _values(call: OpCall) -> tuple[list[LocalValue], list[LocalValue | None]]:
    return [x for x in call.inputs if x is not None], list(call.outputs)


def _fits(target: str) -> Callable[[OpCall], bool]:
    """Whether something is copied: row-major tensors in half precision."""

    def fits(call: OpCall) -> bool:
        inputs, outputs = _values(call)
        stored = all(is_contiguous(x.shape, x.strides) for x in inputs if len(x.shape) > 2)
        return stored and turned_bytes(target, inputs, outputs) > 0

    return fits


def _workspace(target: str) -> Callable[[OpCall], int]:
    def workspace(call: OpCall) -> int:
        inputs, outputs = _values(call)
        made = turned_bytes(target, inputs, outputs)
        if target == "paraplan.conv":
            return made
        transposed = len(call.args) > _TRANSPOSED and call.args[_TRANSPOSED] is True
        made += _padded(inputs[0]) if transposed else 0
        made = int(made * PARTIAL_SUMS) if target == "paraplan.conv_grad_weight" else made
        return made + vision_workspace.shape_reader(inputs, outputs, call.args)

    return workspace


for _target in _ROLES:
    offer("cuda", _target, Kernel("channels_last", _fits(_target), lambda call: 1, _workspace(_target)))
