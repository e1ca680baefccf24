"""Parameters and states away from the device: what the user does between steps is done there too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paraplan as pp
from paraplan.ir.errors import PlanMismatchError

AWAY = ["host", "all", "fetched", "all-fetched", "disk", "disk-all", "disk-fetched", "fetched-grads", "disk-grads"]
OPTIMIZERS = {"sgd": (torch.optim.SGD, {"lr": 0.1}), "adamw": (torch.optim.AdamW, {"lr": 1e-2})}

Batch = dict[str, Tensor]
Loop = Callable[[Any, torch.optim.Optimizer, list[Batch]], list[Tensor]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 10)).double()


def loss_of(out: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(out, batch["y"])


def batches() -> list[Batch]:
    torch.manual_seed(5)
    return [{"input": torch.randn(8, 12, dtype=torch.float64), "y": torch.randint(0, 10, (8,))} for _ in range(3)]


def executable(states: str, optimizer: str = "adamw", **options: Any) -> Any:
    plan = pp.compile(
        model(), "local:1", example_inputs=batches()[0], loss_fn=loss_of, precision="fp64", offload_states=states,
        optimizer=optimizer,
    )  # fmt: skip
    return plan.executable(model(), **options)


def as_in_eager(states: str, optimizer: str, loop: Loop) -> None:
    """A loop's losses and parameters are eager's."""
    cls, options = OPTIMIZERS[optimizer]
    eager = model()

    def step(batch: Batch) -> Tensor:
        loss = loss_of(eager(batch["input"]), batch)
        loss.backward()
        return loss.detach()

    trainer = executable(states)
    wanted = loop(step, cls(eager.parameters(), **options), batches())
    found = loop(trainer.step, trainer.optimizer(cls, **options), batches())
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(dict(trainer.full_state_dict()), eager.state_dict(), rtol=1e-9, atol=1e-12)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize("states", AWAY)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_closure_is_called_before_the_update(states: str, optimizer: str) -> None:
    def loop(step: Any, made: torch.optim.Optimizer, given: list[Batch]) -> list[Tensor]:
        def closure(batch: Batch) -> Tensor:
            assert torch.is_grad_enabled()
            made.zero_grad()
            return step(batch)

        return [made.step(lambda batch=batch: closure(batch)) for batch in given]

    as_in_eager(states, optimizer, loop)


class Twice(torch.optim.SGD):
    """Computes the loss again in its step, at other parameters."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure else None
            loss = closure() if closure else None
        super().step()
        return loss


class Always(torch.optim.SGD):
    """Has no update without a closure."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


def test_a_closure_that_is_called_again_is_refused() -> None:
    trainer = executable("fetched", "sgd")
    optimizer = trainer.optimizer(Twice, lr=0.1)
    with pytest.raises(PlanMismatchError, match=r"Twice .* closure .* offload_states"):
        optimizer.step(lambda: trainer.step(batches()[0]))


def test_an_optimizer_without_an_update_of_its_own_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match=r"Always takes no step without a closure.*offload_states"):
        executable("disk", "sgd").optimizer(Always, lr=0.1)
