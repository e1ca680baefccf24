"""Merged dims: moved below what does not see them, so that the batch stays a dim of its own."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import paraplan as pp
from paraplan.capture.rewriting.flattened import refined
from paraplan.codegen import build_modules
from paraplan.runtime.in_process import InProcessTrainer


class Encoder(nn.Module):
    """torch's own layer: its attention flattens [sequence, batch] to rows, the sequence leading."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x)).square().mean()


class Rows(nn.Module):
    """Sequence first, flattened through linear, norm, softmax, a gate of two operands, and never taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).reshape(-1, 8)
        h = self.norm(F.gelu(self.a(rows)) * rows)
        return (torch.softmax(self.b(h), -1) * 2 - h.sigmoid()).square().mean()


class Weighed(nn.Module):
    """Attention that gives out its weights is written out: heads are split from hidden and merged with samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.attention(h, h, h)[0].square().mean()


@pytest.mark.parametrize("make", [Encoder, Rows, Weighed])
def test_flattened_layers_run_in_microbatches(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 5, 8)
    eager = copy.deepcopy(model).double()
    wanted = eager(x.double())
    wanted.backward()
    plan = pp.compile(model, "local:2", example_inputs={"x": x}, precision="fp64", dp=2, microbatches=2)
    trainer = InProcessTrainer(plan.data, plan.programs, [build_modules(p) for p in plan.programs], eager)
    assert trainer.step({"x": x.double()}).item() == pytest.approx(wanted.item(), rel=1e-12)
    grads = trainer.grads()
    for name, param in eager.named_parameters():
        assert torch.allclose(grads[name], param.grad, rtol=1e-10, atol=1e-13), name


@given(st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=3), min_size=1, max_size=4))
def test_groups_of_a_merge_are_found(groups: list[list[int]]) -> None:
    source, target = [size for group in groups for size in group], [math.prod(group) for group in groups]
    assert refined(source, target) == tuple(map(tuple, groups))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_reshape_is_a_split_and_a_merge(source: list[int], extra: list[int]) -> None:
    target = [*extra, *source]
    found = refined([math.prod(extra) * source[0], *source[1:]], target)
    assert found is not None and [math.prod(group) for group in found] == target


@pytest.mark.parametrize(("source", "target"), [((4, 6), (6, 4)), ((2, 9), (3, 6))])
def test_other_reshapes_are_no_merges(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    assert refined(source, target) is None
