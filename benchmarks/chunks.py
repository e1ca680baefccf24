"""Budgets below what the head and the loss need at once: segments run in chunks, and what that costs.

    python -m benchmarks.chunks [--only PATTERN] [--json FILE]

Language models at papers' sizes on one device, one microbatch, at `benchmarks.memory`'s costs and budgets (a share of
the peak without recomputation, above what is always there). `overhead` is the planned step's over the step without
recomputation, in %; `whole` the same where nothing may run in chunks ("none": no plan found); `ops`: op by op
(`planner.memory`) on the program with its head in `chunks`. The cases "measured" run a small model with a wide
vocabulary in this process in float32: its peak under each number of chunks beside the predicted, and seconds of
processor time a step.
"""

from __future__ import annotations

import time
from functools import cache, partial

import torch
from msgspec.structs import replace

from benchmarks.table import Row, main
from benchmarks.zoo.sized import MODELS, reference_cluster
from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import plan_costs, simulate_plan
from paraplan.ir.errors import NoPlanError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.memory.flatten import flatten
from paraplan.planner.memory.plan_memory import MemoryLimits, plan_memory
from paraplan.planner.recompute.split import finer
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer

SHARES = (0.5, 0.3, 0.2)
NAMES = ("gpt2-4-50k", "gpt2-12-50k")
COLUMNS = ("case", "peak_gib", "whole", "overhead", "chunks", "ops", "measured", "cpu_s")


@cache
def kept(name: str) -> tuple[Job, Plan, int]:
    """A job, its plan that keeps everything, and the bytes that are always there."""
    with torch.device("meta"):
        model, batch = MODELS[name]()
    job = Job(capture(model.train(), batch), reference_cluster(), OPTIMIZERS["adamw"], ModelRef(display=name), {})
    plan = search(job, Constraints(mesh=(1,), microbatches=1)).plan
    return job, plan, flatten(lower(plan)[0], plan_costs(plan)[0]).problem.base_bytes


def planned(name: str, share: float) -> Row:
    """A model at one budget."""
    job, plan, base = kept(name)
    assert plan.prediction is not None
    budget = base + int(share * (max(plan.prediction.peak_bytes) - base))
    row: Row = {"peak_gib": budget / 2**30}
    pins = Constraints(mesh=(1,), microbatches=1, memory_bytes=budget)
    for column, pinned in (("whole", replace(pins, recompute="full")), ("overhead", pins)):
        try:
            found = search(job, pinned).plan
        except NoPlanError as fault:
            row |= {column: "none", f"{column}_why": str(fault)}
            continue
        assert found.prediction is not None and max(found.prediction.peak_bytes) <= budget
        row[column] = 100 * (found.prediction.step_s / plan.prediction.step_s - 1)
        row["chunks"] = max((c.split.chunks for c in found.stages[0].choices if c.split is not None), default=1)
    return row | {"ops": op_by_op(plan, budget)}


def op_by_op(plan: Plan, budget: int) -> float | str:
    """Overhead of memory planned op by op, over the program with its head in 16 chunks."""
    assert plan.prediction is not None
    chunked = in_chunks(plan, 16)
    problem = flatten(lower(chunked)[0], plan_costs(chunked)[0]).problem
    try:
        found = plan_memory(problem, budget, MemoryLimits(time_s=60.0))
    except NoPlanError:
        return "none"
    return 100 * (found.evaluation.step_s / plan.prediction.step_s - 1)


def in_chunks(plan: Plan, chunks: int) -> Plan:
    """The plan with its last segment in so many chunks."""
    kind, split = plan.program.segments[-1].kind, None
    while chunks > 1 and (split is None or split.chunks < chunks):
        split = finer(plan, kind, split)
        assert split is not None
    (stage,) = plan.stages
    choices = tuple(replace(choice, split=split) if choice.kind == kind else choice for choice in stage.choices)
    return replace(plan, stages=(replace(stage, choices=choices),), prediction=None, certificate=None)


def measured(chunks: int) -> Row:
    """Two layers of width 128, a vocabulary of 50,257, a batch of 4 x 128."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415  (optional extra)

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=128,
        n_head=4,
        vocab_size=50257,
        n_positions=128,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    model, tokens = GPT2LMHeadModel(config).train(), torch.randint(0, 50257, (4, 128))
    batch = {"input_ids": tokens, "labels": tokens}
    job = Job(capture(model, batch), ClusterSpec.local(1), OPTIMIZERS["sgd"], ModelRef(display="gpt2"), {})
    plan = in_chunks(search(job, Constraints(microbatches=1)).plan, chunks)
    programs = lower(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(program) for program in programs], model)
    loss = float(trainer.step(batch))
    peak, predicted = trainer.peak_bytes(0), max(simulate_plan(plan, programs).peak_bytes)
    trainer.apply_optimizer(torch.optim.SGD, lr=1e-3)
    started = time.process_time()
    for _ in range(3):
        trainer.step(batch)
    seconds = (time.process_time() - started) / 3
    return {
        "chunks": chunks,
        "peak_gib": predicted / 2**30,
        "measured": peak / predicted,
        "cpu_s": seconds,
        "loss": loss,
    }


CASES = {f"{name} {share:.0%}": partial(planned, name, share) for name in NAMES for share in SHARES}
CASES |= {f"measured {chunks}": partial(measured, chunks) for chunks in (1, 2, 4, 8, 16)}


if __name__ == "__main__":
    raise SystemExit(main("chunks", CASES, columns=COLUMNS))
