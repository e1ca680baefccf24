"""Predicted against measured steps on Gloo processes whose kernels sleep for as long as they are predicted to take.

Plans of a GPT-2 on 4 processes, and on 8 that stand for two nodes: data parallelism and ZeRO, tensor and sequence
parallelism, context parallelism, the planner's own choice, random legal plans (with recomputation, chunks, copies to
the host and the disk), pipelines of every named schedule, and plans that offload. The executor, the emitted modules and
the copier are those of training, with other leaves (`benchmarks.sleeping`), so what is compared is what the simulator
says of order, overlap and waiting, not what kernels cost on this machine. Links are slow enough for communication to
matter.

`predicted_s` is the simulated step times `scale`, which makes it STEP_S long, or FLIGHT_S for each of a rank's
collectives, messages and copies where that is longer; `measured_s` is the median over ROUNDS
steps of the time until the last rank has ended its step; `clock_s` is the same by the ranks' clocks, which a busy
machine does not stretch; `error_percent` is of the measured. The last row has the median and worst error, and how well
the predicted (unscaled) steps rank the plans (Spearman).

    python -m benchmarks.steptime [--only "^4 pp"] [--json FILE [--resume]]
    ROUNDS=3, STEP_S=2, FLIGHT_S=0.01 (environment)
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

import msgspec
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.table import Row, main
from paraplan.capture import capture
from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.execution.rank_program import RankProgram, StepKind
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Link
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.ir.struct import to_json
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from paraplan.runtime.transport.launch import spawn_local

COLUMNS = (
    *("case", "mesh", "stages", "step_ms", "predicted_s", "measured_s", "clock_s", "error_percent", "load"),
    *("plans", "worst_percent", "spearman"),
)
BATCH, SEQ, MICROBATCHES = 32, 32, 4
FLIGHT_S = float(os.environ.get("FLIGHT_S", "0.01"))
"""A step is at least so long for each of its collectives, messages and copies: threads that meet have to wake up."""
NODE = 4
PINS: dict[str, dict[str, Any]] = {
    "4 dp": {"dp": 4, "zero": 0},
    "4 zero1": {"dp": 4, "zero": 1},
    "4 zero2": {"dp": 4, "zero": 2, "microbatches": 2},
    "4 zero3": {"dp": 4, "zero": 3},
    "4 tp": {"tp": 4},
    "4 tp+sp": {"tp": 4, "sp": True},
    "4 dp2 tp2": {"dp": 2, "tp": 2, "microbatches": 2},
    "4 zero3 tp2+sp": {"dp": 2, "tp": 2, "sp": True, "zero": 3},
    "4 cp ring": {"cp": 4, "cp_mode": "ring"},
    "4 cp alltoall": {"cp": 4, "cp_mode": "alltoall"},
    "4 own": {},
    "4 offload": {"dp": 4, "microbatches": 1, "recompute": "none", "offload": "host"},
    "4 pp4 gpipe": {"pp": 4, "schedule": "gpipe"},
    "4 pp4 1f1b": {"pp": 4, "schedule": "1f1b"},
    "4 pp4 zb-h1": {"pp": 4, "schedule": "zb-h1"},
    "4 pp2 tp2 1f1b": {"pp": 2, "tp": 2, "schedule": "1f1b"},
    "4 pp2 dp2 interleaved": {"pp": 2, "dp": 2, "schedule": "interleaved"},
    "4 pp2 tp2 zb-v": {"pp": 2, "tp": 2, "schedule": "zb-v"},
    "4 pp2 zero2 hanayo": {"pp": 2, "dp": 2, "zero": 2, "schedule": "hanayo"},
    "8 dp": {"dp": 8, "zero": 0},
    "8 zero3": {"dp": 8, "zero": 3},
    "8 dp2 tp4+sp": {"dp": 2, "tp": 4, "sp": True},
    "8 pp2 dp2 tp2 1f1b": {"pp": 2, "dp": 2, "tp": 2, "schedule": "1f1b"},
    "8 pp4 zero2 zb-h1": {"pp": 4, "dp": 2, "zero": 2, "schedule": "zb-h1"},
}
RANDOM = {4: (0, 1, 2, 3), 8: (4, 5)}


def cluster(devices: int) -> ClusterSpec:
    """CPU processes, four to a node, with slow links."""
    local = ClusterSpec.local(devices)
    group = msgspec.structs.replace(
        local.groups[0],
        nodes=max(1, devices // NODE),
        devices_per_node=min(NODE, devices),
        in_node=Link(bytes_per_s=5e8, latency_s=5e-5),
        between_nodes=Link(bytes_per_s=2.5e8, latency_s=1e-4),
        host=Link(bytes_per_s=2.5e8, latency_s=1e-5),
    )
    return msgspec.structs.replace(local, groups=(group,))


@cache
def program() -> Program:
    """GPT-2, small."""
    config = GPT2Config(
        n_layer=6,
        n_embd=128,
        n_head=4,
        vocab_size=512,
        n_positions=SEQ,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    return capture(GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids})


def job(devices: int) -> Job:
    """What is planned for."""
    return Job(program(), cluster(devices), OPTIMIZERS["adamw"], ModelRef(display="gpt2"), {})


def pinned(name: str) -> Plan:
    """A plan with choices pinned; one that offloads has 70 % of the memory that it takes to keep everything."""
    devices, pins = int(name[0]), {"microbatches": MICROBATCHES, **PINS[name]}
    if pins.get("offload") is None:
        return search(job(devices), Constraints(**pins)).plan
    keeping = search(job(devices), Constraints(**{**pins, "offload": "none"})).plan
    assert keeping.prediction is not None
    budget = int(0.7 * max(keeping.prediction.peak_bytes))
    return search(job(devices), Constraints(**pins, memory_bytes=budget)).plan


def timed(plan: Plan) -> Row:
    """One plan's step, simulated and on processes."""
    rounds, step_s = int(os.environ.get("ROUNDS", "3")), float(os.environ.get("STEP_S", "2"))
    programs = verify_plan(plan)
    simulated = simulate_plan(plan, programs).step_s
    flights = max(map(num_flights, programs))
    scale = max(step_s, FLIGHT_S * flights) / simulated
    with tempfile.TemporaryDirectory() as folder:
        path, found = Path(folder) / "plan.json", Path(folder) / "row.json"
        path.write_bytes(to_json(plan))
        before = os.getloadavg()[0]
        code = spawn_local(
            plan.cluster.num_devices, "benchmarks.steptime_rank", (str(path), repr(scale), str(rounds), str(found))
        )
        if code or not found.exists():
            raise RuntimeError(f"a rank ended with code {code}")
        row: Row = json.loads(found.read_text())
    return {
        "mesh": "x".join(map(str, plan.stages[0].mesh.shape)),
        "stages": len(plan.stages),
        "step_ms": 1e3 * simulated,
        "predicted_s": scale * simulated,
        "error_percent": 100 * (scale * simulated / row["measured_s"] - 1),
        "scale": scale,
        "flights": flights,
        "load": max(before, os.getloadavg()[0]),
        **row,
    }


