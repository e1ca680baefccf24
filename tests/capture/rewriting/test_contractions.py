"""Einsums rewritten: equal to torch's, with gradients; and which dims may be sharded afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.capture.rewriting import contractions
from paraplan.rules.strategies import axis_choices, dims_of

SIZES = dict(zip("gtechfbnsd", (2, 3, 4, 5, 6, 7, 2, 3, 4, 5), strict=True))
EQUATIONS = (
    "gtec,gth->egch", "gtec,egch->gth", "egch,ehf->egcf", "gt,gte,gtc->gtec", "bsh,hf->bsf", "bsh,hnd->bnsd",
    "bnsd,bntd->bnst", "bsh,hf", "gt,gt->", "gt,te,ec->gc", "gte->eg", "bsd,d->bs", "tge,ge->g", "gt,hf->gthf",
)  # fmt: skip


@pytest.mark.parametrize("equation", EQUATIONS)
def test_equal_to_torch(equation: str) -> None:
    draw = torch.Generator().manual_seed(0)
    terms = equation.split("->")[0].split(",")
    given = [torch.randn([SIZES[x] for x in term], generator=draw, dtype=torch.float64) for term in terms]
    results = []
    for function in (torch.einsum, lambda text, *xs: contractions.einsum(text, list(xs))):
        inputs = [x.clone().requires_grad_() for x in given]
        out = function(equation, *inputs)
        grads = torch.autograd.grad((out * torch.cos(out)).sum(), inputs)
        results.append((out.detach(), *grads))
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("...a,ab->...b", ((2, 3), (3, 4))), ("aab->b", ((2, 2, 3),)), ("ab,bc->ac", ((2, 1), (3, 4)))],
)
def test_what_is_left_to_torch(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    assert contractions.parse(equation, shapes) is None


class Combine(nn.Module):
    """The way back from the experts, its subscripts named as in GShard's paper."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, mask: Tensor, rows: Tensor) -> Tensor:
        return torch.einsum("gtec,egch->gth", mask, rows * self.scale).square().sum()


def test_experts_lead_the_merged_dim_whatever_their_subscript() -> None:
    """Experts (4) and slots (3) are contracted as one dim of 12, which shards over the experts only where they lead."""
    program = capture(
        Combine(), {"mask": torch.rand(2, 5, 4, 3), "rows": torch.rand(4, 2, 3, 6)}, batch_dims={"rows": 1}
    )
    graph = next(kind.graph for kind in program.kinds if any(op.target == "aten.bmm.default" for op in kind.graph.ops))
    views = [op for op in graph.ops if op.target.startswith("aten.view") and 12 in graph.values[op.outs[0]].shape]  # type: ignore[index]
    assert views
    for view in views:
        merged = graph.values[view.outs[0]].shape.index(12)  # type: ignore[index]
        dim = dims_of(view, graph.values).outputs[0][merged]  # type: ignore[index]
        assert dims_of(view, graph.values).sizes[dim] == 4
        assert dim in {choice.dim for choice in axis_choices(dims_of(view, graph.values))}
