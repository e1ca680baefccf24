"""Published training results, predicted through the planner: a row's parallelism pinned, the rest as its user would.

    python -m benchmarks.published --published FOLDER [--only PATTERN] [--json FILE [--resume]]

FOLDER holds JSON files of published rows; `published_rows` says how they are read. A model is captured from meta at
three layers, once per architecture and batch, and made as deep as it is (`deepen`). Of what a row leaves open the
fastest that fits counts, never the best match; choices are made one after another.
Only PATTERN (searched in "file row") are predicted; with --resume those already in --json are kept.

`memory_gib` is what the caching allocator is predicted to reserve, where the source says what it did.
`error_percent` is signed, predicted over published. Orderings: of all pairs of rows of a file, how many the prediction
ranks as published, and those that sources report by name. Left out: the one scale that fits all other files best (the
median), applied to this one; nothing in the package is changed by it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.deepen import CAPTURED, deepen
from benchmarks.megatron_gpt import GPTSettings, gpt_batch, gpt_model
from benchmarks.published_rows import DEPTH, Case, Row, read_cases
from benchmarks.torchtitan_llama import TorchtitanLlama
from paraplan.api import as_cluster, versions
from paraplan.cost_models.predict import with_reserved
from paraplan.ir.errors import ParaplanError
from paraplan.ir.lower import lower
from paraplan.ir.plan import OPTIMIZERS, ModelRef, Plan
from paraplan.ir.program import Program
from paraplan.ir.trace import capture
from paraplan.jobs.inputs import hf_batch
from paraplan.jobs.models import hf_model, model_ref
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search

COLUMNS = ("file", "row", "published", "predicted", "unit", "error_percent", "exposed", "bubble", "chosen", "cpu_s")


class Ordering(NamedTuple):
    """Two rows of a file, the first of which is published as the faster one."""

    says: str
    file: str
    faster: str
    slower: str


REPORTED = (
    Ordering("ZeRO-3 falls as GPUs double twice", "megatron_sc21_a100", "174.6B zero3 384", "174.6B zero3 1536"),
    Ordering("PTD falls as GPUs double twice", "megatron_sc21_a100", "174.6B ptd 384", "174.6B ptd 1536"),
    Ordering("PTD above ZeRO-3 at 384", "megatron_sc21_a100", "174.6B ptd 384", "174.6B zero3 384"),
    Ordering("PTD above ZeRO-3 at 1536", "megatron_sc21_a100", "174.6B ptd 1536", "174.6B zero3 1536"),
    Ordering("PTD above ZeRO-3, 530B", "megatron_sc21_a100", "529.6B ptd 560", "529.6B zero3 640"),
    Ordering("175B falls from 96 to 4608", "megatron_core_h100", "175B scaling 96", "175B scaling 4608"),
)


@lru_cache(maxsize=2)
def captured(family: str, settings: str, batch: int, seq: int, precision: str) -> tuple[Program, ModelRef]:
    """A model by its settings as JSON, so that equal ones are captured once."""
    if family == "megatron_gpt":
        model: nn.Module = gpt_model(GPTSettings(**json.loads(settings)))
        inputs = gpt_batch(batch, seq)
    elif family == "torchtitan_llama":
        chosen = json.loads(settings)
        model = TorchtitanLlama(chosen, chosen.pop("loss_parallel"))
        inputs = gpt_batch(batch, seq)
    else:
        model = hf_model(family, json.loads(settings), meta=True)
        inputs = hf_batch(model, batch, seq)
    program = capture(model, inputs, precision=precision)
    return program, model_ref(model, program, made_here=True)


def program_of(case: Case) -> tuple[Program, ModelRef]:
    """The row's model, whole."""
    settings = json.dumps({**case.settings, DEPTH[case.family]: min(case.layers, CAPTURED)})
    program, reference = captured(case.family, settings, case.batch, case.seq, case.precision)
    return deepen(program, case.layers) if case.layers > CAPTURED else program, reference


def predict(case: Case, time_limit_s: float) -> Row:
    """The row's plan and what it says of it."""
    started = time.process_time()
    row: Row = {
        "file": case.file, "row": case.name, "unit": case.unit, "published": case.published,
        "pins": " ".join(f"{key}={value}" for key, value in case.pins.items()),
    }  # fmt: skip
    program, reference = program_of(case)
    job = Job(
        program=program, cluster=as_cluster(case.cluster), optimizer=OPTIMIZERS["adamw"], model=reference,
        versions=versions(),
    )  # fmt: skip
    tried: dict[str, str] = {}
    best: Plan | None = None
    chosen = [group[0] for group in case.free]
    for place, group in enumerate(case.free or (({},),)):
        for option in group:
            trial = [*chosen[:place], option, *chosen[place + 1 :]]
            pins = {key: value for each in trial for key, value in each.items()}
            if _text(pins) in tried:
                continue
            try:
                plan = search(job, Constraints(**case.pins, **pins), time_limit_s, certify=False).plan
            except ParaplanError as fault:
                tried[_text(pins)] = f"{type(fault).__name__}: {str(fault)[:200]}"
                continue
            tried[_text(pins)] = f"{_step_s(plan):.4g} s"
            if best is None or _step_s(plan) < _step_s(best):
                best, chosen = plan, trial
    said = [f"{text}: {found}" for text, found in tried.items()]
    row |= {"cpu_s": time.process_time() - started, "tried": said, "chosen": said[0]}
    return row if best is None else row | _said(case, best)


