"""Less memory costs what is made again, and never makes a plan faster than more did."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.megatron_gpt import GPTSettings, MegatronGPT
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search


@pytest.mark.parametrize("zero", [2, 3])
def test_less_memory(zero: int) -> None:
    """Bundles and what is gathered ahead take little, and are worth more than what makes room for them."""
    with torch.device("meta"):
        model = MegatronGPT(GPTSettings(256, 4, 4, 512, 256, tied=True, flash=True))
        batch = {name: torch.zeros(16, 256, dtype=torch.int64) for name in ("input_ids", "labels")}
    program = capture(model, batch, precision="bf16")
    job = Job(program, parse_cluster("8xH100"), OPTIMIZERS["adamw"], ModelRef(display="gpt"), {})

    def planned(memory: int | None) -> Plan:
        pins = Constraints(dp=8, zero=zero, microbatches=1, memory_bytes=memory, reserve_bytes=0)
        return search(job, pins, 30.0, certify=False).plan

    roomy = planned(None)
    peak = max(roomy.prediction.peak_bytes)
    plans = [roomy, *(planned(int(share * peak)) for share in (0.97, 0.94, 0.85, 0.7))]
    steps = [plan.prediction.step_s for plan in plans]
    assert all(more <= less * (1 + 1e-9) for more, less in itertools.pairwise(steps))
    assert steps[-1] <= 1.1 * steps[0]
    assert all(any(choice.activations for choice in plan.stages[0].choices) for plan in plans[1:])
