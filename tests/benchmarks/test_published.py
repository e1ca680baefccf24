"""Published rows in the planner's terms: by hand-made files, since the project needs none of the published ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.kept_outputs import with_last_products_kept, with_logits_kept, with_messages_kept
from benchmarks.published import REPORTED, left_out, mean_absolute_error, orderings, predict, reported, run
from benchmarks.published_plans import plan_path, program_of, refuse_overfull, searched
from benchmarks.published_rows import (
    Case,
    Row,
    cluster_of,
    even_layers,
    pipelines,
    read_cases,
    torchtitan_schedules,
    torchtitan_stages,
)
from benchmarks.steady import Carried, at_microbatches, few_microbatches, priced
from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.errors import InfeasibleError
from paraplan.ir.execution.rank_program import RankProgram, StepKind
from paraplan.ir.plan import Plan
from paraplan.jobs.files import read_with_programs
from paraplan.lowering import lower

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
        {"name": "405B", "parallel": {"fsdp": 2, "tp": 8, "pp": 4}, "gpus": 64, "local_batch": 8,
         "dtype": "float8 linear", "recompute": "full", "compile": True, "tokens_per_s_per_gpu": 100,
         "schedule": "interleaved-1f1b"},
        {"name": "8B", "parallel": {"fsdp": 4, "cp": 2}, "gpus": 8, "local_batch": 1, "sequence": 256,
         "dtype": "bfloat16", "recompute": "full", "compile": False, "tokens_per_s_per_gpu": 100},
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in (("a_gpt", GPT), ("b_zero", ZERO), ("c_llama", LLAMA)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return tmp_path


def test_rows_become_pins(folder: Path) -> None:
    tiny, deep, zero, llama, long = read_cases(folder)
    both = {"sp": True, "overlap": 4, "reduce_dtype": "fp32"}
    assert (tiny.cluster, tiny.pins) == ("4xH100", {"dp": 2, "tp": 2, **both})
    assert tiny.free == (({"zero": 1}, {"zero": 0}),)
    assert tiny.work == pytest.approx(72e-12 * 8 * 64 * 2 * 64 * 64 * (1 + 64 / 384 + 256 / (12 * 2 * 64)))
    assert (deep.cluster, deep.pins) == ("8xH100:2", {"dp": 4, "tp": 2, **both, "pp": 2})
    assert zero.pins == {"dp": 16, "recompute": "full", "zero": 3, "microbatches": 2}
    assert zero.work == pytest.approx(96e-12 * 64 * 64 * 2 * 64 * 64 * (1 + 64 / 384 + 256 / (16 * 2 * 64)))
    assert (zero.cluster, zero.precision) == ("8xA100-80:2", "fp16")
    assert (llama.cluster, llama.batch, llama.work, llama.precision) == ("8xH100-HBM2e-96:8", 16, 16 * 128, "fp8")
    pipeline = {"pp": 4, "zero": 1, "microbatches": 4}
    both = {"recompute": "full-early-stop", "reduce_dtype": "fp32"}
    assert llama.pins == {"dp": 2, "tp": 8, "sp": True, **both} | pipeline | {"compiled": True}
    assert llama.free == (torchtitan_schedules(126, 4, "interleaved-1f1b"),)
    shape = {"dp": 4, "zero": 3, "cp": 2, "cp_mode": "stripes"}
    assert long.pins == shape | both | {"microbatches": 1, "compiled": False}
    assert (long.batch, long.seq, long.name) == (4, 256, "8B 4x2 at 256")


def test_a_pipeline_of_torchtitan_has_the_schedule_it_says() -> None:
    def named(said: str) -> list[tuple[str, int]]:
        return [(each["schedule"], len(each["stages"])) for each in torchtitan_schedules(16, 2, said)]

    assert named("1f1b") == [("1f1b", 2)]
    assert named("interleaved-1f1b") == [("interleaved", 4)]
    assert named("") == [*named("1f1b"), *named("interleaved-1f1b")]


def test_layers_left_over_go_to_stages_after_the_first() -> None:
    assert torchtitan_stages(6, 4) == ((0, 3), (3, 7), (7, 11), (11, 14))  # 1, 2, 2 and 1, and both ends
    assert torchtitan_stages(4, 2) == even_layers(4, 2)


def test_a_file_without_rows_is_named(folder: Path) -> None:
    (folder / "d.json").write_text("[1, 2]")
    with pytest.raises(SystemExit, match=r"d\.json: not a file of published rows"):
        read_cases(folder)


def test_a_row_of_2021_that_states_its_microbatch_is_not_interleaved(tmp_path: Path) -> None:
    row = {"name": "m", "scheme": "ptd", "tp": 2, "pp": 2, "gpus": 16, "batch": 64, "tflops_per_gpu": 3.0}
    models = {"m": {"layers": 4, "hidden": 64, "heads": 4}}
    told = {**ZERO, "models": models, "rows": [{**row, "microbatch": 1}, row]}
    (tmp_path / "told.json").write_text(json.dumps(told))
    schedules = [[each["schedule"] for each in case.free[0]] for case in read_cases(tmp_path)]
    assert schedules == [["1f1b"], ["interleaved", "1f1b"]]


def test_pipelines_are_cut_by_layers_and_interleaved_where_that_is_open() -> None:
    assert even_layers(4, 2) == ((0, 5), (5, 10))
    schedules, sizes = pipelines(layers=12, pp=2, batch=4, stages_per_position=None, microbatch=1)
    assert sizes == ({"microbatches": 4},)
    assert schedules == (
        {"schedule": "interleaved", "stages": even_layers(12, 12)},
        {"schedule": "1f1b", "stages": even_layers(12, 2)},
    )
    assert pipelines(12, 2, 4, 1, 1) == (schedules[1:], sizes)
    assert pipelines(12, 2, 4, None, 2) == (schedules, ({"microbatches": 2},))
    assert pipelines(12, 2, 3, None, 1) == (schedules[1:], ({"microbatches": 3},))


def test_a_row_is_planned_as_pinned(folder: Path, tmp_path: Path) -> None:
    tiny = read_cases(folder)[0]
    row = predict(tiny, 10.0, tmp_path)
    plan, programs = read_with_programs(plan_path(tmp_path, tiny))
    assert simulate_plan(plan, programs).step_s == row["step_s"]
    assert plan.cluster.groups[0].device.clock_share > 0
    assert row["predicted"] == pytest.approx(tiny.work / row["step_s"] / 4)
    assert row["error_percent"] == pytest.approx(100 * (row["predicted"] - 1.0))


def test_the_fastest_of_what_a_pipeline_leaves_open_counts(folder: Path) -> None:
    row = predict(read_cases(folder)[1], 10.0)
    steps = [float(text.split(": ")[1].split(" s")[0]) for text in row["tried"] if text.endswith(" s")]
    assert len(row["tried"]) == 3  # interleaved and plain, ZeRO-1 and none
    assert row["step_s"] == pytest.approx(min(steps), rel=1e-3)


def test_a_run_goes_on_where_it_was_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def counted(case: Case, time_limit_s: float, plans: Path | None) -> Row:
        assert plans is None
        asked.append(case.name)
        row = {"file": case.file, "row": case.name, "published": case.published, "chosen": "as told"}
        return row | {
            "predicted": 2 * case.published,
            "error_percent": 100.0,
            "rate_slope": 1.0,
            "device": "H100",
            "cpu_s": 1.0,
        }

    monkeypatch.setattr("benchmarks.published.predict", counted)
    given = ["--published", str(folder), "--json", str(tmp_path / "rows.out")]
    assert run([*given, "--only", "a_gpt tiny"]) == 0
    assert run([*given, "--resume"]) == 0
    assert asked == ["tiny 4", "deep 16", "m zero3 16", "405B 2x8x4 float8 compiled", "8B 4x2 at 256"]
    assert "mean absolute error: 100.0 %" in capsys.readouterr().out


def test_rows_say_whose_kernels_they_run(folder: Path) -> None:
    """H100 rows of Megatron-LM run Transformer Engine's, those of 2022 apex', all others torch's."""
    row = {"name": "n", "heads": 4, "hidden": 64, "layers": 2, "gpus": 8, "batch": 8, "iteration_s": 1.0}
    later = {key: value for key, value in ZERO.items() if key != "recompute"}
    (folder / "d_later.json").write_text(json.dumps(later | {"rows": [row | {"recompute": "selective"}]}))
    cases = read_cases(folder)
    assert [case.kernels for case in cases] == ["transformer-engine", "transformer-engine", "", "", "", "apex"]
    assert [cluster_of(case).groups[0].device.kernels for case in cases] == [case.kernels for case in cases]


