"""Buffers a model writes: whole and equal to the single device's on every rank, over steps and microbatches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from examples.models import resnet
from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.numerics import relative_error

torch.set_num_threads(1)
Batch = dict[str, Tensor]


class Seen(nn.Module):
    """Sums its inputs over all batches into a buffer and counts steps in another."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.sum(0)
        self.steps += 1
        return (self.lin(x) ** 2).mean()


def job_of(model: nn.Module, batch: Batch, ranks: int) -> Job:
    program = capture(model, batch, precision="fp64")
    return Job(program, ClusterSpec.local(ranks), OPTIMIZERS["sgd"], ModelRef(display="model"), {})


def trained(plan, model: nn.Module, batches: list[Batch]) -> InProcessTrainer:  # type: ignore[no-untyped-def]
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(program) for program in programs], model)
    for batch in batches:
        trainer.step(batch)
        trainer.apply_optimizer(torch.optim.SGD, lr=0.01)
    return trainer


def after(model: nn.Module, batches: list[Batch]) -> dict[str, Tensor]:
    """Buffers of the eager model after the same steps; the model itself is used up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    return dict(model.named_buffers())


def test_statistics_are_of_the_global_batch() -> None:
    """ZeRO-3 over two data-parallel ranks: each sees half of every batch."""
    torch.manual_seed(0)
    model, first = resnet.factory(4, 16, (1,), 4, 5)
    model = model.double()
    first["pixels"] = first["pixels"].double()
    batches = [first, {**first, "pixels": first["pixels"].flip(1) * 2 + 1}]
    job = job_of(model, first, 2)
    plan = search(job, Constraints(dp=2, zero=3), certify=False).plan
    assert plan.num_microbatches == 1 and plan.stages[0].batch["pixels"] == "S0"
    trainer = trained(plan, model, batches)
    wanted = after(model, batches)
    assert int(wanted["stem.1.num_batches_tracked"]) == 2
    for rank in range(2):
        assert relative_error(trainer.buffers(rank), wanted) <= 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_sums_over_microbatches_are_counted_once(seed: int) -> None:
    model = Seen().double()
    batches = [{"x": torch.randn(8, 4, dtype=torch.float64)} for _ in range(2)]
    plan = random_plan(job_of(model, batches[0], 2), seed, max_microbatches=4)
    trainer = trained(plan, model, batches)
    wanted = after(model, batches)
    for rank in range(2):
        assert relative_error(trainer.buffers(rank), wanted) <= 1e-12
    assert int(wanted["steps"]) == 2
