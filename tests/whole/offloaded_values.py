"""Small models whose values wait on other tiers, and their steps held against one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from benchmarks.zoo import build
from paraplan.capture.reference import run_step
from paraplan.codegen import build_modules
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.captures import program_of
from tests.numerics import relative_error

PINS = {"tp": Constraints(tp=2), "zero3": Constraints(dp=2, zero=3, microbatches=2)}


@dataclass(frozen=True)
class Case:
    """A model captured in float64, and its step on one device."""

    model: nn.Module
    program: Program
    batch: dict[str, Tensor]
    loss: Tensor
    grads: dict[str, Tensor]


@cache
def case(name: str) -> Case:
    dropout = 0.1 if name == "gpt2" else 0.0
    small, program = build(name, dropout), program_of(name, dropout)
    tensors = dict(small.model.named_parameters(remove_duplicate=False))
    params = {key: tensors[key].detach() for key in program.params}
    loss, grads, _ = run_step(program, params, dict(small.model.named_buffers()), small.batch, 0)
    return Case(small.model, program, small.batch, loss, grads)


@cache
def kept(name: str, pin: str) -> Plan:
    job = Job(case(name).program, ClusterSpec.local(2), OPTIMIZERS["adamw"], ModelRef(display=name), {})
    return search(job, PINS[pin], certify=False).plan


def trained_as_one_device(plan: Plan, programs: Sequence[RankProgram], given: Case) -> InProcessTrainer:
    """Two steps with updates between; loss and gradients of the first equal one device's."""
    trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], given.model)
    for _ in range(2):
        loss = trainer.step(given.batch)
        if not trainer.optimizers:
            assert float(abs(loss - given.loss) / abs(given.loss)) <= 1e-9
            assert relative_error(trainer.grads(), given.grads) <= 1e-9
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    return trainer
