"""Functions of parameters alone (gates, positive scales, normalised tables) over microbatches: their gradients arrive
as shares of a sum, and pass through derivatives as such."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.ir.trace import capture
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from tests.against_eager import eager_error, loss_by
from tests.runtime.pipelines import job_of

X = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(3))}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softplus": F.softplus, "silu": F.silu, "gelu": F.gelu,
    "elu": F.elu, "hardtanh": F.hardtanh, "mish": F.mish, "relu": F.relu, "leaky_relu": F.leaky_relu,
    "softmax": lambda w: w.softmax(-1), "normalize": lambda w: F.normalize(w, dim=-1),
    "layer_norm": lambda w: F.layer_norm(w, (8,)), "group_norm": lambda w: F.group_norm(w[None], 2)[0],
    "maximum": lambda w: torch.maximum(w, w.T), "cumprod": lambda w: w.cumprod(-1),
}  # fmt: skip


class Mixed(nn.Module):
    """x through a matrix that is made of a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function
        self.weight = nn.Parameter(torch.rand(8, 8) * 0.8 + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) @ self.function(self.weight)).pow(2).mean()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_microbatches_pass_through(name: str) -> None:
    model = Mixed(FUNCTIONS[name])
    program = capture(model, X, precision="fp64")
    plan = search(job_of(program, 1, "momentum"), Constraints(microbatches=2), certify=False).plan
    assert eager_error(plan, model, X, loss_by(None), 2) <= 1e-9
