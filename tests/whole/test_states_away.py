"""Parameters and states away from the device: what the user does between steps is done there too."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paraplan as pp
from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.sizes import say_size
from tests.captures import compiled

AWAY = ["host", "all", "fetched", "all-fetched", "disk", "disk-all", "disk-fetched", "fetched-grads", "disk-grads"]
OPTIMIZERS = {"sgd": (torch.optim.SGD, {"lr": 0.1}), "adamw": (torch.optim.AdamW, {"lr": 1e-2})}
PAIRS = list(zip(AWAY, itertools.cycle(OPTIMIZERS)))

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


@cache
def planned(states: str, optimizer: str) -> pp.Plan:
    return compiled(
        model(),
        "local:1",
        example_inputs=batches()[0],
        loss_fn=loss_of,
        precision="fp64",
        offload_states=states,
        optimizer=optimizer,
    )


def executable(states: str, optimizer: str = "adamw", **options: Any) -> Any:
    return planned(states, optimizer).executable(model(), **options)


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


@pytest.mark.parametrize(("states", "optimizer"), PAIRS)
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


class Decayed(torch.optim.SGD):
    """Has its base's step in its own, and something to do after it."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for param in params_of(self):
                param.mul_(0.9)
        return loss


@pytest.mark.parametrize("states", AWAY)
@pytest.mark.parametrize("closes", [False, True])
def test_a_step_that_calls_its_base_is_one_step(states: str, closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.optim.SGD(model().parameters())  # torch runs hooks for its step too from then on

    def loop(step: Any, made: torch.optim.Optimizer, given: list[Batch]) -> list[Tensor]:
        schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
        losses = []
        for batch in given:
            if closes:
                losses.append(made.step(lambda batch=batch: step(batch)))
            else:
                losses.append(step(batch))
                made.step()
            made.zero_grad()
            schedule.step()
        return losses

    monkeypatch.setitem(OPTIMIZERS, "decayed", (Decayed, {"lr": 0.1, "momentum": 0.9}))
    as_in_eager(states, "decayed", loop)


def test_a_step_that_failed_leaves_the_next_one_whole() -> None:
    eager, trainer = model(), executable("fetched", "sgd")
    made = trainer.optimizer(torch.optim.SGD, lr=0.1)
    loss_of(eager(batches()[0]["input"]), batches()[0]).backward()
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    with pytest.raises(KeyboardInterrupt):
        made.step(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    trainer.step(batches()[0])
    made.step()
    torch.testing.assert_close(dict(trainer.full_state_dict()), eager.state_dict(), rtol=1e-9, atol=1e-12)


def test_a_closure_that_is_called_again_is_refused() -> None:
    trainer = executable("fetched", "sgd")
    optimizer = trainer.optimizer(Twice, lr=0.1)
    with pytest.raises(PlanMismatchError, match=r"Twice .* closure .* place_states"):
        optimizer.step(lambda: trainer.step(batches()[0]))


def test_an_optimizer_without_an_update_of_its_own_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match=r"Always takes no step without a closure.*place_states"):
        executable("disk", "sgd").optimizer(Always, lr=0.1)


@torch.no_grad()
def clamp(made: torch.optim.Optimizer) -> None:
    for param in params_of(made):
        param.clamp_(-0.1, 0.1)


@pytest.mark.parametrize(("states", "optimizer"), PAIRS)
def test_parameters_written_after_the_update_are_those_of_the_next_step(states: str, optimizer: str) -> None:
    def loop(step: Any, made: torch.optim.Optimizer, given: list[Batch]) -> list[Tensor]:
        losses = []
        for batch in given:
            losses.append(step(batch))
            made.step()
            made.zero_grad()
            clamp(made)
        return losses

    as_in_eager(states, optimizer, loop)


@pytest.mark.parametrize(("states", "optimizer"), PAIRS)
def test_parameters_and_states_written_before_the_update_are_those_it_changes(states: str, optimizer: str) -> None:
    def loop(step: Any, made: torch.optim.Optimizer, given: list[Batch]) -> list[Tensor]:
        losses = []
        for batch in given:
            losses.append(step(batch))
            with torch.no_grad():
                for param in params_of(made):
                    param.mul_(0.9)
                    for state in made.state[param].values():
                        state.mul_(0.5) if state.dim() else None
            made.step()
            made.zero_grad()
        return losses

    as_in_eager(states, optimizer, loop)


@pytest.mark.parametrize("states", AWAY)
@pytest.mark.parametrize("evaluates", [False, True])
def test_parameters_loaded_before_the_update_are_those_it_changes(states: str, evaluates: bool) -> None:
    eager, trainer = model(), executable(states, "sgd")
    wanted, found = torch.optim.SGD(eager.parameters(), lr=0.1), trainer.optimizer(torch.optim.SGD, lr=0.1)
    for batch in batches():
        loss = loss_of(eager(batch["input"]), batch)
        loss.backward()
        torch.testing.assert_close(trainer.step(batch), loss.detach())
        trainer.load_full_state_dict({name: x * 0.9 for name, x in trainer.full_state_dict().items()})
        eager.load_state_dict({name: x * 0.9 for name, x in eager.state_dict().items()})
        if evaluates:
            torch.testing.assert_close(trainer.eval_step(batch).loss, loss_of(eager(batch["input"]), batch).detach())
        for made in (wanted, found):
            made.step()
            made.zero_grad()
    torch.testing.assert_close(dict(trainer.full_state_dict()), eager.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("states", AWAY)
def test_a_hook_after_the_update_has_every_parameter_once(states: str) -> None:
    def hook(made: torch.optim.Optimizer, *_: object) -> None:
        assert made.param_groups[0]["lr"] == 0.1
        for param in params_of(made):
            param.data.clamp_(-0.1, 0.1).mul_(0.9)

    def loop(step: Any, made: torch.optim.Optimizer, given: list[Batch]) -> list[Tensor]:
        made.register_step_post_hook(hook)
        losses = []
        for batch in given:
            losses.append(step(batch))
            made.step()
            made.zero_grad()
        return losses

    as_in_eager(states, "sgd", loop)


@pytest.mark.parametrize("states", ["none", "host"])
@pytest.mark.parametrize(
    ("planned", "cls", "options", "kept"),
    [
        ("adamw", torch.optim.AdamW, {"amsgrad": True}, 3),
        ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1),
        ("sgd", torch.optim.AdamW, {}, 2),
        ("adamw", torch.optim.AdamW, {}, 2),
        ("momentum", torch.optim.SGD, {"lr": 0.1}, 0),
    ],
)
def test_states_beyond_the_planned_ones_are_warned_of_once(
    states: str, planned: str, cls: Any, options: dict[str, Any], kept: int
) -> None:
    trainer = executable(states, planned)
    optimizer = trainer.optimizer(cls, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batch in batches():
            trainer.step(batch)
            optimizer.step()
    said = [str(each.message) for each in found if "of states" in str(each.message)]
    parameters = sum(param.nbytes for param in model().parameters())
    beyond = kept - {"sgd": 0, "momentum": 1, "adamw": 2}[planned]
    assert len(said) == (beyond > 0)
    for each in said:
        assert f"{cls.__name__} keeps {say_size(kept * parameters)} of states on rank 0" in each
        assert f"made for optimizer='{planned}'" in each
        assert f"{say_size(beyond * parameters)} above" in each
