"""Writes in place made functional without retracing: the program is the one that retracing gives, and as eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from paraplan.capture import capture
from paraplan.capture.exporting import functional
from paraplan.capture.exporting.in_place import Write, has_writes
from paraplan.ir.errors import CaptureError
from paraplan.ir.model.program import Program
from tests.capture.models import eager, run, worst_error

Forward = Callable[[Tensor, Tensor], Tensor]


class _Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x @ self.weight, x).square().mean()


def _whole(h: Tensor, x: Tensor) -> Tensor:
    w = h.sin()
    w /= 3 + w.sum(-1, keepdim=True)
    w.mul_(2).add_(x)
    return w + h


def _returned(h: Tensor, x: Tensor) -> Tensor:
    w = h.sin()
    first = w.add_(1)
    w.mul_(3)
    return first * w


def _parts(h: Tensor, x: Tensor) -> Tensor:
    y = h.new_empty(h.shape)
    y[:, :2] = x[:, :2]
    y[:, 2:] = h[:, 2:]
    y[0] = h[1]
    return y


def _filled(h: Tensor, x: Tensor) -> Tensor:
    y = torch.zeros_like(h)
    y[..., 1:] = h[..., :-1].clone()
    y[..., 0] = 2.0
    return y.masked_fill_(x > 1, 0.5)


def _of_several(h: Tensor, x: Tensor) -> Tensor:
    values, places = h.topk(2)
    values /= values.detach().abs().sum()
    return torch.zeros_like(h).scatter_(1, places, values)


def _copied(h: Tensor, x: Tensor) -> Tensor:
    y = h.clone()
    y.relu_()
    return y * h


def _cast(h: Tensor, x: Tensor) -> Tensor:
    first, second = h.chunk(2, -1)
    return torch.cat((second, first), -1).type_as(x) + torch.tensor(0.5, dtype=torch.float64)


def _itself(h: Tensor, x: Tensor) -> Tensor:
    y = h.sin()
    same = y.to(x.dtype)
    same.add_(1)
    return same + y


DONE = [_whole, _returned, _parts, _filled, _of_several, _copied, _itself, _cast]


def _read_through_a_view(h: Tensor, x: Tensor) -> Tensor:
    y = h.exp()
    view = y.view(-1)
    y.mul_(2)
    return view.view_as(h) + y


def _written_through_a_view(h: Tensor, x: Tensor) -> Tensor:
    y = h.exp()
    y.t().mul_(2)
    return y


def _part_read_after(h: Tensor, x: Tensor) -> Tensor:
    y = h.exp()
    part = y[:, 1:]
    y[:, :3] = x[:, :3]
    return y.sum() + part


def _part_kept(h: Tensor, x: Tensor) -> Tensor:
    y = h.exp()
    part = y[:, 1:]
    part.mul_(2)
    return part + y[:, 1:]


def _maybe_a_view(h: Tensor, x: Tensor) -> Tensor:
    y = h.exp()
    same = y.contiguous().reshape(-1)
    y.add_(1)
    return same.view_as(y) * y


def _detached(h: Tensor, x: Tensor) -> Tensor:
    y = x.exp()
    kept = y.detach()
    y.mul_(2)
    return h * kept + y


def _under_no_grad(h: Tensor, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    with torch.no_grad():
        y[:, :2] = h[:, :2]
    return h * y


LEFT = [
    *(_read_through_a_view, _written_through_a_view, _part_read_after, _part_kept, _maybe_a_view, _detached),
    _under_no_grad,
]


def _captured(monkeypatch: pytest.MonkeyPatch, forward: Forward, always: bool) -> tuple[Program | str, int]:
    """The program or the error, and how often a graph was traced again; `always`: wherever anything is written."""
    calls: list[ExportedProgram] = []
    retraced, writes_of = ExportedProgram.run_decompositions, functional.writes_of

    def counted(program: ExportedProgram, *args: Any) -> ExportedProgram:
        calls.append(program)
        return retraced(program, *args)

    def refused(graph: fx.Graph, kept: Any) -> list[Write] | None:
        return None if always else writes_of(graph, kept)

    with monkeypatch.context() as patch:
        patch.setattr(ExportedProgram, "run_decompositions", counted)
        patch.setattr(functional, "writes_of", refused)
        try:
            return capture(_Model(forward), _batch(), precision="fp64"), len(calls)
        except CaptureError as fault:
            return str(fault), len(calls)


def _batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def _check_as_eager(forward: Forward, program: Program) -> None:
    model, batch = _Model(forward), _batch()
    loss, grads = run(program, model, batch)
    wanted, wanted_grads = eager(model, batch, "fp64")
    assert torch.allclose(loss, wanted, rtol=1e-12)
    assert worst_error(grads, wanted_grads) < 1e-12


@pytest.mark.parametrize("forward", DONE)
def test_writes_are_made_functional_as_by_retracing(monkeypatch: pytest.MonkeyPatch, forward: Forward) -> None:
    found, again = _captured(monkeypatch, forward, always=False)
    whole, _ = _captured(monkeypatch, forward, always=True)
    assert not again
    assert isinstance(found, Program)
    assert found == whole
    _check_as_eager(forward, found)


@pytest.mark.parametrize("forward", LEFT)
def test_what_has_other_names_is_retraced(monkeypatch: pytest.MonkeyPatch, forward: Forward) -> None:
    found, again = _captured(monkeypatch, forward, always=False)
    assert again
    assert found == _captured(monkeypatch, forward, always=True)[0]


def test_writes_are_seen() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.relu.default, (x,))
    assert not has_writes(graph)
    graph.call_function(torch.ops.aten.relu_.default, (made,))
    assert has_writes(graph)
