"""How kernels that only move bytes go through memory, and what each way reaches.

    t = launches · launch_s + bytes / rate(pattern) + bytes read once more by columns / rate(pattern)
    rate(pattern) = min(bandwidth · share of a stream, multiprocessors · rate of one(pattern))

A stream reaches what DRAM gives. Kernels that load two bytes a thread, add up columns, look up rows or walk a list of
tensors have fewer bytes in flight than the memory's latency asks for: by Little's law a multiprocessor moves its bytes
in flight once a latency, whatever the bandwidth. So such a kernel's rate goes with multiprocessors, which an H200 has
as many of as an H100, and it falls behind a stream most where bandwidth per multiprocessor is largest. One table,
`PATTERNS`, has every pattern with the points it was measured at.

Which kernels run is a property of the software (`Device.kernels`, `LIBRARIES`): the runtime here runs torch's.

Limits: a pattern has one rate at all sizes; kernels compiled from chains are streams (`fusion`). Source: Little 1961;
Volkov 2016 (Understanding Latency Hiding on GPUs, chapter 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from paraplan.ir.machine.device import Device
from paraplan.ir.model.tensor import DTYPE_BYTES, FLOATS
from paraplan.ir.profile import Spec
from paraplan.ir.struct import Value

Specs = tuple[Spec, ...]
Outs = tuple[Spec | None, ...]


class AccessPattern(Value, frozen=True, kw_only=True):
    """A way through memory.

    Attributes:
        share: of the memory bandwidth, reached by the bytes it has to move on the device it was measured on.
        measured: the least and the largest share of the points it was measured at.
        device: that they were measured on.
        reason: why it is not a stream's.
        source: of the points.
    """

    share: float
    measured: tuple[float, float]
    device: str
    reason: str
    source: str


STREAM, WIDEN, COLUMNS, NORM_COLUMNS = "stream", "widening cast", "sum of columns", "sum of columns of a norm"
SCATTER, COPIES, UPDATE = "scatter-add of rows", "multi-tensor copy", "multi-tensor update"

_OPS = "docs/benchmarks/gpu.md, ops alone"
PATTERNS: dict[str, AccessPattern] = {
    STREAM: AccessPattern(
        share=0.85,
        measured=(0.83, 0.92),
        device="A100, H100, H200",
        reason="row misses, refresh and turnarounds of DRAM",
        source="STREAM-like kernels 0.88-0.92 on A100 and H100 (triad 3.09 of 3.35 TB/s); "
        f"cross-entropy 0.83 on H200 ({_OPS}: 75 ops, 1.02 of what 0.85 gives)",
    ),
    WIDEN: AccessPattern(
        share=0.45,
        measured=(0.44, 0.45),
        device="H200",
        reason="torch casts to a wider dtype by scalar loads of dynamic type: only casts to halves have vectorised "
        "kernels on CUDA (ATen/native/cuda/Copy.cu, torch 2.11)",
        source=f"{_OPS}: 28 casts to float32, 1.9 of what 0.85 gives",
    ),
    COLUMNS: AccessPattern(
        share=0.30,
        measured=(0.29, 0.35),
        device="H200",
        reason="torch sums columns in blocks of few columns, whose last one to finish reads the parts of all "
        "(ATen/native/cuda/Reduce.cuh): tens of microseconds of latency where reading takes ten",
        source=f"{_OPS}: 14 gradients of biases, 2.5 of what 0.85 gives; GPT-2 medium 2.2",
    ),
    NORM_COLUMNS: AccessPattern(
        share=0.40,
        measured=(0.34, 0.47),
        device="H200",
        reason="gradients of a norm's weights: a second kernel reads the gradient and the input once more, in strips "
        "of 32 columns, a block each (ATen/native/cuda/layer_norm_kernel.cu)",
        source=f"{_OPS}: six backwards of RMS and layer norm, 2.2 to 2.6 of what one stream at 0.85 gives",
    ),
    SCATTER: AccessPattern(
        share=0.37,
        measured=(0.36, 0.37),
        device="H200",
        reason="the table is filled with zeros, ids are sorted, and blocks go through them in turn "
        "(ATen/native/cuda/Embedding.cu)",
        source=f"{_OPS}: 31 gradients of embeddings, 2.3 of what 0.85 gives",
    ),
    COPIES: AccessPattern(
        share=0.67,
        measured=(0.66, 0.67),
        device="H200",
        reason="chunks of 64 Ki elements a block, four a thread (ATen/native/cuda/MultiTensorApply.cuh)",
        source=f"{_OPS}: writes into stored copies, 1.27 of what 0.85 gives",
    ),
    UPDATE: AccessPattern(
        share=0.63,
        measured=(0.61, 0.65),
        device="H200",
        reason="chunks as of copies, over parameters, gradients and two states at once (four streams a thread)",
        source="fused AdamW of GPT-2 medium (docs/benchmarks/gpu.md, time): 0.63 of the bandwidth",
    ),
}
"""By name. A CPU's rates are measured ones: none of these holds there."""

