"""A step computes in the plan's dtypes whatever autocast the caller is in."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import paraplan as pp


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_autocast_around_a_step_casts_nothing(precision: str) -> None:
    model, batch = Model(), {"x": torch.randn(8, 16)}
    plan = pp.compile(model, "local:1", example_inputs=batch, optimizer="sgd", precision=precision)
    plain, cast = plan.executable(copy.deepcopy(model)), plan.executable(copy.deepcopy(model))
    updates = [each.optimizer(torch.optim.SGD, lr=0.1) for each in (plain, cast)]
    for _ in range(3):
        wanted = float(plain.step(batch))
        with torch.autocast("cpu", dtype=torch.float16):
            assert float(cast.step(batch)) == wanted
        for update in updates:
            update.step()
    with torch.autocast("cpu", dtype=torch.float16):
        plan.check(model, [batch])
