"""What depends on no data is known: masks of constants index, and Python reads numbers of constants."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.capture.capture import capture
from paraplan.capture.following import known_values
from paraplan.ir.errors import CaptureError
from tests.capture.looped import WIDTH, Net, held_against_eager

Body = Callable[[Net, Tensor], Tensor]


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def _contrasted(net: Net, h: Tensor) -> Tensor:
    z = F.normalize(h, dim=1)
    count = z.shape[0]
    alike = ~torch.eye(count, dtype=torch.bool, device=h.device)
    return F.cross_entropy((z @ z.t())[alike].view(count, count - 1), torch.zeros(count, dtype=torch.long))


def _written_mask(net: Net, h: Tensor) -> Tensor:
    count, half = h.shape[0], h.shape[0] // 2
    mask = torch.ones((count, count), dtype=torch.bool).fill_diagonal_(0)
    for i in range(half):
        mask[i, half + i] = 0
        mask[half + i, i] = 0
    alike = h @ h.t()
    return alike[mask].reshape(count, -1).pow(2).mean() + alike.masked_select(mask).sum()


def _columns(net: Net, h: Tensor) -> Tensor:
    even = torch.tensor([True, False] * (WIDTH // 2))
    h = h * 1
    h[:, even] = h[:, ~even] * 2
    return h[..., even].sum() + h[:, even].pow(2).mean()


def _numbers(net: Net, h: Tensor) -> Tensor:
    for factor in torch.arange(3).tolist():
        h = h * (factor + 1)
    for at in torch.arange(WIDTH):
        h = h + h[:, at : at + 1] * h[:, at].mean()
    if torch.linspace(0, 1, 5)[-1] > 0.5:
        h = h * 2
    return h * torch.arange(3).sum().item()


def _found(net: Net, h: Tensor) -> Tensor:
    alike, diagonal = h @ h.t(), torch.eye(6).nonzero()
    rows, columns = torch.where(torch.ones(6, 6).tril().bool())
    upper = alike[torch.ones(6, 6).triu(1).bool()]
    return alike[diagonal[:, 0], diagonal[:, 1]].sum() + alike[rows, columns].pow(2).sum() + upper.sum()


def _repeated(net: Net, h: Tensor) -> Tensor:
    times = torch.tensor([1, 2, 3, 1, 1, 2])
    return h.repeat_interleave(times, dim=0).pow(2) * torch.repeat_interleave(h, 2).mean()


BODIES: tuple[Body, ...] = (_contrasted, _written_mask, _columns, _numbers, _found, _repeated)


@pytest.mark.parametrize("body", BODIES)
def test_what_depends_on_no_data(body: Body) -> None:
    torch.manual_seed(0)
    held_against_eager(Net(body).double(), batch())


@pytest.mark.parametrize("body", [_contrasted, _columns])
def test_long_masks_are_sorted_out_by_the_program(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_values, "LISTED", 0)
    torch.manual_seed(0)
    program = held_against_eager(Net(body).double(), batch())
    assert any("sort" in op.target for kind in program.kinds for op in kind.graph.ops)


def test_layers_of_other_masks_are_others() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor, mask: Tensor) -> Tensor:
            h = self.linear(h)
            h = torch.cat((h[:, mask] * 2, h[:, ~mask]), 1)
            return h * (3 if mask[0] else 5)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = layer(x, torch.arange(WIDTH) % 2 == number % 2)
            return x.pow(2).mean()

    torch.manual_seed(0)
    held_against_eager(Layers().double(), batch())


def _copied(net: Net, h: Tensor) -> Tensor:
    mask = torch.zeros(6, dtype=torch.bool)
    mask.copy_(h[:, 0] > 0)
    return h[mask]


def _by_view(net: Net, h: Tensor) -> Tensor:
    mask = torch.zeros(6, dtype=torch.bool)
    mask.view(2, 3)[0] = h[:3, 0] > 0
    return h[mask]


def _drawn(net: Net, h: Tensor) -> Tensor:
    return h[torch.ones(6).bernoulli_(0.5).bool()]


@pytest.mark.parametrize("body", [_copied, _by_view, _drawn, lambda net, h: h[h[:, 0] > 0]])
def test_what_data_or_draws_decide_is_refused(body: Body) -> None:
    with pytest.raises(CaptureError, match="depends on tensor data"):
        capture(Net(body).double(), batch(), precision="fp64")
