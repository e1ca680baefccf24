"""Gradients added up over several steps: counted where the plan was told, warned of where it was not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paraplan
from paraplan.ir.errors import NoPlanError
from paraplan.runtime.trainer import Trainer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


X = {"x": torch.randn(8, 64, generator=torch.Generator().manual_seed(0))}
EVERY: list[dict[str, Any]] = [
    {},
    {"microbatches": 2},
    {"place_states": "host"},
    {"place_states": "host", "update_on": "device"},
    {"offload_states": "any-grads"},
]


def peaks(trainer: Trainer) -> list[int]:
    """Of six steps, every second of which updates."""
    optimizer, found = trainer.optimizer(torch.optim.AdamW, lr=0.1), []
    for step in range(6):
        trainer.step(X)
        if step % 2:
            optimizer.step()
        found.append(trainer.peak_bytes)
        if step % 2:
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("pins", EVERY, ids=str)
def test_the_predicted_peak_is_the_measured_one(pins: dict[str, Any], precision: str) -> None:
    model = Net()
    plan = paraplan.compile(model, "local:1", example_inputs=X, precision=precision, accumulate=True, **pins)
    assert plan.prediction is not None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gradients of several steps")
        assert max(peaks(plan.executable(model, record=True))) == plan.prediction.peak_bytes[0]


def test_a_plan_that_was_not_told_warns_once() -> None:
    model = Net()
    plan = paraplan.compile(model, "local:1", example_inputs=X)
    with pytest.warns(UserWarning, match="gradients of several steps") as told:
        found = peaks(plan.executable(model, record=True))
    assert plan.prediction is not None
    above = max(found) - plan.prediction.peak_bytes[0]
    assert above == sum(param.nbytes for param in model.parameters())
    ours = [str(each.message) for each in told if "gradients of several steps" in str(each.message)]
    assert len(ours) == 1 and f"{above / 1024:.2f} KiB above" in ours[0] and "accumulate=True" in ours[0]


@pytest.mark.parametrize("pins", [{"dp": 2}, {"pp": 2, "microbatches": 2}, {"dp": 2, "offload_states": "any"}], ids=str)
def test_plans_keep_a_budget(pins: dict[str, Any]) -> None:
    """A budget that the step alone meets does not do for gradients that stay, where nothing leaner is found."""

    def planned(**more: Any) -> int:
        plan = paraplan.compile(Net(), "local:2", example_inputs=X, time_limit_s=5.0, **pins, **more)
        assert plan.prediction is not None
        return max(plan.prediction.peak_bytes)

    alone, both = planned(), planned(accumulate=True)
    assert both > alone and planned(accumulate=True, memory=str(both)) <= both
    try:
        assert planned(accumulate=True, memory=str(alone)) <= alone
    except NoPlanError:
        assert "offload_states" not in pins
