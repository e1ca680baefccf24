"""The plans that are kept: a handful that has every family of the zoo, and every part a plan can have.

`test_golden.py` holds what they have between them.
"""

from __future__ import annotations

import functools

import msgspec

from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from tests.captures import program_of

RANDOM = {
    "gpt2_lora random 35": ("gpt2_lora", 35),
    "unet random 38": ("unet", 38),
    "t5 random 42": ("t5", 42),
    "gshard random 46": ("gshard", 46),
    "clip random 47": ("clip", 47),
    "dlrm random 49": ("dlrm", 49),
    "lstm random 50": ("lstm", 50),
}
"""Name -> model, seed: one model of every family that no searched plan has."""
SEARCHED: dict[str, tuple[str, str, int, Constraints]] = {
    "overlap": ("llama", "fp32", 4, Constraints(tp=2, dp=2, sp=True, overlap=2)),
    "cp ring": ("llama", "fp32", 2, Constraints(cp=2, cp_mode="ring")),
    "ep": ("mixtral", "fp32", 2, Constraints(dp=2, ep=2)),
    "fp8": ("llama", "fp8", 2, Constraints(dp=2, zero=3)),
    "compiled": ("llama", "bf16", 1, Constraints(compiled=True)),
    "states late": ("gpt2", "fp32", 1, Constraints(offload_states="host", delayed_update=2)),
    "states disk grads": ("gpt2", "fp32", 2, Constraints(dp=2, offload="disk", offload_states="disk-fetched-grads")),
    "zero bubble": ("gpt2", "fp32", 4, Constraints(pp=2, dp=2, zero=1, schedule="zb-h1", microbatches=4)),
    "chimera": ("bert", "fp32", 2, Constraints(pp=2, schedule="chimera", microbatches=4)),
}
"""Name -> model, precision, devices, what is pinned."""
SCARCE = {"scarce": ("gpt2", Constraints(microbatches=1), 0.75)}
"""Likewise on one device, with the share of what the first plan's peak is that they may take."""
CASES = (*RANDOM, *SEARCHED, *SCARCE)


@functools.cache
def plan_of(case: str) -> Plan:
    """The plan of a case."""
    if case in RANDOM:
        name, seed = RANDOM[case]
        program = program_of(name, 0.1 if seed % 2 else 0.0)
        return random_plan(_job(name, program, 2 if seed % 3 else 4), seed, max_microbatches=4, states_leave=True)
    if case in SCARCE:
        name, constraints, share = SCARCE[case]
        job = _job(name, program_of(name, 0.0, "fp32"), 1)
        plan = search(job, constraints, certify=False).plan
        assert plan.prediction is not None
        budget = int(share * max(plan.prediction.peak_bytes))
        within = msgspec.structs.replace(constraints, memory_bytes=budget, reserve_bytes=0)
        return search(job, within, certify=False).plan
    name, precision, devices, constraints = SEARCHED[case]
    return search(_job(name, program_of(name, 0.0, precision), devices), constraints, certify=False).plan


def _job(name: str, program: Program, devices: int) -> Job:
    return Job(program, ClusterSpec.local(devices), OPTIMIZERS["adamw"], ModelRef(display=name), {})
