"""Predicted against measured steps of plans on two processes, each pinned to a core of its own, with profiled costs.

A small GPT-2's local ops are measured twice, on both cores at once, and the collectives between two processes, into one
profile; plans made with it (data parallelism and ZeRO, tensor, sequence and context parallelism, pipelines) then run
with real kernels. Time is the wall clock's, until the slower rank has ended its step, update included: on a machine
that does anything else, or with fewer than two cores to itself, the figures say nothing. `load` is the machine's before
a case. The last row has the median and worst error.

    python -m benchmarks.pinned [--only PATTERN] [--json FILE [--resume]]
    ROUNDS=15 steps a plan, PROFILE=FILE a profile to keep and go on from (environment)
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import paraplan as pp
from benchmarks.profiles import BATCH, SEQ, made
from benchmarks.table import Row, main
from paraplan.ir.cluster import ClusterSpec
from paraplan.ir.trace import capture
from paraplan.jobs.links import measure_links
from paraplan.jobs.models import hf_batch
from paraplan.jobs.profile import profile_program
from paraplan.runtime.launch import spawn_local

MODEL, MICROBATCHES = "gpt2", (1, 2, 4)
COLUMNS = (
    *("case", "predicted_ms", "measured_ms", "quickest_ms", "error_percent", "load", "plans"),
    "worst_percent",
)
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2, "zero": 0, "microbatches": 1},
    "dp, 2 microbatches": {"dp": 2, "zero": 0, "microbatches": 2},
    "zero1": {"dp": 2, "zero": 1, "microbatches": 1},
    "zero2": {"dp": 2, "zero": 2, "microbatches": 1},
    "zero3": {"dp": 2, "zero": 3, "microbatches": 1},
    "tp": {"tp": 2, "microbatches": 1},
    "tp+sp": {"tp": 2, "sp": True, "microbatches": 1},
    "cp ring": {"cp": 2, "cp_mode": "ring", "microbatches": 1},
    "pp 1f1b": {"pp": 2, "schedule": "1f1b", "microbatches": 4},
    "pp zb-h1": {"pp": 2, "schedule": "zb-h1", "microbatches": 4},
    "own": {},
}


@cache
def measured() -> tuple[Path, ClusterSpec]:
    """The profile, and this machine as two devices with fitted links."""
    kept = os.environ.get("PROFILE")
    path = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="paraplan-pinned-")) / "profile.db"
    torch.set_num_threads(1)
    model = made(MODEL)
    for again in (False, True):
        for microbatches in MICROBATCHES:
            program = capture(model.model, hf_batch(model.model, BATCH // microbatches, SEQ))
            profile_program(program, path, ways=2, processes=2, again=again)
    return path, measure_links(2, 16 << 20, path).cluster


def timed(name: str) -> Row:
    """One plan, priced and run."""
    path, cluster = measured()
    plan = pp.compile(
        made(MODEL).model, cluster, batch=BATCH, seq=SEQ, recompute="none", profile=path, **PLANS[name]
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file, found = Path(folder) / "plan.json", Path(folder) / "row.json"
        plan.save(file)
        load, rounds = os.getloadavg()[0], os.environ.get("ROUNDS", "15")
        code = spawn_local(2, "benchmarks.pinned_rank", (MODEL, str(file), rounds, str(found)))
        if code or not found.exists():
            raise RuntimeError(f"{name}: a rank ended with code {code}")
        steps = json.loads(found.read_text())
    middle, predicted = statistics.median(steps), plan.prediction.step_s
    return {
        "predicted_ms": 1e3 * predicted, "measured_ms": 1e3 * middle, "quickest_ms": 1e3 * min(steps),
        "error_percent": 100 * (predicted / middle - 1), "load": load, "notes": list(plan.data.notes),
        "rounds": len(steps),
    }  # fmt: skip


def summary(rows: Sequence[Row]) -> Row:
    """All plans."""
    errors = [abs(row["error_percent"]) for row in rows]
    return {"plans": len(rows), "error_percent": statistics.median(errors), "worst_percent": max(errors)}


def cases() -> dict[str, Callable[[], Row]]:
    """Every plan."""
    return {name: lambda name=name: timed(name) for name in PLANS}


if __name__ == "__main__":
    raise SystemExit(main("pinned", cases(), COLUMNS, summary=summary))
