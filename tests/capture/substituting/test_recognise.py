"""Norms, rotary embeddings and gated activations written out by hand are one op; what looks alike stays as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.capture import capture, run_program
from paraplan.ir.model.graph import Op, Phase

Body = Callable[[Tensor, Tensor, Tensor], Tensor]


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _turned_by_chunks(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


ROTARY: dict[str, tuple[Body, int]] = {
    "slices": (lambda x, cos, sin: x * cos + _turned(x) * sin, 1),
    "chunks, reversed": (lambda x, cos, sin: sin * _turned_by_chunks(x) + cos * x, 1),
    "of heads": (lambda x, cos, sin: x.view(2, 6, 2, 4).mT * cos.view(6, 2, 4).mT + _turned(x).view(2, 6, 2, 4).mT, 0),
    "transposed": (lambda x, cos, sin: x.mT.mT * cos[0] + _turned(x.mT.mT) * sin[:1, None, 0, :], 0),
    "other halves": (lambda x, cos, sin: x * cos + torch.cat((x[..., 4:], -x[..., :4]), -1) * sin, 0),
    "another tensor's": (lambda x, cos, sin: x * cos + _turned(2 * x) * sin, 0),
    "thirds": (lambda x, cos, sin: x * cos + torch.cat((-x[..., 3:], x[..., :3]), -1) * sin, 0),
    "cosines of one column": (lambda x, cos, sin: x * cos[..., :1] + _turned(x) * sin, 0),
}
GATED: dict[str, tuple[Body, int]] = {
    "silu": (lambda x, a, b: F.silu(x * a) * (x + b), 1),
    "gelu of the right": (lambda x, a, b: (x + b) * F.gelu(x * a), 1),
    "tanh form": (lambda x, a, b: F.gelu(x * a, approximate="tanh") * (x + b), 1),
    "of itself": (lambda x, a, b: F.silu(x + a) * (x + a), 1),
    "strided": (lambda x, a, b: F.silu((x + a).mT) * (x * b).mT, 1),
    "read twice": (lambda x, a, b: (y := F.silu(x * a)) * x + y, 0),
    "of another shape": (lambda x, a, b: F.silu(x * a) * b[:1], 0),
    "added": (lambda x, a, b: F.silu(x * a) + x, 0),
}


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


NORMS: dict[str, tuple[Body, int]] = {
    "weighed": (lambda x, a, b: a[0, 0] * _normed(x), 2),
    "weighed from the right": (lambda x, a, b: _normed(x + b) * (1 + a[0, 1]), 2),
    "read twice": (lambda x, a, b: (y := _normed(x)) * a[0, 0] + y, 1),
    "a weight of every row": (lambda x, a, b: _normed(x) * a, 1),
    "multiplied by itself": (lambda x, a, b: (y := _normed(x)) * y, 1),
}


class Model(nn.Module):
    """Both operands learned, so that their gradients are compared as well."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.body = nn.Linear(8, 8), body
        self.a, self.b = (nn.Parameter(torch.randn(1, 6, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear(x), self.a, self.b).square().mean()


def _ops(body: Body) -> list[Op]:
    """Those captured, with loss and gradients held against eager's."""
    model = Model(body).double()
    batch = {"x": torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}
    program = capture(model, batch, precision="fp64")
    loss, grads = run_program(program, dict(model.named_parameters()), {}, batch, 0)
    told = model(**batch)
    told.backward()
    torch.testing.assert_close(loss, told, rtol=1e-12, atol=0)
    for name, param in model.named_parameters():
        found = grads[name]
        assert (found is None) == (param.grad is None), name
        if found is not None:
            torch.testing.assert_close(found, param.grad, rtol=1e-10, atol=1e-14)
    kinds = [program.kinds[segment.kind] for segment in program.segments]
    return [op for kind in kinds for op in kind.graph.ops]


def _counted(body: Body) -> Counter[tuple[str, bool]]:
    """How often each op runs, forward and backward."""
    return Counter((op.target, op.phase is Phase.FORWARD) for op in _ops(body))


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_embeddings(name: str) -> None:
    body, count = ROTARY[name]
    found = _counted(body)
    assert (found["paraplan.rotary", True], found["paraplan.rotary", False]) == (count, count)
    assert not count or not any("neg" in target and forward for target, forward in found)


@pytest.mark.parametrize("name", GATED)
def test_gated_activations(name: str) -> None:
    body, count = GATED[name]
    found = _counted(body)
    assert (found["paraplan.gated", True], found["paraplan.gated_grad", False]) == (count, count)
    assert bool(count) != any("lu.default" in target for target, _ in found)


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    """With its weight it reads two tensors, and one without."""
    body, tensors = NORMS[name]
    assert [len(op.tensors) for op in _ops(body) if op.target == "paraplan.rms_norm"] == [tensors]
