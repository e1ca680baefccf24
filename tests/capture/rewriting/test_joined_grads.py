"""Gradients of slices as one concatenation: where the slices cover the tensor, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paraplan.ir.model.graph import Graph
from tests.against_eager import assert_trains_as_eager


class Cut(nn.Module):
    """Products of the pieces of a projection."""

    def __init__(self, pieces: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.pieces, self.out = nn.Linear(6, 12), pieces, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.pieces(self.project(x))).square().mean()  # type: ignore[no-any-return]


def _thirds(h: Tensor) -> Tensor:
    q, k, v = h.split(4, -1)
    return q * k.sigmoid() + v.tanh()


def _rotated(h: Tensor) -> Tensor:
    whole = torch.cat((-h[..., 6:], h[..., :6]), -1) * 0.3 + h * 0.7
    return whole[..., :4] * whole[..., 4:8] + whole[..., 8:]


def _overlapping(h: Tensor) -> Tensor:
    return h[..., :4].tanh() * h[..., 2:6] + h[..., 6:10] * h[..., 8:]


def _with_a_gap(h: Tensor) -> Tensor:
    return h[..., :4].tanh() * h[..., 5:9] + h[..., 8:]


def _read_twice(h: Tensor) -> Tensor:
    return h[..., :4] * h[..., 4:8] + h[..., 8:] * h.square().mean()


CUTS = {"thirds": 1, "rotated": 2, "overlapping": 0, "gap": 0, "whole too": 1}
PIECES = dict(zip(CUTS, (_thirds, _rotated, _overlapping, _with_a_gap, _read_twice), strict=True))


def _count(graphs: list[Graph], target: str) -> int:
    backwards = [op for graph in graphs for op in graph.ops if op.phase.value == "B"]
    return sum(op.target == target for op in backwards)


@pytest.mark.parametrize("name", CUTS)
def test_slices_that_cover_a_tensor_are_joined(name: str) -> None:
    batch = {"x": torch.randn(4, 6)}
    graphs = [kind.graph for kind in assert_trains_as_eager(Cut(PIECES[name]), batch).kinds]
    assert _count(graphs, "aten.cat.default") == CUTS[name]
    assert bool(_count(graphs, "aten.slice_backward.default")) == (CUTS[name] == 0)