def test_nothing_runs_beside_the_gathers_of_old_software(folder: Path) -> None:
    tiny, _, zero, *_ = read_cases(folder)
    links = [cluster_of(case).groups[0].in_node for case in (tiny, zero)]
    assert [link.device_share for link in links] == [32 / 132, 1.0] and links[1].latency_s > 40e-6 > links[0].latency_s


def test_few_microbatches_foretell_many(folder: Path) -> None:
    deep = read_cases(folder)[1]
    pins = deep.pins | {"overlap": 1, "zero": 1, "schedule": "interleaved", "stages": even_layers(4, 4)}
    case = replace(deep, batch=192, free=(), pins=pins | {"microbatches": 48})
    assert [few_microbatches("interleaved", count, 2) for count in (24, 48)] == [24, 4]
    row = predict(case, 10.0)
    few = searched(case, pins | {"microbatches": 4}, 16, cluster_of(case), 10.0)
    whole = priced(at_microbatches(few, program_of(case)[0], 48)).prediction
    assert whole is not None and row["drift"] < 1e-3  # small stages: messages are slower, and show after eight rounds
    assert (row["step_s"], row["compute_s"]) == pytest.approx((whole.step_s, whole.compute_s), rel=1e-3)
    assert row["peak_gib"] == pytest.approx(max(whole.peak_bytes) / 2**30, rel=0.01)
    _check_kept_logits(few)