def num_flights(program: RankProgram) -> int:
    """How often a rank hands something to a thread of its streams in a step."""
    per_block = {name: sum(instr.issues for instr in block.instrs) for name, block in program.blocks.items()}
    begins = (StepKind.SEND, StepKind.RECV)
    return sum(per_block[step.block] if step.block else int(step.kind in begins) for step in program.steps)


def summary(rows: Sequence[Row]) -> Row:
    """All plans."""
    errors = [abs(row["error_percent"]) for row in rows]
    measured = [row["measured_s"] / row["scale"] for row in rows]
    return {
        "plans": len(rows),
        "error_percent": statistics.median(errors),
        "worst_percent": max(errors),
        "spearman": spearman([row["step_ms"] for row in rows], measured) if len(rows) > 2 else None,
    }


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Rank correlation; ties are in the order they come."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        places = {index: float(place) for place, index in enumerate(order)}
        return [places[index] for index in range(len(values))]

    return statistics.correlation(ranks(xs), ranks(ys))


def cases() -> dict[str, Callable[[], Row]]:
    """Every plan."""
    found: dict[str, Callable[[], Row]] = {name: lambda name=name: timed(pinned(name)) for name in PINS}
    for devices, seeds in RANDOM.items():
        for seed in seeds:
            found[f"{devices} random {seed}"] = lambda a=(devices, seed): timed(random_plan(job(a[0]), a[1], 4))
    return found


if __name__ == "__main__":
    raise SystemExit(main("steptime", cases(), COLUMNS, summary=summary))
