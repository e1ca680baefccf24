"""Random legal plans against the single device: values, recorded sequence and peak memory.

Every plan draws its mesh, microbatches, every op's strategy and every layout at random, with dropout on in half of
them. It runs two steps in this process; its loss and gradients are held against the captured program on one device
(the numerics contract's measure), what each rank did against the prediction entry by entry, and the measured peak of
live bytes against the predicted one.

    python -m benchmarks.fuzz [--only gpt2] [--json FILE]      PLANS=50 plans a model (environment)
"""

from __future__ import annotations

import os

import torch

from benchmarks.table import main
from benchmarks.zoo import NAMES, build
from paraplan.codegen import build_modules
from paraplan.cost_models.memory import entries
from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.cluster import ClusterSpec
from paraplan.ir.plan import OPTIMIZERS, ModelRef
from paraplan.ir.program import Program
from paraplan.ir.trace import capture
from paraplan.ir.trace.reference import Step, run_step
from paraplan.ir.verify import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from paraplan.runtime.local import InProcessTrainer

PLANS = int(os.environ.get("PLANS", "50"))
COLUMNS = ("case", "plans", "worst_rel_err", "entries_equal", "peak_ratio_min", "peak_ratio_max")


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor | None]) -> float:
    """The contract's measure: the worst max|a - b| / max(max|b|, 1e-6 of the largest gradient)."""
    largest = max(float(b.abs().max()) for b in expected.values() if b is not None)
    worst = 0.0
    for name, b in expected.items():
        if b is not None:
            worst = max(worst, float((found[name] - b).abs().max()) / max(float(b.abs().max()), 1e-6 * largest))
    return worst


def buffer_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The worst max|a - b| / max|b| of the buffers a step writes (running statistics); infinite for a wrong count."""
    worst = 0.0
    for name, b in expected.items():
        off, scale = float((found[name] - b).abs().max()), float(b.abs().max())
        worst = max(worst, off / scale if scale else (float("inf") if off else 0.0))
    return worst


def fuzz_model(name: str) -> dict[str, object]:
    """All plans of one model."""
    torch.set_num_threads(1)
    captured = {dropout: _capture(name, dropout) for dropout in (0.0, 0.1)}
    worst, equal, ratios = 0.0, 0, []
    for seed in range(PLANS):
        small, program = captured[0.1 if seed % 2 else 0.0]
        job = Job(program, ClusterSpec.local((2, 4)[seed // 2 % 2]), OPTIMIZERS["adamw"], ModelRef(display=name), {})
        plan = random_plan(job, seed, max_microbatches=4)
        programs = verify_plan(plan)
        trainer = InProcessTrainer(plan, programs, [build_modules(program) for program in programs], small.model)
        loss, grads = trainer.step(small.batch), trainer.grads()
        expected = _reference(program, small)
        off = abs(float(loss - expected.loss)) / abs(float(expected.loss))
        worst = max(worst, off, relative_error(grads, expected.grads))
        for rank in range(job.cluster.num_devices):
            worst = max(worst, buffer_error(trainer.buffers(rank), expected.buffers))
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
        trainer.step(small.batch)
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
        predicted = [entry.key for entry in entries(programs[0])]
        ranks = range(job.cluster.num_devices)
        equal += all([entry.key for entry in trainer.entries(rank)] == predicted for rank in ranks)
        peak = max(simulate_plan(plan, programs).peak_bytes)
        ratios += [peak / trainer.peak_bytes(rank) for rank in ranks]
    return {
        "plans": PLANS, "worst_rel_err": worst, "entries_equal": f"{equal}/{PLANS}", "peak_ratio_min": min(ratios),
        "peak_ratio_max": max(ratios),
    }  # fmt: skip


def _capture(name: str, dropout: float) -> tuple[object, Program]:
    small = build(name, dropout)
    return small, capture(small.model, small.batch, precision="fp64")


def _reference(program: Program, small: object) -> Step:
    tensors = dict(small.model.named_parameters(remove_duplicate=False))
    params = {name: tensors[name].detach() for name in program.params}
    buffers = {name: b.double() if b.is_floating_point() else b for name, b in small.model.named_buffers()}
    return run_step(program, params, buffers, small.batch, 0)


if __name__ == "__main__":
    raise SystemExit(main("fuzz", {name: lambda name=name: fuzz_model(name) for name in NAMES}, COLUMNS))
