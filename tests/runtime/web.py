"""A model every kind of whose values crosses stages, and plans of it on one stage."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.capture import capture
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Plan
from paraplan.planner.sampling import random_plan
from paraplan.planner.schedules.named import NAMED
from tests.runtime.pipelines import job_of


class Web(nn.Module):
    """Every kind of value that crosses stages: skips, a weight used at both ends, losses on the way, buffers; a weight
    and a buffer that are read before the stage that trains or writes them, and a weight that is read after."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.blocks[2].bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        first = h = self.embed(x)
        middle = None
        for index, block in enumerate(self.blocks):
            h = h + torch.tanh(block(h)) * self.scale
            if index == 0:
                h = h * (1 + self.blocks[5].weight.detach().abs().mean() + 0.1 * torch.tanh(self.seen))
            if index == 2:
                middle = h
            if index == 4:
                h = h + 0.5 * middle + torch.tanh(first) @ self.blocks[1].weight.detach()
        with torch.no_grad():
            self.seen.add_(h.detach().sum((0, 1)))
        loss = F.cross_entropy((h @ self.embed.weight.t()).flatten(0, 1), y.flatten())
        return {"main": loss, "small": 0.1 * (middle * middle).mean()}


def web() -> Web:
    torch.manual_seed(0)
    return Web().train()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 12, (4, 4), generator=generator)
    y = torch.randint(0, 12, (4, 4), generator=generator)
    y[0, 1] = y[2, :3] = -100
    return {"x": x, "y": y}


@functools.cache
def program() -> Program:
    return capture(web(), batch(), precision="fp64", loss={"main": 1.0, "small": 0.5})


@functools.cache
def one_stage(num_devices: int = 1, microbatches: int = 4, seed: int = 0) -> Plan:
    """A random plan of the model on one stage's devices."""
    for candidate in range(seed, seed + 400):
        plan = random_plan(job_of(program(), num_devices), candidate, max_microbatches=4)
        if plan.num_microbatches == microbatches:
            return plan
    raise AssertionError("no such random plan")


def stages_of(schedule: str, positions: int) -> int:
    return positions * NAMED[schedule].stages
