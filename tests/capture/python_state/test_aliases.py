"""Parameters and buffers that a model holds beside their registration: in attributes, lists, mappings, objects."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paraplan
from paraplan.api import Plan
from paraplan.ir.errors import CaptureError, PlanMismatchError

BATCHES = [{"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))} for seed in range(3)]


class Model(nn.Module):
    """A linear layer, a buffer, and what a test keeps of them."""

    def __init__(self, keep: Callable[[Any], object], compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.kept, self.compute = keep(self), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.mean).square().mean() + self.compute(self, x)


def scaled(factor: float, weight: Tensor) -> Tensor:
    """A penalty."""
    return factor * weight.square().sum()


def penalty(model: Any, x: Tensor) -> Tensor:
    kept = model.kept.values() if isinstance(model.kept, dict) else model.kept
    return 1e-2 * sum(each.square().sum() for each in kept)


def moved(mean: Tensor, x: Tensor) -> Tensor:
    """A running mean, written in place."""
    mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return mean


def planned(keep: Callable, compute: Callable, devices: int = 1, **how: Any) -> Plan:
    return paraplan.compile(
        Model(keep, compute), f"local:{devices}", example_inputs=BATCHES[0], optimizer="sgd", precision="fp64", **how
    )


ALIASES: dict[str, tuple[Callable, Callable]] = {
    "list": (lambda model: [model.layer.weight, model.layer.bias], penalty),
    "tuple": (lambda model: (model.layer.weight,), penalty),
    "dict": (lambda model: {"weight": model.layer.weight}, penalty),
    "all": (lambda model: list(model.parameters()), penalty),
    "item": (lambda model: [model.layer.weight], lambda model, x: model.kept[0].square().sum()),
    "object": (
        lambda model: types.SimpleNamespace(weight=model.layer.weight),
        lambda model, x: model.kept.weight.square().sum(),
    ),
    "partial": (lambda model: functools.partial(scaled, 0.1, model.layer.weight), lambda model, x: model.kept()),
    "buffer read": (lambda model: model.mean, lambda model, x: (x * model.kept).sum()),
    "buffer written": (lambda model: model.mean, lambda model, x: (moved(model.kept, x) + model.mean).sum() * x[0, 0]),
    "buffer written, alias read": (
        lambda model: {"at": [model.mean]},
        lambda model, x: (moved(model.mean, x) * model.kept["at"][0] * model.layer.bias).sum(),
    ),
}


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_is_what_is_registered(name: str) -> None:
    keep, compute = ALIASES[name]
    model = Model(keep, compute)
    with torch.no_grad():
        model.mean.copy_(torch.linspace(-1.0, 1.0, 8))
    for plan in (planned(keep, compute), planned(keep, compute, 2, dp=2)):
        plan.check(model, BATCHES)


def test_a_list_that_is_switched_off_is_read_without_gradient() -> None:
    def without_gradient(model: Any, x: Tensor) -> Tensor:
        for each in model.kept:
            each.requires_grad_(False)
        found = model.layer(x).mean() + penalty(model, x)
        for each in model.kept:
            each.requires_grad_(True)
        return found + penalty(model, x)

    keep = ALIASES["list"][0]
    planned(keep, without_gradient).check(Model(keep, without_gradient), BATCHES)


def test_a_fitted_model_trains_with_aliases_and_notices_others() -> None:
    def compute(model: Any, x: Tensor) -> Tensor:
        return penalty(model, x) + (moved(model.mean, x) * model.kept[2]).sum() * model.layer.bias.sum()

    model = Model(lambda model: [model.layer.weight, model.layer.bias, model.mean], compute)
    eager = copy.deepcopy(model)
    fitted = paraplan.fit(model, BATCHES[0], memory="1MiB", optimizer="sgd", check=3)
    steps = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (fitted, eager)]
    for batch in BATCHES:
        losses = []
        for each, optimizer in steps:
            loss = each(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    model.kept.pop()
    with pytest.raises(PlanMismatchError, match=r"kept.*'layer\.weight' of the model.*call fit again"):
        fitted(**BATCHES[0])


def test_a_plan_names_what_is_aliased_and_serves_other_weights() -> None:
    with torch.device("meta"):
        model = Model(*ALIASES["list"])
    plan = paraplan.compile(model, "local:1", example_inputs=BATCHES[0], optimizer="sgd")
    plan.check(Model(*ALIASES["list"]), BATCHES)
    other = Model(lambda model: [model.layer.bias, model.layer.weight], penalty)
    with pytest.raises(PlanMismatchError, match=r"kept.*'layer\.bias'.*where the plan has.*'layer\.weight'"):
        plan.check(other, BATCHES)


class Tied(nn.Module):
    """Two parameters made of one tensor's memory."""

    def __init__(self, share: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = nn.Parameter(share(self.first.weight.data))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def assigned(model: Any, x: Tensor) -> Tensor:
    model.mean = 0.9 * model.mean + 0.1 * x.detach().mean(0)
    return (x * model.kept).sum() * model.layer.bias.sum()


@pytest.mark.parametrize(
    ("keep", "compute", "said"),
    [
        (lambda model: [nn.Parameter(torch.ones(8))], penalty, "test_aliases.*no parameter of the model"),
        (
            lambda model: model.mean[:4],
            lambda model, x: (moved(model.mean, x)[:4] * model.kept).sum() * model.layer.bias.sum(),
            r"test_aliases\.py:\d+: kept of Model.*memory of 'mean'.*take the view in forward",
        ),
        (
            lambda model: [model.layer.weight.data],
            lambda model, x: (model.layer.weight * model.kept[0]).sum(),
            r"test_aliases\.py:\d+: kept.*memory of 'layer\.weight'",
        ),
        (lambda model: model.mean, assigned, r"assigns buffer 'mean' anew.*copy_"),
    ],
)
def test_other_tensors_are_refused(keep: Callable, compute: Callable, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        planned(keep, compute)


def test_parameters_in_one_memory_are_refused_where_they_overlap() -> None:
    with pytest.raises(CaptureError, match=r"'first\.weight' and 'second\.weight' are two tensors in the same memory"):
        paraplan.compile(Tied(lambda x: x), "local:1", example_inputs=BATCHES[0])
    halves = Tied(lambda x: x)
    both = torch.randn(8, 16)
    halves.first.weight, halves.second.weight = (nn.Parameter(x) for x in both.chunk(2, 1))
    paraplan.compile(halves, "local:1", example_inputs=BATCHES[0], precision="fp64").check(halves, BATCHES)
    planned(lambda model: model.mean[:4], lambda model, x: (x[:, :4] * model.kept).sum() * model.layer.bias.sum())
