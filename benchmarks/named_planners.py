"""Other planners' choices beside ours: Llama-3.1-8B (sequence 8192, bf16, AdamW) on 8 nodes of 8 H100, modelled.

Every planner has LIMIT seconds. `step_s` is the simulated step of its plan, `planned` which of its answers that is.

    python -m benchmarks.named_planners [--only alpa] [--json FILE [--resume]]      LIMIT=60 seconds (environment)
"""

from __future__ import annotations

import os
import time
from functools import cache, partial

import torch

from benchmarks.joint import llama
from benchmarks.table import Row, main
from paraplan.baselines.planners import NAMES, OURS, plan_by
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.errors import NoPlanError
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints

LIMIT = float(os.environ.get("LIMIT", "60"))
BATCHES = (64, 256)
CLUSTER = "8xH100:8"
COLUMNS = ("case", "s", "step_s", "peak_gib", "stages", "mesh", "microbatches", "schedule", "recomputing", "planned")


@cache
def program_of(batch: int) -> Program:
    """The model's program for a global batch."""
    tokens = torch.zeros(batch, 8192, dtype=torch.long, device="meta")
    return capture(llama(32, 4096, 14336, 32), {"input_ids": tokens, "labels": tokens}, precision="bf16")


def planned(name: str, batch: int) -> Row:
    """What one planner chooses."""
    job = Job(program_of(batch), parse_cluster(CLUSTER), OPTIMIZERS["adamw"], ModelRef(display="llama-8b"), {})
    started = time.perf_counter()
    try:
        plan = plan_by(name, job, Constraints(), LIMIT, certify=False).plan
    except NoPlanError as fault:
        return {"s": time.perf_counter() - started, "planned": str(fault)[:80]}
    assert plan.prediction is not None
    again = any(choice.activations for stage in plan.stages for choice in stage.choices)
    return {
        "s": time.perf_counter() - started,
        "step_s": plan.prediction.step_s,
        "peak_gib": max(plan.prediction.peak_bytes) / 2**30,
        "stages": len(plan.stages),
        "mesh": "x".join(map(str, plan.stages[0].mesh.shape)),
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule.name,
        "recomputing": again,
        "planned": "" if name == OURS else plan.notes[-1].rpartition(": ")[2],
    }


if __name__ == "__main__":
    cases = {f"{name}, batch {batch}": partial(planned, name, batch) for batch in BATCHES for name in NAMES}
    raise SystemExit(main("named_planners", cases, COLUMNS))
