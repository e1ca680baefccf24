"""Two tensors of a model on one memory: refused where one changes, whenever they came to share it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import paraplan as pp
from paraplan.ir.errors import CaptureError


class Words(nn.Module):
    """Rows of a table through a head of the same shape; a buffer with a view of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.register_buffer("scale", torch.ones(2, 4))
        self.register_buffer("first", self.scale[0])

    def forward(self, ids: Tensor) -> Tensor:
        return (self.head(self.embed(ids)) ** 2).mean() * self.first.sum() * self.scale.sum()


class Counting(Words):
    def forward(self, ids: Tensor) -> Tensor:
        loss = super().forward(ids)
        self.scale.mul_(0.5)
        return loss


def _same_values(model: Words) -> None:
    model.head.weight.data = model.embed.weight.data


def _another_parameter(model: Words) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.data)


def _part(model: Words) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.data.view(-1)[8:].view(6, 4))


BATCH = {"ids": torch.arange(8) % 6}


@pytest.mark.parametrize("share", [_same_values, _another_parameter, _part])
def test_two_parameters_on_one_memory_are_refused(share: Callable[[Words], None]) -> None:
    model = Words()
    share(model)
    with pytest.raises(CaptureError, match=r"'embed.weight' and 'head.weight' are two tensors in the same memory"):
        pp.compile(model, "local:1", example_inputs=BATCH, optimizer="sgd")


def test_a_buffer_that_forward_writes_has_no_views() -> None:
    with pytest.raises(CaptureError, match=r"'scale' and 'first' are two tensors in the same memory"):
        pp.compile(Counting(), "local:1", example_inputs=BATCH, optimizer="sgd")


def test_a_plan_is_refused_a_model_that_shares() -> None:
    plan = pp.compile(Words(), "local:1", example_inputs=BATCH, optimizer="sgd")
    model = Words()
    plan.executable(copy.deepcopy(model))
    _same_values(model)
    with pytest.raises(CaptureError, match="two tensors in the same memory"):
        plan.executable(model)
    with pytest.raises(CaptureError, match="two tensors in the same memory"):
        plan.check(model, [BATCH])


def test_ties_and_views_of_constants_are_no_fault() -> None:
    model = Words()
    model.head.weight = model.embed.weight
    flat = torch.randn(2, 16)
    model.left, model.right = nn.Parameter(flat[0]), nn.Parameter(flat[1])
    pp.compile(model, "local:1", example_inputs=BATCH, optimizer="sgd")
