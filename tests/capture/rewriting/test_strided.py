"""Writes through as_strided reach the elements they reach in eager, and gradients stop where they were overwritten."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture, run_program
from paraplan.ir.errors import CaptureError


class Filled(nn.Module):
    """A matrix of products whose diagonal is overwritten; `how` says in which storage."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(6, 4), how

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.lin(x)) * 1
        if self.how == "square":
            return (a.T @ a).fill_diagonal_(2.0).square().sum()
        if self.how == "transposed":
            return (a.t().clone(memory_format=torch.preserve_format).fill_diagonal_(0.5) @ x).square().sum()
        if self.how == "wrapped":
            return (a.fill_diagonal_(0.5, wrap=True) @ self.lin.weight).square().sum()
        if self.how == "view":
            return (a.t().fill_diagonal_(0.5) @ x).square().sum()
        a.as_strided((2, 3), (5, 1), 1).copy_(self.lin(x[:2])[:, :3])
        return a.pow(3).sum()


@pytest.mark.parametrize("how", ["square", "transposed", "wrapped", "values"])
def test_writes_by_strides(how: str) -> None:
    torch.manual_seed(0)
    model, x = Filled(how).double(), torch.randn(9, 6, dtype=torch.float64)
    eager = copy.deepcopy(model)
    wanted = eager(x)
    wanted.backward()
    program = capture(model, {"x": x}, precision="fp64")
    params = {name: param.detach() for name, param in model.named_parameters()}
    loss, grads = run_program(program, params, {}, {"x": x}, 0)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=0)
    for name, param in eager.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-10, atol=1e-12)


def test_writes_to_a_view_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"fill_diagonal_ or .* of a view: write to a copy"):
        capture(Filled("view"), {"x": torch.randn(9, 6)})


def test_places_written_twice_are_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            a = self.lin(x) * 1
            a.as_strided((3, 3), (1, 1)).fill_(1.0)
            return a.square().sum()

    with pytest.raises(CaptureError, match=r"test_strided.py:\d+, in forward.*one element twice; write with indices"):
        capture(Twice(), {"x": torch.randn(9, 6)})
