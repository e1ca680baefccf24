"""What the updates of torch's optimizers keep and allocate is what their plans count."""

from __future__ import annotations

import warnings

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paraplan
from paraplan.api import Plan
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.jobs.optimizers import OPTIMIZER_CLASSES
from paraplan.lowering import lower
from paraplan.runtime.in_process import InProcessTrainer
from tests.captures import compiled

BATCH = {"x": torch.randn(8, 16), "y": torch.arange(8) % 3}


class Deep(nn.Module):
    """Linear layers, whose parameters weigh as much as their activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x)), y)


def planned(optimizer: str, states: str | None) -> Plan:
    how = {} if states is None else {"offload_states": states}
    return compiled(Deep(), "local:2", example_inputs=BATCH, optimizer=optimizer, mesh=(2,), **how)


@pytest.mark.parametrize("states", [None, "all-fetched", "fetched-grads"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_peaks_are_as_predicted(name: str, states: str | None) -> None:
    plan = planned(name, states)
    trainer = InProcessTrainer(plan.data, plan.programs, [build_modules(p) for p in plan.programs], Deep())
    cls, options = OPTIMIZER_CLASSES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            trainer.step(BATCH)
            trainer.apply_optimizer(cls, lr=0.05, **options)
    simulation = simulate_plan(plan.data, plan.programs)
    assert [trainer.peak_bytes(rank) for rank in range(2)] == list(simulation.peak_bytes) * (2 // len(plan.programs))
    for rank in range(2):
        trace = simulation.traces[plan.data.schedule.rank_class[rank]]
        assert trainer.tier_peak_bytes(rank) == trace.tier_peak_bytes


def test_an_optimizer_that_takes_more_than_planned_is_warned_of() -> None:
    plan = paraplan.compile(Deep(), "local:1", example_inputs=BATCH, optimizer="momentum")
    with pytest.warns(UserWarning, match="'momentum'.*plan with optimizer='adamw'"):
        plan.executable(Deep()).optimizer(torch.optim.AdamW, lr=0.1)
    for more in ({"weight_decay": 0.1}, {"nesterov": True}):
        options = {"lr": 0.1, "momentum": 0.9, **more}
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a fused kernel takes no more for them
            plan.executable(Deep()).optimizer(torch.optim.SGD, **options)
        with pytest.warns(UserWarning, match="counts on torch's fused kernels.*takes 1 tensors"):
            plan.executable(Deep()).optimizer(torch.optim.SGD, fused=False, **options)


def test_an_unfused_optimizer_that_takes_more_than_planned_is_warned_of() -> None:
    data = paraplan.compile(Deep(), "local:1", example_inputs=BATCH, optimizer="momentum").data
    data = msgspec.structs.replace(data, optimizer=msgspec.structs.replace(data.optimizer, fused=False))
    for options, name in (({"weight_decay": 0.1}, r"momentum\+decay"), ({"nesterov": True}, "nesterov")):
        with pytest.warns(UserWarning, match=f"'momentum'.*plan with optimizer='{name}'"):
            Plan(data, lower(data)).executable(Deep()).optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, **options)
