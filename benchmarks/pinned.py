"""Predicted against measured steps of plans on two processes, each pinned to a core of its own, with profiled costs.

A small GPT-2's local ops are measured on both cores at once, and the collectives between two processes, into a profile;
plans made with it (data parallelism and ZeRO, tensor, sequence and context parallelism, pipelines) then run with real
kernels, one after another. All of that three times over, each time from nothing: a machine is quicker and slower for
minutes, so that what is predicted and what is measured must both be taken all along. Time is the wall clock's, until
the slower rank has ended its step, update included: on a machine that does anything else, or with fewer than two cores
to itself, the figures say nothing. `predicted_ms` is the mean of the passes, `measured_ms` the median of all steps,
`load` the machine's highest before a case. The last row has the median and worst error.

    python -m benchmarks.pinned [--json FILE]
    ROUNDS=9 steps a plan and pass, PASSES=3 (environment)
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import paraplan as pp
from benchmarks.profiles import BATCH, SEQ, made
from benchmarks.table import Row, main
from paraplan.capture import capture
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.jobs.measuring.measure_links import measure_links
from paraplan.jobs.measuring.profile_ops import CpuShare, profile_program
from paraplan.jobs.models import hf_batch
from paraplan.runtime.transport.launch import spawn_local

MODEL, MICROBATCHES = "gpt2", (1, 2, 4)
COLUMNS = (*("plan", "predicted_ms", "measured_ms", "quickest_ms", "error_percent", "load", "plans", "worst_percent"),)
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


def measured(path: Path) -> ClusterSpec:
    """Fills a profile; this machine as two devices with fitted links."""
    model = made(MODEL)
    for again in (False, True):
        for microbatches in MICROBATCHES:
            program = capture(model.model, hf_batch(model.model, BATCH // microbatches, SEQ))
            profile_program(program, path, ways=2, cpu=CpuShare(processes=2), again=again)
    return measure_links(2, 16 << 20, path).cluster


def timed(name: str, profile: Path, cluster: ClusterSpec) -> tuple[float, list[float]]:
    """One plan's step as priced, and as run, seconds."""
    plan = pp.compile(
        made(MODEL).model, cluster, batch=BATCH, seq=SEQ, recompute="none", profile=profile, **PLANS[name]
    )
    with tempfile.TemporaryDirectory() as folder:
        file, found = Path(folder) / "plan.json", Path(folder) / "row.json"
        plan.save(file)
        code = spawn_local(2, "benchmarks.pinned_rank", (MODEL, str(file), os.environ.get("ROUNDS", "9"), str(found)))
        if code or not found.exists():
            raise RuntimeError(f"{name}: a rank ended with code {code}")
        return plan.prediction.step_s, json.loads(found.read_text())


def passes() -> list[Row]:
    """Every plan, priced and run in every pass."""
    torch.set_num_threads(1)
    predicted: dict[str, list[float]] = {name: [] for name in PLANS}
    steps: dict[str, list[float]] = {name: [] for name in PLANS}
    load = dict.fromkeys(PLANS, 0.0)
    for _ in range(int(os.environ.get("PASSES", "3"))):
        with tempfile.TemporaryDirectory() as folder:
            profile = Path(folder) / "profile.db"
            cluster = measured(profile)
            for name in PLANS:
                load[name] = max(load[name], os.getloadavg()[0])
                step_s, taken = timed(name, profile, cluster)
                predicted[name].append(step_s)
                steps[name] += taken
    rows = []
    for name in PLANS:
        expected, middle = statistics.fmean(predicted[name]), statistics.median(steps[name])
        rows.append(
            {
                "plan": name,
                "predicted_ms": 1e3 * expected,
                "measured_ms": 1e3 * middle,
                "quickest_ms": 1e3 * min(steps[name]),
                "error_percent": 100 * (expected / middle - 1),
                "load": load[name],
                "rounds": len(steps[name]),
                "passes_ms": [1e3 * each for each in predicted[name]],
            }
        )
    return rows


def summary(rows: Sequence[Row]) -> Row:
    """All plans."""
    errors = [abs(row["error_percent"]) for row in rows]
    return {"plans": len(rows), "error_percent": statistics.median(errors), "worst_percent": max(errors)}


if __name__ == "__main__":
    raise SystemExit(main("pinned", {"pinned": passes}, COLUMNS, summary=summary))
