"""Gradients that a trace would lose or mistake: what an op gives back as it was, and matrices that lie transposed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import paraplan as pp
from tests.against_eager import assert_trains_as_eager

Read = Callable[[Tensor, Tensor], Tensor]
READS: dict[str, Read] = {
    "to": lambda w, x: w.to(x.dtype),
    "flatten": lambda w, x: w.flatten(1),
    "contiguous": lambda w, x: w.contiguous(),
    "view": lambda w, x: w.view(4, 4),
    "eval dropout": lambda w, x: nn.functional.dropout(w, 0.5, training=False),
}


class Power(nn.Module):
    """A weight and an activation read without a gradient, as spectral normalisation reads them, and then with one."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.w, self.inner, self.read = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        with torch.no_grad():
            z = torch.tanh(x @ self.read(self.w, x)) + self.read(h, x)
        return torch.tanh(z @ self.read(self.w, x) + h).square().mean()


class Volume(nn.Module):
    """Determinants of matrices as they lie and transposed."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.w, self.inner, self.which = nn.Parameter(torch.randn(4, 4) + 2 * torch.eye(4)), nn.Linear(4, 16), which

    def forward(self, x: Tensor) -> Tensor:
        a = self.inner(x).view(-1, 4, 4) + 3 * torch.eye(4, dtype=x.dtype)
        made = {
            "slogdet": lambda: torch.linalg.slogdet(self.w)[1],
            "slogdet.t": lambda: torch.linalg.slogdet(self.w.t())[1],
            "det.mT": lambda: 0.01 * torch.linalg.det(a.mT).mean(),
            "det copied": lambda: 0.01 * torch.linalg.det(a.mT.contiguous()).mean(),
            "solve.mT": lambda: torch.linalg.solve(a.mT, x[..., None]).mean(),
        }[self.which]()
        return made + (x @ self.w).square().mean() + a.square().mean()


def rows() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("read", READS)
def test_what_gives_back_its_input_stops_no_gradient(read: str) -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(Power(READS[read]), rows())


def test_a_normalised_weight_that_is_first_read_without_gradients() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                first = self.layer(x)
            return (self.layer(x) + first).square().mean()

    torch.manual_seed(0)
    assert_trains_as_eager(Net(), rows())


@pytest.mark.parametrize("which", ["slogdet", "slogdet.t", "det.mT", "det copied", "solve.mT"])
def test_determinants_of_what_lies_transposed(which: str) -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(Volume(which), rows())


def test_the_check_takes_a_parameter_that_lies_transposed() -> None:
    torch.manual_seed(0)
    model = Volume("slogdet").double()
    model.w = nn.Parameter(model.w.detach().t())
    batch = {"x": rows()["x"].double()}
    assert "are the eager model's" in pp.compile(model, "local:2", example_inputs=batch, precision="fp64").check(
        model, [batch]
    )
