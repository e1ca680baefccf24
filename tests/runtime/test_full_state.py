"""Full tensors that are not the plan's are refused by name, before any is loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paraplan
from paraplan.ir.errors import PlanMismatchError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.out = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.inner(x))).square().mean()


def trainer() -> Any:
    torch.manual_seed(0)
    model = Net()
    return paraplan.compile(model, "local:1", example_inputs={"x": torch.randn(8, 12)}).executable(model)


WRONG = [
    ("out.weight", torch.zeros(3, 16), r"out.weight has shape \(3, 16\), the plan's has \(10, 16\)"),
    ("out.weight", torch.zeros(1), r"\(1,\).*\(10, 16\)"),
    ("out.weight", torch.zeros(10, 16, 1), r"\(10, 16, 1\).*\(10, 16\)"),
    ("norm.running_mean", np.zeros((1, 16), np.float32), r"\(1, 16\).*\(16,\)"),
    ("out.bias", [0.0] * 10, "out.bias is a list"),
    ("out.bias", np.array(["a"] * 10), "out.bias is a ndarray"),
    ("out.bias", torch.zeros(10, device="meta"), "meta"),
    ("out.bias", torch.zeros(10, dtype=torch.complex64), "complex64"),
]


@pytest.mark.parametrize(("name", "value", "says"), WRONG)
def test_other_values_are_refused_and_nothing_is_loaded(name: str, value: object, says: str) -> None:
    taken = trainer()
    before = taken.full_state_dict()
    with pytest.raises(PlanMismatchError, match=says):
        taken.load_full_state_dict({key: x + 1 for key, x in before.items()} | {name: value})
    assert all(torch.equal(x, before[key]) for key, x in taken.full_state_dict().items())


def test_numpy_arrays_are_taken() -> None:
    taken = trainer()
    wanted = {key: x + 1 for key, x in taken.full_state_dict().items()}
    taken.load_full_state_dict({key: x.numpy() for key, x in wanted.items()})
    assert all(torch.equal(x, wanted[key]) for key, x in taken.full_state_dict().items())
