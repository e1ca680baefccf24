"""State dicts are whole: what no training step reads or writes is in them as it is in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paraplan


class Sparse(nn.Module):
    """Parameters of evaluation alone and of nothing, tied; constant buffers, one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.out = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)
        self.only, self.never = nn.Linear(10, 10), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.never.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("scale", torch.rand(16))
        self.register_buffer("idle", torch.arange(3))
        self.norm.register_buffer("idle", self.idle)
        self.register_buffer("cached", torch.randn(3), persistent=False)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.out(self.norm(self.inner(x)) * self.scale)
        return (x if self.training else self.only(x)).square().mean()


def made(seed: int, precision: str = "fp32") -> tuple[Sparse, Any]:
    torch.manual_seed(seed)
    model = Sparse()
    plan = paraplan.compile(model, "local:1", example_inputs={"x": torch.randn(8, 12)}, precision=precision)
    return model, plan.executable(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_takes_what_a_trainer_gives(precision: str) -> None:
    model, trainer = made(0, precision)
    full = trainer.full_state_dict()
    kept = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        model.only.weight.zero_()  # the trainer has its own
    assert full.keys() == kept.keys()
    for name in ("only.weight", "never.weight", "tied.weight", "tied.bias", "frozen", "scale", "idle", "norm.idle"):
        assert torch.equal(trainer.full_state_dict()[name], kept[name]) and full[name].dtype == kept[name].dtype
    model.load_state_dict(full)
    _, other = made(1, precision)
    other.load_full_state_dict(full)
    assert all(torch.equal(x, full[name]) for name, x in other.full_state_dict().items())
    other.load_full_state_dict({name: x for name, x in full.items() if name != "only.weight"})


def test_an_earlier_checkpoint_without_them_is_resumed(tmp_path: Path) -> None:
    _, trainer = made(0)
    optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
    before = trainer.full_state_dict()
    trainer.unread.tensors.clear()
    trainer.save(tmp_path, optimizer)
    model, other = made(1)
    other.resume(tmp_path, other.optimizer(torch.optim.SGD, lr=0.1))
    full = other.full_state_dict()
    assert torch.equal(full["inner.weight"], before["inner.weight"]) and torch.equal(full["idle"], before["idle"])
    assert torch.equal(full["only.weight"], model.only.weight)


def test_fit_gives_and_takes_them() -> None:
    model, trainer = made(0)
    full = trainer.full_training_state()
    other = paraplan.fit(made(1)[0], {"x": torch.randn(8, 12)}, "1GiB")
    assert "count" in full["model"]
    other.load_training_state(full)
    assert all(torch.equal(x, full["model"][name]) for name, x in other.state_dict().items())
    assert other.training_state()["model"].keys() == {*model.state_dict(), "count"}


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.never = nn.Linear(12, 16), nn.Module()
        self.never.register_parameter("weight", nn.Parameter(torch.zeros(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def test_what_has_no_values_on_meta_is_left_out_with_a_warning() -> None:
    with torch.device("meta"):
        model = Uninitialised()
    plan = paraplan.compile(model, "local:1", example_inputs={"x": torch.randn(8, 12)})
    with pytest.warns(UserWarning, match=r"no training step reads never.weight, and state dicts leave it out"):
        trainer = plan.executable(model)
    assert trainer.full_state_dict().keys() == {"inner.weight", "inner.bias"}
