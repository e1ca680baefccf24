"""Convolutions on CUDA: what they copy, against what torch 2.11 allocated inside them on an H200."""

from __future__ import annotations

import msgspec
import pytest

from paraplan.cost_models.machine.catalog import catalog_device
from paraplan.cost_models.ops.roofline import TURNING, TURNS, op_time_s, work_of
from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.machine.kernel_choice import OpCall, fitting
from paraplan.ir.model.strides import contiguous_strides
from paraplan.ir.profile import Measured
from paraplan.rules.device_kernels.cuda_conv import turned_bytes

Shape = tuple[int, ...]
CONV, GRAD_INPUT, GRAD_WEIGHT = "paraplan.conv", "paraplan.conv_grad_input", "paraplan.conv_grad_weight"
SEEN: list[tuple[str, Shape, Shape, Shape, float]] = [
    (CONV, (8, 128, 256, 256), (64, 128, 3, 3), (8, 64, 256, 256), 201.47),
    (CONV, (8, 256, 128, 128), (128, 256, 3, 3), (8, 128, 128, 128), 101.25),
    (CONV, (32, 3, 224, 224), (1024, 3, 16, 16), (32, 1024, 14, 14), 42.73),
    (CONV, (32, 256, 56, 56), (512, 256, 1, 1), (32, 512, 28, 28), 77.6),
    (GRAD_INPUT, (8, 64, 256, 256), (64, 64, 3, 3), (8, 64, 256, 256), 134.29),
    (GRAD_INPUT, (8, 512, 64, 64), (256, 512, 3, 3), (8, 256, 64, 64), 52.69),
    (GRAD_WEIGHT, (8, 128, 256, 256), (64, 128, 3, 3), (8, 64, 256, 256), 205.52),
    (GRAD_WEIGHT, (8, 128, 256, 256), (64, 128, 1, 1), (8, 64, 256, 256), 0.26),
]
"""Op, input, weight, output, and MB inside."""


def _specs(target: str, x: Shape, w: Shape, y: Shape, dtype: str) -> tuple[list[Measured], list[Measured]]:
    inputs = {CONV: (x, w), GRAD_INPUT: (y, w), GRAD_WEIGHT: (y, x)}[target]
    out = {CONV: y, GRAD_INPUT: x, GRAD_WEIGHT: w}[target]
    return [Measured(dtype, shape) for shape in inputs], [Measured(dtype, out)]


def _values(specs: list[Measured], last: bool = False) -> list[LocalValue | None]:
    found: list[LocalValue | None] = []
    for spec in specs:
        strides = contiguous_strides(spec.shape)
        if last:
            _, c, h, w = spec.shape
            strides = (c * h * w, 1, w * c, c)
        found.append(
            LocalValue(dtype=spec.dtype, shape=spec.shape, strides=strides, base="x", storage_bytes=spec.nbytes)
        )
    return found


ARGS = ("%0", "%1", None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)


@pytest.mark.parametrize(("target", "x", "w", "y", "seen_mb"), SEEN)
def test_bytes_inside_are_those_seen(target: str, x: Shape, w: Shape, y: Shape, seen_mb: float) -> None:
    inputs, outputs = _specs(target, x, w, y, "bfloat16")
    found = fitting("cuda", target, OpCall(_values(inputs), _values(outputs), ARGS))
    said = found[0].workspace(OpCall(_values(inputs), _values(outputs), ARGS)) / 1e6 if found else 0.0
    low, high = (1.0, 1.2) if target == GRAD_WEIGHT else (0.99, 1.01)
    assert low * seen_mb - 0.3 <= said <= high * seen_mb


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_copied_is_another_kernels(dtype: str) -> None:
    """Float32, and what is stored channels last."""
    inputs, outputs = _specs(CONV, (8, 64, 32, 32), (64, 64, 3, 3), (8, 64, 32, 32), dtype)
    last = dtype == "bfloat16"
    assert not fitting("cuda", CONV, OpCall(_values(inputs, last), _values(outputs, last), ARGS))


def test_copies_are_priced_on_cuda_alone() -> None:
    inputs, outputs = _specs(CONV, (64, 256, 56, 56), (512, 256, 1, 1), (64, 512, 28, 28), "bfloat16")
    device, work = catalog_device("H200"), work_of(CONV, 0, inputs, outputs)
    turned = turned_bytes(CONV, inputs, outputs)
    more = op_time_s(work, device) - op_time_s(msgspec.structs.replace(work, turned_bytes=0), device)
    rate = device.memory_bytes_per_s * 0.85
    assert work.turned_bytes == turned and more == pytest.approx(TURNS * device.launch_s + TURNING * turned / rate)
    assert op_time_s(work, device) == pytest.approx(177e-6, rel=0.15)  # an H200: 160 forward, 194 back
    cpu = catalog_device("cpu")
    cpu = msgspec.structs.replace(cpu, flops_per_s=dict.fromkeys(("bfloat16", "float32"), 1e12))
    assert op_time_s(work, cpu) == op_time_s(msgspec.structs.replace(work, turned_bytes=0), cpu)
