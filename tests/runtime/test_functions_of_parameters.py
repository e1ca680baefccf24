"""Functions of parameters alone (gates, positive scales, normalised tables) over microbatches: their gradients arrive
as shares of a sum, and pass through derivatives as such."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from paraplan.capture import capture
from paraplan.ir.errors import ConstraintError
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from tests.against_eager import eager_error, loss_by
from tests.captures import compiled
from tests.runtime.pipelines import job_of

X = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(3))}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softplus": F.softplus, "silu": F.silu, "gelu": F.gelu,
    "elu": F.elu, "hardtanh": F.hardtanh, "mish": F.mish, "relu": F.relu, "leaky_relu": F.leaky_relu,
    "softmax": lambda w: w.softmax(-1), "normalize": lambda w: F.normalize(w, dim=-1),
    "layer_norm": lambda w: F.layer_norm(w, (8,)), "group_norm": lambda w: F.group_norm(w[None], 2)[0],
    "maximum": lambda w: torch.maximum(w, w.T), "cumprod": lambda w: w.cumprod(-1),
    "matrix_exp": lambda w: torch.matrix_exp(w - w.T), "inverse": lambda w: torch.linalg.inv(w + 4 * torch.eye(8)),
    "cholesky": lambda w: torch.linalg.cholesky(w @ w.T + torch.eye(8)), "qr": lambda w: torch.linalg.qr(w)[0],
    "eigh": lambda w: torch.linalg.eigh(w + w.T)[0].diag(), "svd": lambda w: torch.linalg.svd(w)[1].diag(),
    "solve": lambda w: torch.linalg.solve(w + 4 * torch.eye(8), w.T), "det": lambda w: w.det() * w,
    "logcumsumexp": lambda w: w.logcumsumexp(-1), "cummax": lambda w: w.cummax(-1)[0],
    "median": lambda w: w - w.median(),
    "matrix_exp of matrix_exp": lambda w: torch.matrix_exp(torch.matrix_exp(w - w.T)),
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


class Sign(torch.autograd.Function):
    """A gradient of ones and minus ones: not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """As it is."""
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Its sign."""
        return grad.sign()


class Orthogonal(nn.Module):
    """A layer with an orthogonal weight, and a term that pulls at the weight without the batch."""

    def __init__(self, how: str, term: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map=how)
        self.second, self.term = nn.Linear(8, 4), term
        with torch.no_grad():
            self.first.parametrizations.weight.original.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).square().mean() + self.term(self)


TERMS: dict[str, Callable[[Any], Tensor]] = {
    "none": lambda model: torch.zeros(()),
    "of the weight": lambda model: (model.first.weight - 0.3).pow(4).sum(),
    "of the parameter": lambda model: model.first.parametrizations.weight.original.pow(4).sum(),
}


@pytest.mark.parametrize(
    ("how", "term"), [*itertools.product(("matrix_exp", "cayley"), TERMS), ("householder", "of the parameter")]
)
def test_orthogonal_weights_are_trained_in_microbatches(how: str, term: str) -> None:
    model = Orthogonal(how, TERMS[term])
    for pins in ({"dp": 2, "microbatches": 2}, {"pp": 2, "schedule": "1f1b", "microbatches": 2}):
        plan = compiled(model, "local:2", alike=False, example_inputs=X, precision="fp64", **pins)
        plan.check(model, [X])


def test_a_backward_of_the_users_is_not_taken_to_be_linear() -> None:
    program = capture(Mixed(Sign.apply), X, precision="fp64")
    with pytest.raises(ConstraintError, match=r"aten\.sign.*mixes samples of the batch"):
        search(job_of(program, 1, "momentum"), Constraints(microbatches=2), certify=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_microbatches_pass_through(name: str) -> None:
    model = Mixed(FUNCTIONS[name])
    program = capture(model, X, precision="fp64")
    plan = search(job_of(program, 1, "momentum"), Constraints(microbatches=2), certify=False).plan
    assert eager_error(plan, model, X, loss_by(None), 2) <= 1e-9
