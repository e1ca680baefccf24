"""Published rows in the planner's terms: by hand-made files, since the project needs none of the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published import left_out, orderings, predict, read_cases

GPT = {
    "device": "H100-SXM-80GB", "gpus_per_node": 8, "dtype": "bfloat16", "sequence": 64, "vocab": 256, "model": "gpt",
    "rows": [
        {"name": "tiny", "heads": 4, "hidden": 64, "layers": 2, "tp": 2, "pp": 1, "dp": 2, "gpus": 4, "batch": 8,
         "tflops_per_gpu": 1.0},
        {"name": "deep", "heads": 4, "hidden": 64, "layers": 4, "tp": 2, "pp": 2, "dp": 4, "gpus": 16, "batch": 8,
         "tflops_per_gpu": 2.0},
    ],
}  # fmt: skip
ZERO = {
    "device": "A100-SXM-80GB",
    "gpus_per_node": 8,
    "dtype": "float16",
    "sequence": 64,
    "vocab": 256,
    "model": "gpt",
    "recompute": "full",
    "models": {"m": {"layers": 2, "hidden": 64, "heads": 4}},
    "rows": [{"name": "m", "scheme": "zero3", "gpus": 16, "batch": 64, "microbatch": 2, "tflops_per_gpu": 3.0}],
}
LLAMA = {
    "device": "H100-96GB-HBM2e-500W", "gpus_per_node": 8, "sequence": 128, "model": "llama3.1",
    "rows": [
        {"name": "405B", "parallel": {"fsdp": 8, "tp": 8}, "gpus": 64, "local_batch": 2, "dtype": "float8 linear",
         "recompute": "full", "compile": True, "tokens_per_s_per_gpu": 100},
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in (("a_gpt", GPT), ("b_zero", ZERO), ("c_llama", LLAMA)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return tmp_path


def test_rows_become_pins(folder: Path) -> None:
    tiny, deep, zero, llama = read_cases(folder)
    assert (tiny.cluster, tiny.pins, tiny.needs) == ("4xH100", {"dp": 2, "tp": 2, "sp": True}, "")
    assert tiny.work == pytest.approx(72e-12 * 8 * 64 * 2 * 64 * 64 * (1 + 64 / 384 + 256 / (12 * 2 * 64)))
    assert (deep.cluster, deep.pins["dp"], deep.needs) == ("8xH100:2", 4, "stages")
    assert zero.pins == {"dp": 16, "recompute": "full", "zero": 3, "microbatches": 2}
    assert zero.work == pytest.approx(96e-12 * 64 * 64 * 2 * 64 * 64 * (1 + 64 / 384 + 256 / (16 * 2 * 64)))
    assert (zero.cluster, zero.precision) == ("8xA100-80:2", "fp16")
    assert (llama.cluster, llama.batch, llama.work, llama.needs) == ("8xH100-HBM2e-96:8", 16, 16 * 128, "fp8")
    assert llama.pins == {"dp": 8, "zero": 3, "tp": 8, "sp": True, "recompute": "full"}


def test_a_row_is_planned_as_pinned_and_one_that_needs_more_is_not(folder: Path) -> None:
    tiny, deep, *_ = read_cases(folder)
    row = predict(tiny, 10.0)
    assert row["predicted"] == pytest.approx(tiny.work / row["step_s"] / 4)
    assert row["error_percent"] == pytest.approx(100 * (row["predicted"] - 1.0))
    assert predict(deep, 10.0)["chosen"] == "needs stages"


def test_orderings_and_errors_with_a_file_left_out() -> None:
    rows = [
        {"file": "a", "published": 1.0, "predicted": 2.0}, {"file": "a", "published": 2.0, "predicted": 3.0},
        {"file": "a", "published": 3.0, "predicted": 1.0}, {"file": "b", "published": 1.0, "predicted": 4.0},
        {"file": "b", "published": 9.0, "chosen": "needs stages"},
    ]  # fmt: skip
    assert orderings(rows) == (1, 3)
    # a's scales are 1/2, 2/3 and 3: their median applied to b is 8/3; b's 1/4 applied to a errs by 1/2, 5/8, 11/12
    assert left_out(rows) == {"a": pytest.approx(5 / 8), "b": pytest.approx(5 / 3)}
