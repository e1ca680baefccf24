"""Full tensors that are not the plan's are refused by name, before any is loaded; so are wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paraplan
from paraplan.ir.errors import ParaplanError, PlanMismatchError


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


BAD: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda t, o: t.clip_grad_norm_("a"), "max_norm='a': give a number"),
    (lambda t, o: t.clip_grad_norm_(None), "max_norm=None"),
    (lambda t, o: t.clip_grad_norm_(1.0, "a"), "norm_type='a': give a number"),
    (lambda t, o: t.save("unwritten", 3), "optimizer= is given a int: give a torch.optim.Optimizer"),
    (lambda t, o: t.save("unwritten", torch.optim.SGD), "optimizer= is given a SGD"),
    (lambda t, o: t.save("unwritten", o, 3), "scheduler= is given a int: give one of torch.optim.lr_scheduler"),
    (lambda t, o: t.save("unwritten", o, o), "scheduler= is given a SGD"),
    (lambda t, o: t.save("unwritten", o, None, 3), "scaler= is given a int: give a torch.amp.GradScaler"),
    (lambda t, o: t.full_training_state(3), "optimizer= is given a int"),
    (lambda t, o: t.load_full_training_state(t.full_training_state(o), [3]), "optimizer= is given a int"),
    (lambda t, o: t.load_full_training_state(t.full_training_state(o), o, o), "scheduler= is given a SGD"),
    (lambda t, o: t.load_full_training_state(None), "a training state is a NoneType: give a mapping"),
    (lambda t, o: t.load_training_state([1]), "a training state is a list: give a mapping"),
    (lambda t, o: t.load_full_state_dict([1]), "full is a list: give a mapping as full_state_dict makes it"),
    (lambda t, o: t.load_state_dict(None), "state is a NoneType: give a mapping as state_dict makes it"),
    (lambda t, o: t.load_optimizer_state_dict(o, None), "state is a NoneType: give a mapping as optimizer_state_dict"),
]


def test_wrong_arguments_are_refused_by_name() -> None:
    taken = trainer()
    optimizer = taken.optimizer(torch.optim.SGD, lr=0.1)
    taken.step({"x": torch.randn(8, 12)})
    before = float(taken.clip_grad_norm_(torch.tensor(1e-3)))
    assert float(taken.clip_grad_norm_(np.float64(1.0))) == pytest.approx(min(before, 1e-3), rel=1e-2)
    for wrong, says in BAD:
        with pytest.raises(ParaplanError, match=says):
            wrong(taken, optimizer)


class Adapted(nn.Module):
    """A frozen layer read under two names, and one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.out = nn.Linear(12, 12), nn.Linear(12, 10)
        self.again = self.base
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(self.base(x))).square().mean()


def _adapted(seed: int, base: torch.dtype = torch.float32) -> tuple[Adapted, Any]:
    torch.manual_seed(seed)
    model = Adapted()
    model.base.to(base)
    plan = paraplan.compile(model, "local:1", example_inputs={"x": torch.randn(8, 12)}, precision="bf16")
    return model, plan.executable(model)


def test_frozen_weights_come_back_in_the_dtype_of_the_users_model() -> None:
    """Rounded where the plan keeps halves alone; what was saved goes on exactly, and goes into the user's model."""
    model, taken = _adapted(0)
    optimizer = taken.optimizer(torch.optim.AdamW, lr=0.1)

    def steps(of: Any, optimizer: Any, numbers: range) -> list[float]:
        found = []
        for number in numbers:
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(number))
            found.append(float(of.step({"x": x})))
            optimizer.step()
            optimizer.zero_grad()
        return found

    steps(taken, optimizer, range(2))
    full = taken.full_state_dict()
    assert {name: x.dtype for name, x in full.items()} == dict.fromkeys(model.state_dict(), torch.float32)
    for name, param in model.named_parameters(remove_duplicate=False):
        if not param.requires_grad:
            assert torch.equal(full[name], param.bfloat16().float())
    model.load_state_dict(full)
    saved = taken.full_training_state(optimizer)
    _, other = _adapted(1)
    going_on = other.optimizer(torch.optim.AdamW, lr=0.1)
    other.load_full_training_state(saved, going_on)
    assert steps(other, going_on, range(2, 5)) == steps(taken, optimizer, range(2, 5))


def test_frozen_weights_in_halves_stay_so() -> None:
    model, taken = _adapted(0, torch.bfloat16)
    full = taken.full_state_dict()
    assert torch.equal(full["base.weight"], model.base.weight) and full["base.weight"].dtype == torch.bfloat16
