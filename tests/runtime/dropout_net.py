"""A small model with dropout, its batch and program, and how plans of it are run."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Plan
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.runtime.in_process import InProcessTrainer


class Net(nn.Module):
    """Returns a nested thing: its loss, an inner value, and what only an evaluation computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head, self.probe = nn.Linear(8, 6), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, object]:
        hidden = []
        for layer in self.layers:
            x = x + self.drop(F.gelu(layer(x)))
            hidden.append(x)
        logits = self.head(x)
        return {
            "loss": F.cross_entropy(logits, y),
            "logits": logits,
            "hidden": tuple(hidden),
            "text": "no tensor",
            "best": logits.argmax(-1),
            "odds": self.drop(logits).softmax(-1),
            "right": (logits.argmax(-1) == y).sum(),
            "probe": self.probe(x),
            "spread": x.std(0),
        }


def net() -> Net:
    torch.manual_seed(3)
    return Net().double().train()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 6, (8,), generator=generator)
    y[1] = -100
    return {"x": torch.randn(8, 8, generator=generator, dtype=torch.float64), "y": y}


@functools.cache
def program() -> Program:
    return capture(net().float(), {"x": torch.zeros(8, 8), "y": torch.zeros(8, dtype=torch.int64)}, precision="fp64")


def trainer_of(plan: Plan, model: nn.Module) -> InProcessTrainer:
    programs = verify_plan(plan)
    return InProcessTrainer(plan, programs, [build_modules(p) for p in programs], model, build=build_modules)


class Steady(Net):
    """Without dropout, so that the eager model says the same while training."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)


def steady() -> Net:
    torch.manual_seed(3)
    return Steady().double().train()
