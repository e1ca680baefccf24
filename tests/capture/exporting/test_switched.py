"""`requires_grad` switched within forward or the loss function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.capture import capture
from paraplan.ir.errors import CaptureError
from tests.capture.models import eager, run, worst_error

BATCH = {
    "x": torch.randn(8, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "z": torch.randn(8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64),
}


class Adversarial(nn.Module):
    """A generator and a discriminator that train in one step; `freeze` and `thaw` switch the latter."""

    def __init__(self, freeze: Callable[[nn.Module], object], thaw: Callable[[nn.Module], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.critic = nn.Linear(4, 10), nn.Linear(10, 1)
        self.freeze, self.thaw = freeze, thaw

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        made = self.maker(z)
        loss = F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(made.detach())).mean()
        self.freeze(self.critic)
        against = -self.critic(made).mean() + (made @ self.critic.weight.T).square().mean()
        self.thaw(self.critic)
        return loss + against + 1e-2 * self.critic.weight.square().sum()


def switch_each(on: bool) -> Callable[[nn.Module], object]:
    return lambda module: [param.requires_grad_(on) for param in module.parameters()]


def assign_each(on: bool) -> Callable[[nn.Module], object]:
    return lambda module: [setattr(param, "requires_grad", on) for param in module.parameters()]


def invert_each(module: nn.Module) -> None:
    for param in module.parameters():
        param.requires_grad = not param.requires_grad


def as_eager(model: nn.Module, loss_fn: Callable[..., Tensor] | None = None) -> None:
    model = model.double()
    program = capture(model, BATCH, precision="fp64", loss_fn=loss_fn)
    loss, grads = run(program, model, BATCH)
    wanted_loss, wanted = eager(model, BATCH, "fp64", loss_fn)
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-12)
    assert worst_error(grads, wanted) <= 1e-12


@pytest.mark.parametrize("way", [switch_each, assign_each, lambda on: lambda module: module.requires_grad_(on)])
def test_parameters_that_are_switched_off_are_read_without_gradient(way: Callable) -> None:
    as_eager(Adversarial(way(False), way(True)))
    as_eager(Adversarial(invert_each, invert_each))


def test_the_loss_function_switches_too() -> None:
    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.critic = nn.Linear(4, 10), nn.Linear(10, 1)

        def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, nn.Module]:
            return self.maker(z), self.critic(x), self.critic

    def loss_fn(output: tuple[Tensor, Tensor, nn.Module], batch: dict[str, Tensor]) -> Tensor:
        made, judged, critic = output
        critic.requires_grad_(False)
        against = critic(made).mean()
        critic.requires_grad_(True)
        return judged.square().mean() - against

    torch.manual_seed(0)
    as_eager(Outputs(), loss_fn)


def test_a_switch_that_stays_is_refused() -> None:
    def nothing(module: nn.Module) -> None:
        pass

    for freeze in (switch_each(False), assign_each(False), lambda module: module.weight.detach_()):
        with pytest.raises(CaptureError, match=r"test_switched.*critic\.weight.*left so.*switch it on again"):
            capture(Adversarial(freeze, nothing).double(), BATCH, precision="fp64")
    frozen = Adversarial(switch_each(True), switch_each(False)).double()
    frozen.critic.requires_grad_(False)
    with pytest.raises(CaptureError, match=r"test_switched.*critic\.weight.*does not train.*before planning"):
        capture(frozen, BATCH, precision="fp64")


def test_parameters_of_another_model_are_not_switched() -> None:
    other = nn.Linear(10, 1).double()
    with pytest.raises(CaptureError, match=r"test_switched.*none of the model.*part of the model"):
        capture(Adversarial(lambda _: other.requires_grad_(False), switch_each(True)).double(), BATCH, precision="fp64")
    assert other.weight.requires_grad
