"""Functions that ask what only data say, captured by what computes the same."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.capture.looped import WIDTH, Net, held_against_eager

Body = Callable[[Net, Tensor], Tensor]


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def _module(net: Net, h: Tensor) -> Tensor:
    return nn.GaussianNLLLoss(full=True, eps=0.5)(net.inner(h), h.detach(), h.exp())


BODIES: dict[str, Body] = {
    "variance of each": lambda net, h: F.gaussian_nll_loss(net.inner(h), h.detach(), h.exp(), reduction="sum"),
    "variance of a row": lambda net, h: F.gaussian_nll_loss(
        net.inner(h), h.detach(), h.exp().mean(1), reduction="none"
    ),
    "variance of one": lambda net, h: F.gaussian_nll_loss(net.inner(h), h.detach(), h.square()[:, :1]),
    "a number": lambda net, h: F.gaussian_nll_loss(net.inner(h), h.detach(), 0.7),
    "module": _module,
    "covariance": lambda net, h: torch.cov(h),
    "population": lambda net, h: h.cov(correction=0),
    "variance": lambda net, h: torch.cov(h[:, 0]) * h,
    "correlation": lambda net, h: torch.corrcoef(h.t()),
}


@pytest.mark.parametrize("body", BODIES)
def test_what_only_data_say_is_not_asked(body: str) -> None:
    torch.manual_seed(0)
    held_against_eager(Net(BODIES[body]).double(), batch())


def test_numbers_in_text(caplog: pytest.LogCaptureFixture) -> None:
    def body(net: Net, h: Tensor) -> Tensor:
        logging.getLogger("said").warning(f"{h.mean().item():.3f} of {(h > 0).sum().item():3d}")
        return h

    torch.manual_seed(0)
    held_against_eager(Net(body).double(), batch())
    said = [each.message for each in caplog.records if each.name == "said"]
    assert said[0] == "nan of   0" and said[-1] != said[0]