def _check_kept_logits(plan: Plan) -> None:
    """The last position's logits of four microbatches, of 64 tokens and the 256 words or half of them, in bfloat16."""
    programs = lower(plan)
    kept = tuple(with_logits_kept(each, 256) for each in programs)
    assert kept[0] is programs[0]
    ends = [simulate_plan(plan, each).traces[-1].memory[-1].live_bytes for each in (programs, kept)]
    (logits,) = (
        block.values[block.saved[-1]] for name, block in kept[-1].blocks.items() if block != programs[-1].blocks[name]
    )
    assert logits.dtype == "bfloat16" and math.prod(logits.shape) in (64 * 128, 64 * 256)
    assert ends[1] - ends[0] == 4 * logits.nbytes
    _check_kept_messages(plan, programs)


def _check_kept_messages(plan: Plan, programs: tuple[RankProgram, ...]) -> None:
    """What is received stays to the end; the last product of a layer, to the layer's backward."""
    told = [simulate_plan(plan, [keep(each) for each in programs]).traces for keep in (lambda x: x, *KEEPERS)]
    for program, plain, received, products in zip(programs, *told, strict=True):
        messages = [program.transfers[step.transfer] for step in program.steps if step.kind is StepKind.RECV]
        arrives = sum(each.nbytes for each in messages if each.nbytes > 8)  # without losses
        assert arrives and received.memory[-1].live_bytes - plain.memory[-1].live_bytes == arrives
        assert products.memory[-1].live_bytes == plain.memory[-1].live_bytes
        assert products.peak_bytes > plain.peak_bytes


KEEPERS = (with_messages_kept, with_last_products_kept)


def test_orderings_and_mean_errors() -> None:
    rows = [
        {"file": "a", "published": 1.0, "predicted": 2.0, "error_percent": 100.0},
        {"file": "a", "published": 2.0, "predicted": 3.0, "error_percent": 50.0},
        {"file": "a", "published": 3.0, "predicted": 1.0, "error_percent": -66.0},
        {"file": "b", "published": 1.0, "predicted": 4.0, "error_percent": 300.0},
        {"file": "b", "published": 9.0, "chosen": "no plan fits"},
    ]
    assert orderings(rows) == (1, 3)
    assert mean_absolute_error(rows) == pytest.approx(129.0)


def test_a_file_is_left_out_of_what_is_fitted() -> None:
    def row(file: str, device: str, log_error: float, slope: float) -> Row:
        return {"file": file, "device": device, "published": 1.0, "predicted": math.exp(log_error), "rate_slope": slope}

    found = left_out([row("a", "A100", -0.05, 1.0), row("b", "H100", -0.08, 0.8), row("c", "A100", 0.02, 0.5)])
    # without a, c asks for rates of exp(-0.04); without b or c, a for exp(0.05): its slope is more than that of c
    assert found["a"] == pytest.approx(-math.expm1(-0.09))
    assert found["b"] == pytest.approx(-math.expm1(-0.08 + 0.8 * 0.05))
    assert found["c"] == pytest.approx(math.expm1(0.02 + 0.5 * 0.05))


def test_what_sources_report_is_answered() -> None:
    each = REPORTED[0]
    rows = [
        {"file": each.file, "row": each.faster, "published": 3.0, "predicted": 1.0},
        {"file": each.file, "row": each.slower, "published": 1.0, "predicted": 2.0},
    ]
    assert reported(rows) == [f"{each.says}: NO (published 3.000, predicted 0.500, -83.3%)"]


def test_a_plan_above_its_device_s_memory_is_no_prediction(tmp_path: Path) -> None:
    (tmp_path / "megatron.json").write_text(json.dumps(GPT))
    case = read_cases(tmp_path)[0]
    plan = searched(case, case.pins | {"microbatches": 1, "zero": 1}, case.batch, cluster_of(case), 60.0)
    refuse_overfull(Carried(plan, 1))
    assert plan.prediction is not None
    peak = max(plan.prediction.peak_bytes)
    device = msgspec.structs.replace(plan.cluster.groups[0].device, memory_bytes=peak - 1)
    cluster = msgspec.structs.replace(
        plan.cluster, groups=(msgspec.structs.replace(plan.cluster.groups[0], device=device),)
    )
    with pytest.raises(InfeasibleError, match="peaks at"):
        refuse_overfull(Carried(msgspec.structs.replace(plan, cluster=cluster), 1))