def _text(free: Row) -> str:
    """Free choices, short."""
    return " ".join(
        f"{key}={len(value) if key == 'stages' else value}" for key, value in free.items()
    ) or "as pinned"  # fmt: skip


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def _said(case: Case, plan: Plan) -> Row:
    """What a plan predicts of a row."""
    said = plan.prediction
    assert said is not None
    predicted = case.work / said.step_s / case.gpus
    remade = any(choice.activations for stage in plan.stages for choice in stage.choices)
    idle = said.step_s - said.compute_s - said.exposed_comm_s - said.exposed_copy_s
    memory: Row = {}
    if case.memory_gib:
        told = with_reserved(plan, lower(plan)).prediction
        assert told is not None
        reserved = max(told.reserved_bytes) / 2**30
        memory = {
            "memory_published_gib": case.memory_gib, "memory_gib": reserved,
            "memory_error_percent": 100 * (reserved / case.memory_gib - 1),
        }  # fmt: skip
    return memory | {
        "predicted": predicted, "error_percent": 100 * (predicted / case.published - 1), "step_s": said.step_s,
        "compute_s": said.compute_s, "exposed": said.exposed_comm_s / said.step_s, "bubble": idle / said.step_s,
        "peak_gib": max(said.peak_bytes) / 2**30,
        "chosen": f"{plan.schedule.name} stages={len(plan.stages)} microbatches={plan.num_microbatches}"
        + (" recomputing" if remade else ""),
    }  # fmt: skip


def orderings(rows: list[Row]) -> tuple[int, int]:
    """(pairs ranked as published, pairs) among predicted rows of each file that were published unlike."""
    right = total = 0
    done = [row for row in rows if "predicted" in row]
    for a, b in itertools.combinations(done, 2):
        if a["file"] == b["file"] and a["published"] != b["published"]:
            total += 1
            right += (a["predicted"] < b["predicted"]) == (a["published"] < b["published"])
    return right, total


def reported(rows: list[Row]) -> list[str]:
    """What sources say by name, and what we predict of it."""
    done = {(row["file"], row["row"]): row for row in rows if "predicted" in row}
    lines = []
    for each in REPORTED:
        pair = [done.get((each.file, name)) for name in (each.faster, each.slower)]
        if pair[0] is None or pair[1] is None:
            continue
        was, now = (pair[0][key] / pair[1][key] for key in ("published", "predicted"))
        lines.append(f"{each.says}: {'yes' if now > 1 else 'NO'} (published {was:.3f}, predicted {now:.3f})")
    return lines


def by_value(rows: list[Row]) -> list[Row]:
    """Predicted rows that are judged by their value; those of ZeRO-3 of 2021 are by their order alone."""
    return [row for row in rows if "predicted" in row and "zero3" not in row.get("row", "")]


def mean_absolute_error(rows: list[Row]) -> float:
    """Of all rows judged by value, in percent."""
    return statistics.fmean([abs(row["error_percent"]) for row in by_value(rows)] or [0.0])


def left_out(rows: list[Row]) -> dict[str, float]:
    """Per file, the median error once predictions are scaled by what fits the other files best."""
    done = by_value(rows)
    found = {}
    for file in dict.fromkeys(row["file"] for row in done):
        others = [row["published"] / row["predicted"] for row in done if row["file"] != file]
        if others:
            scale = statistics.median(others)
            errors = [abs(scale * row["predicted"] / row["published"] - 1) for row in done if row["file"] == file]
            found[file] = statistics.median(errors)
    return found


def show(rows: list[Row]) -> None:
    """Print everything."""
    table = Table(*COLUMNS, title="published")
    for row in rows:
        cells = (row.get(column, "–") for column in COLUMNS)
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    console = Console(width=200)
    console.print(table)
    for row in rows:
        if "memory_gib" in row:
            told = f"{row['memory_gib']:.1f} GiB of {row['memory_published_gib']:.1f}"
            console.print(f"reserved, {row['row']}: {told} ({row['memory_error_percent']:+.1f} %)")
    worst = max((abs(row["error_percent"]) for row in by_value(rows)), default=0.0)
    console.print(f"mean absolute error: {mean_absolute_error(rows):.1f} %, at most {worst:.1f} %")
    right, total = orderings(rows)
    console.print(f"orderings: {right} of {total} pairs as published")
    for line in reported(rows):
        console.print(f"  {line}")
    for file, error in left_out(rows).items():
        console.print(f"left out {file}: median error {error:.1%} after scaling by the others")


def run(argv: list[str] | None = None) -> int:
    """Predict, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published")
    parser.add_argument("--published", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="PATTERN", help='rows whose "file row" holds it')
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="keep the rows already in --json")
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="SECONDS")
    options = parser.parse_args(argv)
    if options.resume and options.json is None:
        parser.error("--resume continues a file: give --json as well")
    old = json.loads(options.json.read_text()) if options.resume and options.json.exists() else []
    known: dict[tuple[str, str], Row] = {(row["file"], row["row"]): row for row in old}
    cases = read_cases(options.published)
    for case in cases:
        key = (case.file, case.name)
        if key in known or not re.search(options.only, " ".join(key)):
            continue
        row = known[key] = predict(case, options.time_limit)
        print(" ".join(key), row.get("predicted", row["chosen"]), row.get("tried", ""), file=sys.stderr, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(list(known.values()), indent=1) + "\n")
    show([known[key] for case in cases if (key := (case.file, case.name)) in known])
    return 0


if __name__ == "__main__":
    raise SystemExit(run())
