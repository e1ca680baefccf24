"""A small model and random legal plans of it on two ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan

SEEDS = (0, 2, 5)


class Net(nn.Module):
    """Two residual layers and a cross-entropy; the head is tied to nothing, one bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 6)
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(x), y)


def net() -> Net:
    """The same values every time, float64."""
    torch.manual_seed(3)
    return Net().double().train()


def batch(step: int = 0) -> dict[str, Tensor]:
    """A global batch of four with an ignored label."""
    generator = torch.Generator().manual_seed(step)
    y = torch.randint(0, 6, (4,), generator=generator)
    y[step % 4] = -100
    return {"x": torch.randn(4, 8, generator=generator, dtype=torch.float64), "y": y}


@functools.cache
def program() -> Program:
    """`net` captured in fp64."""
    return capture(net().float(), {"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.int64)}, precision="fp64")


@functools.cache
def planned(seed: int) -> tuple[Plan, tuple[RankProgram, ...]]:
    """A random plan on two ranks, lowered."""
    job = Job(program(), ClusterSpec.local(2), OPTIMIZERS["adamw"], ModelRef(display="net"), {})
    plan = random_plan(job, seed)
    return plan, lower(plan)


def emitted(programs: tuple[RankProgram, ...]) -> list[dict[str, object]]:
    """Modules with unbound collectives."""
    return [build_modules(p) for p in programs]


def eager(
    steps: int, make: Callable[..., torch.optim.Optimizer], max_norm: float = 0.0
) -> tuple[nn.Module, list[float], list[float]]:
    """Plain training: the model afterwards, losses, gradient norms before clipping."""
    model, losses, norms = net(), [], []
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        loss = model(**batch(step))
        loss.backward()
        if max_norm:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses, norms
