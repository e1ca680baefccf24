"""Published training results, predicted through the planner: a row's parallelism pinned, the rest as its user would.

    python -m benchmarks.published --published FOLDER [--only PATTERN] [--json FILE]

FOLDER holds JSON files of published rows (device, sequence, model, rows with degrees and what was measured; nothing
here needs them otherwise). Models are captured from meta. What a row leaves open (ZeRO level where none is named,
microbatches) is the fastest that fits. Rows with pipelines say `needs stages`; fp8 rows `needs fp8`, for no plan
computes in it. `torch.compile` is not modelled: a row with it is priced like one without.

`error_percent` is signed, predicted over published. Orderings: of all pairs of rows of a file, how many the prediction
ranks as published. Left out: the one scale that fits all other files best (the median), applied to this one; nothing in
the package is changed by it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import paraplan as pp
from paraplan.ir.errors import ParaplanError
from paraplan.jobs.models import hf_model

Row = dict[str, Any]

DEVICES = {"H100-SXM-80GB": "H100", "A100-SXM-80GB": "A100-80", "H100-96GB-HBM2e-500W": "H100-HBM2e-96"}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}
LLAMA: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
             "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
COLUMNS = ("file", "row", "pins", "published", "predicted", "unit", "error_percent", "chosen", "seconds")


@dataclass(frozen=True)
class Case:
    """A published row in the planner's terms.

    Attributes:
        file, name: which.
        settings, family: of the model.
        cluster: by name.
        batch, seq, precision: of a step.
        pins: what the row states.
        unit: of what was published, "TFLOP/s" or "tokens/s", per GPU.
        published: in it.
        work: of a step, in the unit's numerator (teraflops, tokens).
        gpus: how many.
        needs: why no plan can be made of it; "" where one can.
    """

    file: str
    name: str
    family: str
    settings: dict[str, Any]
    cluster: str
    batch: int
    seq: int
    precision: str
    pins: dict[str, Any]
    unit: str
    published: float
    work: float
    gpus: int
    needs: str = ""


def gpt_case(file: str, data: Row, row: Row) -> Case:
    """A GPT model, judged by TFLOP/s."""
    sizes = {**data, **data.get("models", {}).get(row.get("name", ""), {}), **row}
    h, layers, s, v, b = (int(sizes[key]) for key in ("hidden", "layers", "sequence", "vocab", "batch"))
    again = "recompute" in data or data.get("includes_recompute", False)
    flops = (
        (96 if again else 72) * b * s * layers * h * h * (1 + s / (6 * h) + v / ((16 if again else 12) * layers * h))
    )
    gpus, tp, pp_ = int(row["gpus"]), int(sizes.get("tp", 1)), int(sizes.get("pp", 1))
    pins: dict[str, Any] = {"dp": gpus // (tp * pp_), **({"tp": tp, "sp": True} if tp > 1 else {})}
    if again:
        pins["recompute"] = "full"
    if row.get("scheme") == "zero3":
        pins |= {"zero": 3, "microbatches": b // (gpus * int(row["microbatch"]))}
    settings = {
        "n_embd": h, "n_layer": layers, "n_head": int(sizes["heads"]), "vocab_size": v, "n_positions": s,
        "tie_word_embeddings": again, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    name = " ".join(str(part) for part in (row.get("name", "530B"), row.get("scheme", ""), gpus) if part)
    return Case(
        file, name, "gpt2", settings, _cluster(data, gpus), b, s, PRECISIONS[str(data["dtype"])], pins, "TFLOP/s",
        float(row["tflops_per_gpu"]), flops / 1e12, gpus, "stages" if pp_ > 1 else "",
    )  # fmt: skip


def llama_case(file: str, data: Row, row: Row) -> Case:
    """A Llama, judged by tokens per second."""
    parallel, gpus, s = row["parallel"], int(row["gpus"]), int(data["sequence"])
    batch = int(row["local_batch"]) * int(parallel["fsdp"])
    tp = int(parallel.get("tp", 1))
    pins: dict[str, Any] = {"dp": int(parallel["fsdp"]), "zero": 3, **({"tp": tp, "sp": True} if tp > 1 else {})}
    pins["recompute"] = "full" if row["recompute"] == "full" else "selective"
    needs = "stages" if "pp" in parallel else "fp8" if "float8" in row["dtype"] else ""
    name = f"{row['name']} {'x'.join(map(str, parallel.values()))}{' compiled' if row['compile'] else ''}"
    return Case(
        file, name, "llama", {**LLAMA[row["name"]], "max_position_embeddings": s, "tie_word_embeddings": False},
        _cluster(data, gpus), batch, s, "bf16", pins, "tokens/s", float(row["tokens_per_s_per_gpu"]), batch * s, gpus,
        needs,
    )  # fmt: skip


def _cluster(data: Row, gpus: int) -> str:
    per_node, kind = int(data["gpus_per_node"]), DEVICES[data["device"]]
    return f"{per_node}x{kind}:{gpus // per_node}" if gpus > per_node else f"{gpus}x{kind}"


def read_cases(folder: Path) -> list[Case]:
    """Every row of every file."""
    found = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        make = llama_case if data["model"] == "llama3.1" else gpt_case
        found += [make(path.stem, data, row) for row in data["rows"]]
    return found


def predict(case: Case, time_limit_s: float) -> Row:
    """The row's plan and what it says of it."""
    started = time.perf_counter()
    row: Row = {
        "file": case.file, "row": case.name, "unit": case.unit, "published": case.published,
        "pins": " ".join(f"{key}={value}" for key, value in case.pins.items()),
    }  # fmt: skip
    if case.needs:
        return {**row, "chosen": f"needs {case.needs}"}
    model = hf_model(case.family, case.settings, meta=True)
    best = None
    for zero in (case.pins["zero"],) if "zero" in case.pins else (0, 1):
        try:
            plan = pp.compile(
                model, case.cluster, batch=case.batch, seq=case.seq, precision=case.precision, optimizer="adamw",
                time_limit_s=time_limit_s, **{**case.pins, "zero": zero},
            )  # fmt: skip
        except ParaplanError as fault:
            row["chosen"] = f"{type(fault).__name__}: {str(fault)[:120]}"
            continue
        if best is None or plan.prediction.step_s < best.prediction.step_s:
            best, row["chosen"] = plan, f"zero={zero} microbatches={plan.data.num_microbatches}"
    row["seconds"] = time.perf_counter() - started
    if best is None:
        return row
    predicted = case.work / best.prediction.step_s / case.gpus
    return {
        **row, "predicted": predicted, "error_percent": 100 * (predicted / case.published - 1),
        "step_s": best.prediction.step_s, "compute_s": best.prediction.compute_s,
        "exposed_comm_s": best.prediction.exposed_comm_s, "peak_gib": max(best.prediction.peak_bytes) / 2**30,
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


def left_out(rows: list[Row]) -> dict[str, float]:
    """Per file, the median error once predictions are scaled by what fits the other files best."""
    done = [row for row in rows if "predicted" in row]
    found = {}
    for file in dict.fromkeys(row["file"] for row in done):
        others = [row["published"] / row["predicted"] for row in done if row["file"] != file]
        if others:
            scale = statistics.median(others)
            errors = [abs(scale * row["predicted"] / row["published"] - 1) for row in done if row["file"] == file]
            found[file] = statistics.median(errors)
    return found


def run(argv: list[str] | None = None) -> int:
    """Predict, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published")
    parser.add_argument("--published", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="SECONDS")
    options = parser.parse_args(argv)
    cases = [case for case in read_cases(options.published) if re.search(options.only, f"{case.file} {case.name}")]
    rows = []
    for case in cases:
        rows.append(predict(case, options.time_limit))
        print(f"{case.file} {case.name}: {rows[-1].get('predicted', rows[-1]['chosen'])}", file=sys.stderr, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    table = Table(*COLUMNS, title="published")
    for row in rows:
        cells = (row.get(column, "–") for column in COLUMNS)
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    console = Console(width=180)
    console.print(table)
    right, total = orderings(rows)
    console.print(f"orderings: {right} of {total} pairs as published")
    for file, error in left_out(rows).items():
        console.print(f"left out {file}: median error {error:.1%} after scaling by the others")
    return 0


if __name__ == "__main__":
    raise SystemExit(run())
