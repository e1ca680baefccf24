"""The plans that are kept: random ones of every family of the zoo, and searched ones, one per technique."""

from __future__ import annotations

import functools

import msgspec

from benchmarks.zoo import NAMES, build
from paraplan.capture import capture
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.plan import OPTIMIZERS, ModelRef, Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from tests.captures import program_of

RANDOM = {f"{name} random {seed}": (name, seed) for at, name in enumerate(NAMES) for seed in (at, at + 30)}
SEARCHED: dict[str, tuple[str, str, int, Constraints]] = {
    "own": ("gpt2", "fp32", 4, Constraints(pp=1)),
    "zero0": ("gpt2", "fp32", 2, Constraints(dp=2, zero=0)),
    "zero1": ("gpt2", "bf16", 2, Constraints(dp=2, zero=1)),
    "zero2": ("gpt2", "bf16", 2, Constraints(dp=2, zero=2, microbatches=2)),
    "zero3": ("llama", "bf16", 4, Constraints(dp=4, zero=3)),
    "zero3 sums": ("llama", "bf16", 2, Constraints(dp=2, zero=3, microbatches=4)),
    "reduce dtype": ("llama", "bf16", 2, Constraints(dp=2, zero=3, reduce_dtype="fp32")),
    "tp": ("llama", "fp32", 2, Constraints(tp=2)),
    "tp sp": ("bert", "fp32", 2, Constraints(tp=2, sp=True)),
    "overlap": ("llama", "fp32", 4, Constraints(tp=2, dp=2, sp=True, overlap=2)),
    "cp gather": ("gpt2", "fp32", 2, Constraints(cp=2, cp_mode="gather")),
    "cp alltoall": ("gpt2", "fp32", 2, Constraints(cp=2, cp_mode="alltoall")),
    "cp ring": ("llama", "fp32", 2, Constraints(cp=2, cp_mode="ring")),
    "cp stripes": ("llama", "fp32", 2, Constraints(cp=2, cp_mode="stripes")),
    "ep": ("mixtral", "fp32", 2, Constraints(dp=2, ep=2)),
    "fp8": ("llama", "fp8", 2, Constraints(dp=2, zero=3)),
    "fp16": ("gpt2", "fp16", 2, Constraints(dp=2, zero=1)),
    "compiled": ("llama", "bf16", 1, Constraints(compiled=True)),
    "full": ("gpt2", "fp32", 1, Constraints(recompute="full")),
    "selective": ("llama", "fp32", 1, Constraints(recompute="selective")),
    "states host": ("gpt2", "bf16", 2, Constraints(dp=2, zero=1, offload_states="host")),
    "states late": ("gpt2", "fp32", 1, Constraints(offload_states="host", delayed_update=2)),
    "states all": ("llama", "fp32", 2, Constraints(dp=2, zero=3, offload_states="all")),
    "states fetched": ("gpt2", "fp32", 1, Constraints(offload_states="fetched")),
    "states grads": ("gpt2", "fp32", 1, Constraints(offload_states="all-fetched-grads", microbatches=2)),
    "states disk": ("bert", "fp32", 1, Constraints(offload="disk", offload_states="disk-all")),
    "states disk grads": ("gpt2", "fp32", 2, Constraints(dp=2, offload="disk", offload_states="disk-fetched-grads")),
    "gpipe": ("gpt2", "fp32", 2, Constraints(pp=2, schedule="gpipe", microbatches=4)),
    "1f1b": ("bert", "fp32", 2, Constraints(pp=2, schedule="1f1b", microbatches=2)),
    "interleaved": ("gpt2", "fp32", 2, Constraints(pp=2, schedule="interleaved", microbatches=4)),
    "zero bubble": ("gpt2", "fp32", 4, Constraints(pp=2, dp=2, zero=1, schedule="zb-h1", microbatches=4)),
    "chimera": ("bert", "fp32", 2, Constraints(pp=2, schedule="chimera", microbatches=4)),
    "wave": ("gpt2", "fp32", 2, Constraints(pp=2, schedule="zb-v", microbatches=4)),
    "searched": ("gpt2", "fp32", 2, Constraints(pp=2, schedule="searched", microbatches=4)),
    "pipeline zero3": ("llama", "bf16", 4, Constraints(pp=2, dp=2, zero=3, microbatches=4)),
    "pipeline states": ("gpt2", "fp32", 2, Constraints(pp=2, microbatches=2, offload_states="host")),
    "norms": ("resnet", "fp32", 2, Constraints(dp=2, zero=0)),
    "contrast": ("clip", "fp32", 2, Constraints(pp=2, schedule="gpipe", microbatches=2)),
    "loop": ("lstm", "fp32", 2, Constraints(dp=2)),
    "tables": ("dlrm", "fp32", 2, Constraints(pp=1)),
}
"""Name -> model, precision, devices, what is pinned."""
SCARCE = {
    "scarce": ("gpt2", Constraints(microbatches=1), 0.75),
    "scarce host": ("llama", Constraints(offload="host", microbatches=1), 0.7),
}
"""Likewise on one device, with the share of what the first plan's peak is that they may take."""
CASES = (*RANDOM, *SEARCHED, *SCARCE)


def plan_of(case: str) -> Plan:
    """The plan of a case."""
    if case in RANDOM:
        name, seed = RANDOM[case]
        program = _captured(name, 0.1 if seed % 2 else 0.0, "fp64")
        return random_plan(_job(name, program, 2 if seed % 3 else 4), seed, max_microbatches=4, states_leave=True)
    if case in SCARCE:
        name, constraints, share = SCARCE[case]
        job = _job(name, _captured(name, 0.0, "fp32"), 1)
        plan = search(job, constraints, certify=False).plan
        assert plan.prediction is not None
        budget = int(share * max(plan.prediction.peak_bytes))
        within = msgspec.structs.replace(constraints, memory_bytes=budget, reserve_bytes=0)
        return search(job, within, certify=False).plan
    name, precision, devices, constraints = SEARCHED[case]
    return search(_job(name, _captured(name, 0.0, precision), devices), constraints, certify=False).plan


@functools.cache
def _captured(name: str, dropout: float, precision: str) -> Program:
    if precision == "fp64":
        return program_of(name, dropout)
    small = build(name, dropout)
    batch = {key: x.float() if x.is_floating_point() else x for key, x in small.batch.items()}
    return capture(small.model, batch, loss_fn=small.loss_fn, precision=precision, batch_dims=small.batch_dims)


def _job(name: str, program: Program, devices: int) -> Job:
    return Job(program, ClusterSpec.local(devices), OPTIMIZERS["adamw"], ModelRef(display=name), {})
