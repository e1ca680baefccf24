"""The parts for a CUDA device, each at its smallest on this CPU: they run, find nothing wrong, and see what is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu import parity
from benchmarks.gpu.__main__ import cases, misses, told
from benchmarks.gpu.place import Place
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.runtime.executing import targets

HERE = Place("cpu", True)
QUICK = (
    *("kernels gpt2 fp32", "ranks dlrm", "attention 1024 p 0.1", "train gpt2 fp32", "copies states on host"),
    *("memory 97%", "graphs gpt2 bf16 p 0.1", "rest checkpoint", "nccl all_gather", "host per instruction"),
    *(
        "speed dropout",
        "kernels attention efficient, bool mask bf16, odd",
        "speed attention flash, causal bf16, grouped",
    ),
)


@pytest.mark.parametrize("name", QUICK)
def test_a_part_runs_and_finds_nothing(name: str) -> None:
    rows = cases(HERE)[name]()
    assert rows and all(row["failures"] == [] for row in rows)


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = targets.resolve, []

    def resolve(target: str, kernel: str = "") -> Any:
        call = right(target, kernel)
        if target != "paraplan.linear":
            return call
        calls.append(target)
        return lambda *args: call(*args) * (1.001 if args[0].dtype == torch.float32 else 1.0)

    monkeypatch.setattr(targets, "resolve", resolve)
    monkeypatch.setattr(parity, "resolve", resolve)
    row = parity.kernels(HERE, "gpt2", "fp32")
    assert calls and any("paraplan.linear " in failure for failure in row["failures"])


def test_what_fails_is_told_and_what_is_slow_is_a_miss() -> None:
    def breaks() -> Any:
        raise ValueError("no such kernel")

    assert told(breaks, HERE)[0]["failures"] == ["ValueError: no such kernel"]
    slow = {"ms": 3.0, "reference_ms": 2.0, "time_ratio": 1.2, "peak_ratio": 1.01}
    assert len(misses(slow)) == 3 and misses({"ms": 1.0, "reference_ms": 2.0, "time_ratio": 1.05}) == []


class Interpreted(Place):
    """A plan for a CUDA device, run on this CPU by Triton's interpreter."""

    def cluster(self, devices: int = 1) -> ClusterSpec:
        return parse_cluster(f"{devices}xH100")


@pytest.mark.parametrize("name", ["dlrm", "resnet"])
def test_a_plan_for_cuda_is_right_in_the_interpreter(name: str) -> None:
    """Kernel by kernel: values, strides and memory inside."""
    pytest.importorskip("triton")
    row = parity.kernels(Interpreted("cpu", True), name, "fp32")
    assert row["failures"] == []
