"""`paraplan run --check` on Gloo processes: every model under every kind of plan, against one device.

GPT-2, Llama, BERT and an MLP in float64 on 2 and 4 processes, under pure data parallelism, ZeRO-3, pure tensor
parallelism, tensor and sequence parallelism, context parallelism in each mode, the planner's own choice, and five
random legal plans. Five AdamW steps; dropout is on in every other row. Errors are the numerics contract's, against the
captured program (and, without dropout, the user's eager model); `entries` says whether every rank did what was
predicted, entry by entry.

    python -m benchmarks.equality [--only "gpt2 2"] [--json FILE]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.table import main
from benchmarks.zoo.language import settings
from paraplan.capture import capture
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.struct import to_json
from paraplan.jobs.models import hf_batch, make_model, model_ref
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan

COLUMNS = (
    *("case", "dropout", "max_rel_err_loss", "max_rel_err_grad", "max_rel_err_param", "max_rel_err_eager"),
    *("entries_equal", "peak_ratio"),
)
PLANS = {
    "dp": ("--dp", "{n}", "--zero", "0"),
    "zero3": ("--dp", "{n}", "--zero", "3"),
    "tp": ("--tp", "{n}"),
    "tp+sp": ("--tp", "{n}", "--sp"),
    "cp gather": ("--cp", "{n}", "--cp-mode", "gather"),
    "cp alltoall": ("--cp", "{n}", "--cp-mode", "alltoall"),
    "cp ring": ("--cp", "{n}", "--cp-mode", "ring"),
    "own": (),
}


MODELS = ("gpt2", "llama", "bert", "mlp")
RANDOM_PLANS = 5


def paraplan(*args: str) -> dict[str, object]:
    """Run the command; its last line is one JSON object."""
    command = [sys.executable, "-m", "paraplan.cli", *args, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if not last.startswith("{"):
        raise RuntimeError(f"paraplan {' '.join(args)} failed ({done.returncode}): {last}\n{done.stderr[-4000:]}")
    return dict(json.loads(last))


def model_args(name: str, dropout: float) -> list[str]:
    """How the command line names a model."""
    if name == "mlp":
        return ["examples.models.mlp:" + ("with_dropout" if dropout else "factory")]
    pairs = (("--set", f"{key}={json.dumps(value)}") for key, value in settings(name, dropout).items())
    return [f"hf:{name}", *(part for pair in pairs for part in pair)]


def check(name: str, plan: Path, dropout: float) -> dict[str, object]:
    """Run a plan for five steps against one device."""
    factory = ["--model", model_args(name, dropout)[0]] if name == "mlp" else []
    row = paraplan("run", str(plan), "--steps", "5", "--check", *factory)
    return {**row, "dropout": dropout, "peak_ratio": row["predicted_peak_bytes"] / row["measured_peak_bytes"]}  # type: ignore[operator]


def pinned(name: str, ranks: int, pins: tuple[str, ...], dropout: float) -> dict[str, object]:
    """A plan of the command line, run and checked."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        sizes = [] if name == "mlp" else ["--batch", "8", "--seq", "32"]
        chosen = [pin.format(n=ranks) for pin in pins]
        model = model_args(name, dropout)
        paraplan(
            "plan", model[0], f"local:{ranks}", *model[1:], *sizes, "--precision", "fp64", *chosen, "-o", str(plan)
        )
        return check(name, plan, dropout)


def drawn(name: str, ranks: int, seed: int, dropout: float) -> dict[str, object]:
    """A random legal plan, run and checked."""
    chosen = {} if name == "mlp" else settings(name, dropout)
    made = make_model(model_args(name, dropout)[0], chosen, meta=True)
    batch = made.example_inputs or hf_batch(made.model, 8, 32)
    program = capture(made.model, batch, precision="fp64")
    model = model_ref(made.model, program, made_here=made.example_inputs is None)
    job = Job(program, ClusterSpec.local(ranks), OPTIMIZERS["adamw"], model, {})
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        plan.write_bytes(to_json(random_plan(job, seed, max_microbatches=4)))
        return check(name, plan, dropout)


def cases() -> dict[str, Callable[[], dict[str, object]]]:
    """Every model, number of ranks and kind of plan; dropout alternates."""
    found: dict[str, Callable[[], dict[str, object]]] = {}
    for name in MODELS:
        for ranks in (2, 4):
            for index, (kind, pins) in enumerate(PLANS.items()):
                dropout = 0.1 if (index + ranks // 2) % 2 else 0.0
                if name == "mlp" and kind.startswith(("tp+sp", "cp")):
                    continue  # no sequence to split
                if name == "llama" and ranks == 4 and kind == "cp alltoall":
                    continue  # two key/value heads
                found[f"{name} {ranks} {kind}"] = lambda a=(name, ranks, pins, dropout): pinned(*a)
        for seed in range(RANDOM_PLANS):
            ranks, dropout = (2, 4)[seed % 2], 0.1 if seed % 2 else 0.0
            found[f"{name} {ranks} random {seed}"] = lambda a=(name, ranks, 10 * seed, dropout): drawn(*a)
    return found


if __name__ == "__main__":
    raise SystemExit(main("equality", cases(), COLUMNS))
