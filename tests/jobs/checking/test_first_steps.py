"""`fit(check=)` and `Plan.check`: the same comparison, before training and without a cluster."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor

import paraplan
from paraplan.ir.errors import CheckError
from paraplan.runtime.fitted import FittedModule
from tests.jobs.checking.checked import Net, batch


def fitted(model: Net, **how: Any) -> FittedModule:
    return paraplan.fit(model, batch(), memory="1GiB", time_limit_s=2, **how)


def test_checked_steps_are_the_steps_without_a_check() -> None:
    """Also torch's generator, which draws the seeds."""
    said: list[str] = []
    trained = []
    for how in ({"check": 2, "progress": said.append}, {}):
        module = fitted(copy.deepcopy(Net().double()), **how)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        torch.manual_seed(3)
        for step in range(3):
            module(**batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([*module.state_dict().values(), torch.rand(1)])
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))
    told = [text for text in said if "is the eager model's" in text]
    assert len(told) == 2 and "2 random draws replayed by position" in told[1]


def test_a_fitted_step_that_is_not_the_model_raises_before_it_is_taken() -> None:
    model: Any = Net().double()
    module = fitted(model, check=True)
    step = module._fit_step
    kept = {name: x.clone() for name, x in module.state_dict().items()}
    plan = step.plan
    loss = type(step).loss
    try:
        type(step).loss = lambda self, batch: loss(self, batch) * 1.5  # type: ignore[method-assign]
        with pytest.raises(CheckError, match=r"check failed: step 0: .* where the captured program") as raised:
            module(**batch())
    finally:
        type(step).loss = loss  # type: ignore[method-assign]
    assert "at most 1e-09" in str(raised.value)
    assert all(torch.equal(kept[name], x) for name, x in module.state_dict().items())
    assert all(param.grad is None for param in module.parameters()) and step.plan is plan and step.steps_done == 0
    module(**batch()).backward()  # what was planned is right, so that it trains


class Outside(Net):
    """Reads a number that no plan knows of."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * float(os.environ.get("NET_SCALE", "1"))


def test_a_plan_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [batch(step, torch.float32) for step in range(2)]
    plan = paraplan.compile(Outside(), "local:2", example_inputs=batches[0], dp=2, microbatches=1, optimizer="momentum")
    assert plan.check(Outside(), batches).startswith("2 steps are the eager model's: largest error")
    monkeypatch.setenv("NET_SCALE", "1.1")
    with pytest.raises(CheckError, match="eager model in float64"):
        plan.check(Outside(), batches)