H200_BYTES_PER_S, H200_MULTIPROCESSORS = 4.8e12, 132
"""Of the device that patterns but streams were measured on."""

LIBRARIES: dict[str, dict[str, str]] = {
    "": {},
    "apex": {NORM_COLUMNS: ""},
    "transformer-engine": {NORM_COLUMNS: "", COLUMNS: STREAM},
}
"""By `Device.kernels`: which pattern stands for which; "": that pass is not made. The backwards of apex' persistent
layer norm (contrib/layer_norm) and of Transformer Engine's (common/normalization) read once, and keep parts of the
weights' gradients in registers. Transformer Engine sums gradients of biases in the products' epilogue. Apex' older
layer norm is the one that torch's comes from."""

_WEIGHT_GRADS = {"paraplan.layer_norm_grad", "paraplan.rms_norm_grad", "aten.native_layer_norm_backward"}
_NAMED = {
    "paraplan.embedding_grad": SCATTER,
    "paraplan.embedding_tables_grad": SCATTER,
    "aten.embedding_dense_backward": SCATTER,
    "paraplan.write_many": COPIES,
}


def _widens(inputs: Specs, outputs: Outs) -> bool:
    """Whether a cast makes floats of more bytes."""
    made = outputs[0] if outputs else None
    if made is None or not inputs or made.dtype not in FLOATS or inputs[0].dtype not in FLOATS:
        return False
    return DTYPE_BYTES[made.dtype] > DTYPE_BYTES[inputs[0].dtype]


def _keeps_columns(inputs: Specs, outputs: Outs) -> bool:
    """Whether a sum leaves the last dim and adds up those before it."""
    made = outputs[0] if outputs else None
    if made is None or not inputs or not made.shape or not inputs[0].shape:
        return False
    columns = made.shape[-1]
    return columns == inputs[0].shape[-1] and math.prod(made.shape) == columns < math.prod(inputs[0].shape)


_BY_SHAPE: dict[str, tuple[str, Callable[[Specs, Outs], bool]]] = {
    "aten._to_copy": (WIDEN, _widens),
    "aten.sum": (COLUMNS, _keeps_columns),
}


def pattern_of(name: str, inputs: Specs, outputs: Outs) -> str:
    """The pattern of an op that only moves bytes.

    Args:
        name: of the op, without its overload.
        inputs, outputs: local specs; None for an absent output.
    """
    if name in _BY_SHAPE:
        pattern, fits = _BY_SHAPE[name]
        return pattern if fits(inputs, outputs) else STREAM
    return _NAMED.get(name, STREAM)


def columns_of(name: str, inputs: Specs, outputs: Outs) -> tuple[Spec, ...]:
    """What an op reads once more by columns: a norm's backward that makes its weights' gradients, both of its tensors.

    Args:
        name: of the op, without its overload.
        inputs, outputs: local specs; None for an absent output.
    """
    made = any(out is not None for out in outputs[1:])
    return inputs[:2] if name in _WEIGHT_GRADS and made else ()


def moved_bytes_per_s(pattern: str, device: Device, stream: float) -> float:
    """Bytes per second that a pattern reaches; 0.0 where the device's kernels do not make that pass.

    Args:
        pattern: of `PATTERNS`.
        device: with its bandwidth, multiprocessors and kernels.
        stream: share of the bandwidth that a stream reaches, which is that of all on a CPU.
    """
    if device.backend == "cuda":
        pattern = LIBRARIES[device.kernels].get(pattern, pattern)
    elif pattern == NORM_COLUMNS:
        pattern = ""  # one kernel goes over rows
    else:
        pattern = STREAM
    if not pattern:
        return 0.0
    most = device.memory_bytes_per_s * stream
    if pattern == STREAM:
        return most
    share = PATTERNS[pattern].share
    if not device.multiprocessors:
        return min(most, device.memory_bytes_per_s * share)
    return min(most, share * H200_BYTES_PER_S * device.multiprocessors / H200_MULTIPROCESSORS)
