"""Rates of kernels that only move bytes: within what was measured, and never above the device's."""

import msgspec
import pytest

from paraplan.cost_models.constants import GPU
from paraplan.cost_models.machine.catalog import catalog_device
from paraplan.cost_models.machine.device_catalog import CATALOG
from paraplan.cost_models.ops.access_patterns import (
    COLUMNS,
    LIBRARIES,
    NORM_COLUMNS,
    PATTERNS,
    SCATTER,
    STREAM,
    WIDEN,
    moved_bytes_per_s,
    pattern_of,
)
from paraplan.cost_models.ops.roofline import OpWork, op_cost, op_time_s
from paraplan.ir.errors import ClusterError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import KERNELS, check_device
from paraplan.ir.model.tensor import TensorSpec

H200, H100, A100 = (catalog_device(kind) for kind in ("H200", "H100", "A100-80"))
DEVICES = [entry.device for entry in CATALOG.values()]


def t(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=shape)


def moving(pattern: str, nbytes: int) -> OpWork:
    return OpWork(kind="memory", flops=0, read_bytes=nbytes, write_bytes=0, dtype="float32", pattern=pattern)


@pytest.mark.parametrize("name", PATTERNS)
def test_shares_lie_within_what_was_measured(name: str) -> None:
    pattern = PATTERNS[name]
    least, most = pattern.measured
    assert 0 < least <= pattern.share <= most < 1
    assert pattern.device and pattern.reason and pattern.source
    on_h200 = moved_bytes_per_s(name, H200, GPU.memory) / H200.memory_bytes_per_s
    assert on_h200 == pytest.approx(pattern.share)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.kind)
def test_no_kernel_is_faster_than_a_stream(name: str, device) -> None:
    if device.backend == "cpu":
        assert moved_bytes_per_s(name, device, 1.0) in (0.0, device.memory_bytes_per_s)
        return
    rate = moved_bytes_per_s(name, device, GPU.memory)
    assert 0 < rate <= moved_bytes_per_s(STREAM, device, GPU.memory) < device.memory_bytes_per_s
    times = [op_time_s(moving(name, nbytes), device) for nbytes in (0, 1, 1 << 20, 1 << 24, 1 << 30)]
    assert times == sorted(times) and times[-1] >= (1 << 30) / device.memory_bytes_per_s


def test_latency_bound_kernels_go_with_multiprocessors() -> None:
    """An H100 has as many as an H200: what is short of bytes in flight is as fast there, streams are not."""
    assert moved_bytes_per_s(COLUMNS, H100, GPU.memory) == moved_bytes_per_s(COLUMNS, H200, GPU.memory)
    assert moved_bytes_per_s(STREAM, H100, GPU.memory) < moved_bytes_per_s(STREAM, H200, GPU.memory)
    a100 = moved_bytes_per_s(COLUMNS, A100, GPU.memory) / moved_bytes_per_s(COLUMNS, H200, GPU.memory)
    assert a100 == pytest.approx(108 / 132)
    unknown = msgspec.structs.replace(A100, multiprocessors=0)
    assert moved_bytes_per_s(COLUMNS, unknown, GPU.memory) == pytest.approx(0.30 * A100.memory_bytes_per_s)


def test_patterns_of_ops() -> None:
    rows, columns = t(2048, 512), t(512)
    assert pattern_of("aten.sum", (rows,), (columns,)) == COLUMNS
    assert pattern_of("aten.sum", (rows,), (t(1, 512),)) == COLUMNS
    assert pattern_of("aten.sum", (rows,), (t(2048),)) == STREAM  # along rows
    assert pattern_of("aten.sum", (t(),), (t(),)) == STREAM
    assert pattern_of("aten._to_copy", (rows,), (t(2048, 512, dtype="float32"),)) == WIDEN
    assert pattern_of("aten._to_copy", (t(4, dtype="float32"),), (t(4),)) == STREAM
    assert pattern_of("aten._to_copy", (t(4, dtype="bool"),), (t(4, dtype="float32"),)) == STREAM
    assert pattern_of("paraplan.embedding_grad", (rows, t(2048, dtype="int64")), (t(9, 512),)) == SCATTER
    assert pattern_of("aten.add", (rows, rows), (rows,)) == STREAM


def norm_grad(affine: bool) -> OpWork:
    x, rstd, w = t(4096, 1024), t(4096, 1, dtype="float32"), t(1024)
    inputs, outputs = ((x, x, rstd, w), (x, w)) if affine else ((x, x, rstd), (x, None))
    return op_cost("paraplan.rms_norm_grad", (), {}, inputs, outputs)


def test_norms_of_torch_read_twice_where_weights_train() -> None:
    x_bytes = 2 * 4096 * 1024
    assert norm_grad(True).column_bytes == 2 * x_bytes and norm_grad(False).column_bytes == 0
    one_pass = op_time_s(msgspec.structs.replace(norm_grad(True), column_bytes=0), H200)
    again = 2 * x_bytes / (PATTERNS[NORM_COLUMNS].share * H200.memory_bytes_per_s)
    assert op_time_s(norm_grad(True), H200) == pytest.approx(one_pass + H200.launch_s + again)
    for kernels in ("apex", "transformer-engine"):
        fused = msgspec.structs.replace(H200, kernels=kernels)
        assert op_time_s(norm_grad(True), fused) == pytest.approx(one_pass)


def test_every_library_is_known_and_others_are_refused() -> None:
    assert set(LIBRARIES) == set(KERNELS)
    with pytest.raises(ClusterError, match="did you mean apex"):
        check_device("c", msgspec.structs.replace(H200, kernels="apec"), "device")


def test_measured_rates_of_a_cpu_stay_as_they_are() -> None:
    device = ClusterSpec.local(1).groups[0].device
    took = op_time_s(norm_grad(True), device)
    assert took == op_time_s(msgspec.structs.replace(norm_grad(True), column_bytes=0), device)
