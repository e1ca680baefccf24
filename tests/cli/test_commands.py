"""The four commands on a tiny model: what they print, write and promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paraplan import Plan
from paraplan.jobs.files import read_plan, write_plan
from paraplan.jobs.run import RunResult
from paraplan.terminal.run_output import run_table

PLAN_KEYS = ["step_s", "peak_bytes", "bound_s", "gap", "status", "solve_s", "total_s", "tokens_per_s", "mfu"]
RUN_KEYS = {
    "first_step",
    "loss",
    "max_rel_err_loss",
    "max_rel_err_grad",
    "max_rel_err_param",
    "max_rel_err_eager",
    "eager_how",
    "check_failure",
    "predicted_peak_bytes",
    "measured_peak_bytes",
    "step_s",
}
ROOT = Path(__file__).parents[2]


def last_json(outcome: Any) -> dict[str, Any]:
    assert outcome.code == 0, outcome
    return json.loads(outcome.out.splitlines()[-1])  # type: ignore[no-any-return]


def test_plan_says_what_it_found(here: Path, command: Any) -> None:
    outcome = command("plan", "zoo:net", "local:2", "--zero", "3", "--json")
    found = last_json(outcome)
    assert list(found) == PLAN_KEYS
    assert 0 < found["bound_s"] <= found["step_s"]
    assert found["total_s"] >= found["solve_s"] > 0
    assert "ZeRO-3 over dp" in outcome.out
    assert "capturing Net" in outcome.err


def test_equal_input_gives_equal_bytes(here: Path) -> None:
    """In two processes, where sets and dicts of strings hash differently."""
    args = ["plan", "zoo:net", "local:2", "--precision", "fp64", "-o"]
    for seed, name in (("7", "a.json"), ("8", "b.json")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}{os.pathsep}{here}"}
        subprocess.run([sys.executable, "-m", "paraplan.cli", *args, name], env=env, check=True, capture_output=True)
    assert (here / "a.json").read_bytes() == (here / "b.json").read_bytes()


def test_show_memory(plan_file: Path, command: Any) -> None:
    outcome = command("show", "plan.json", "--memory", "--json")
    assert outcome.code == 0, outcome.err
    text, _, last = outcome.out.rstrip().rpartition("\n")
    (told,) = json.loads(last)["classes"]
    (trace,) = Plan.load(plan_file).simulate().traces
    assert sum(part["nbytes"] for part in told["parts"]) == told["peak_bytes"] == trace.peak_bytes
    assert told["ranks"] == [0, 1] and len(told["largest"]) == min(10, told["count"])
    for part in told["parts"]:
        assert part["what"] in text and str(part["nbytes"]) in text
    assert str(trace.peak_bytes) in text and "zoo.py" in text


def test_show_json_is_memory_s(plan_file: Path, command: Any) -> None:
    outcome = command("show", "plan.json", "--json")
    assert outcome.code == 2 and "--memory" in outcome.err


def test_show(plan_file: Path, command: Any) -> None:
    outcome = command("show", "plan.json")
    assert outcome.code == 0
    for words in (
        "Net on local:2",
        "dp 2",
        "up.weight",
        "peak",
        "split over dp (dim 0)",
        "matrix products",
        "optimizer states",
        "all_reduce",
    ):
        assert words in outcome.out, words


def test_simulate(plan_file: Path, command: Any) -> None:
    found = last_json(command("simulate", "plan.json", "--trace", "trace.json", "--json"))
    plan = json.loads(plan_file.read_text())
    assert found["step_s"] == plan["prediction"]["step_s"]
    assert found["peak_bytes"] == max(plan["prediction"]["peak_bytes"])
    assert set(found["busy_s"]) == {"compute", "comm:in_node"}
    events = json.loads((plan_file.parent / "trace.json").read_text())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(found["step_s"] * 1e6)
    elsewhere = last_json(command("simulate", "plan.json", "--cluster", "2xH100", "--json"))
    assert elsewhere["step_s"] < found["step_s"]


def test_run_on_two_processes_equals_one_device(plan_file: Path, command: Any) -> None:
    found = last_json(
        command("run", "plan.json", "--steps", "3", "--model", "zoo:net", "--check", "--clip", "0.1", "--json")
    )
    assert set(found) >= RUN_KEYS
    assert len(found["loss"]) == 3
    assert found["loss"][-1] < found["loss"][0] * 1.5
    for what in ("loss", "grad", "param", "eager"):
        assert found[f"max_rel_err_{what}"] <= 1e-9
    assert found["entries_equal"], found["entries_difference"]
    assert found["measured_peak_bytes"] <= found["predicted_peak_bytes"] <= 1.02 * found["measured_peak_bytes"]


def test_a_run_is_saved_and_resumed_under_another_plan(plan_file: Path, command: Any) -> None:
    alone = command("plan", "zoo:net", "local:1", "--precision", "fp64", "-o", "one.json")
    assert alone.code == 0, alone.err
    given = ("--model", "zoo:net", "--json")
    whole = last_json(command("run", "one.json", "--steps", "4", *given))["loss"]
    begun = last_json(command("run", "plan.json", "--steps", "2", "--save", "c", *given))["loss"]
    rest = command("run", "one.json", "--steps", "2", "--resume", "c", *given)
    assert begun + last_json(rest)["loss"] == pytest.approx(whole, rel=1e-9)
    assert last_json(rest)["first_step"] == 2
    refused = command("run", "one.json", "--resume", "c", "--check", *given)
    assert refused.code == 2 and "--check compares" in refused.err


def test_a_run_that_is_not_the_eager_model_fails(here: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("plan", "zoo:outside", "local:1", "-o", "plan.json").code == 0
    again = ["run", "plan.json", "--steps", "2", "--model", "zoo:outside", "--check", "--json"]
    passed = last_json(command(*again))
    assert passed["check_failure"] == "" and passed["max_rel_err_eager"] < 1e-4
    monkeypatch.setenv("ZOO_SCALE", "1.5")
    failed = command(*again)
    found = json.loads(failed.out.splitlines()[-1])
    assert failed.code == 1 and found["max_rel_err_eager"] > 0.1 and found["max_rel_err_loss"] < 1e-6
    assert "check failed: step 0" in failed.err and "the eager model" in failed.err and "the loss is" in failed.err


@pytest.mark.parametrize("steps", [1, 2])
def test_a_single_step_says_what_its_peak_lacks(steps: int, plan_file: Path) -> None:
    result = RunResult(loss=[1.0] * steps, step_s=1.0, predicted_peak_bytes=200, measured_peak_bytes=[150])
    cells = [cell for column in run_table(Plan.load(plan_file).data, result).columns for cell in column.cells]
    assert any("optimizer's states" in str(cell) for cell in cells) == (steps == 1)


def test_bytes_of_text_are_tokens(here: Path, command: Any) -> None:
    pytest.importorskip("transformers")
    small = ["--set", "n_layer=1", "--set", "n_embd=16", "--set", "n_head=2", "--set", "n_positions=16"]
    made = command(
        "plan", "hf:gpt2", "local:1", *small, "--set", "vocab_size=256", "--batch", "2", "--seq", "16", "-o", "g.json"
    )
    assert made.code == 0, made.err
    (here / "text").mkdir()
    (here / "text" / "a.txt").write_text("to be or not to be " * 10)
    found = last_json(command("run", "g.json", "--data", "text", "--steps", "2", "--json"))
    assert all(4 < loss < 7 for loss in found["loss"])
    (here / "text" / "a.txt").write_text("short")
    assert "less than one sequence of 16" in command("run", "g.json", "--data", "text").err
    fewer = command(
        "plan", "hf:gpt2", "local:1", *small, "--set", "vocab_size=100", "--batch", "2", "--seq", "16", "-o", "f.json"
    )
    assert fewer.code == 0, fewer.err
    assert "vocabulary of 256" in command("run", "f.json", "--data", "text").err


def test_places_compose(here: Path, command: Any) -> None:
    away = ("--states", "host,disk", "--params", "device", "--grads", "disk", "--update", "host")
    made = command("plan", "zoo:net", "local:1", "--precision", "fp64", *away, "-o", "plan.json")
    assert made.code == 0, made.err
    plan = read_plan(here / "plan.json")
    assert {layouts.place.text for layouts in plan.stages[0].params.values()} == {"disk-grads"}
    refused = command("plan", "zoo:net", "local:1", "--states", "device", "--update", "host", "-o", "plan.json")
    assert refused.code == 2 and "give --states host, or --update device" in refused.err


def test_a_peak_above_the_predicted_one_fails_the_check(plan_file: Path, command: Any) -> None:
    plan = read_plan(plan_file)
    assert plan.prediction is not None
    half = tuple(size // 2 for size in plan.prediction.peak_bytes)
    prediction = msgspec.structs.replace(plan.prediction, peak_bytes=half)
    write_plan(msgspec.structs.replace(plan, prediction=prediction), plan_file)
    failed = command("run", "plan.json", "--steps", "2", "--model", "zoo:net", "--check")
    assert failed.code == 1 and "check failed: rank 0 had" in failed.err and "were predicted" in failed.err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--lr", "nan"), "--lr nan: give a number"),
        (("--lr", "-1"), "--lr -1.0"),
        (("--timeout", "0"), "--timeout 0.0: give the seconds that a collective waits"),
        (("--timeout", "inf"), "--timeout inf"),
        (("--clip", "-1"), "--clip -1.0: a number above 0"),
        (("--clip", "nan"), "--clip nan"),
        (("--save", "plan.json"), "--save plan.json: there is a file"),
        (("--save", "plan.json/c"), "--save plan.json/c: there is a file"),
        (("--save", "/proc/c"), "--save /proc/c: nothing can be written in /proc"),
        (("--resume", "none"), "none has no checkpoint that can be read"),
    ],
)
def test_impossible_options_are_refused_before_training(
    given: tuple[str, str], says: str, plan_file: Path, command: Any
) -> None:
    refused = command("run", "plan.json", "--model", "zoo:net", *given)
    assert refused.code == 2 and says in refused.err and "step" not in refused.out


@pytest.mark.parametrize("seconds", ["-1", "0", "nan"])
def test_no_time_to_plan_is_refused(seconds: str, here: Path, command: Any) -> None:
    if seconds != "0":
        refused = command("plan", "zoo:net", "local:2", "--time-limit", seconds)
        assert refused.code == 2 and "give a number of seconds, or 0 for the first plan" in refused.err
    refused = command("compare", "zoo:net", "local:1", "--time-limit", seconds)
    assert refused.code == 2 and "give a number of seconds above 0" in refused.err


def test_no_time_at_all_gives_the_first_plan_that_fits(here: Path, command: Any) -> None:
    outcome = command("plan", "zoo:net", "local:2", "--time-limit", "0", "--json")
    assert outcome.code == 0, outcome
    told = json.loads(outcome.out.splitlines()[-1])
    assert told["step_s"] > 0 and 0 <= told["gap"] <= 1
