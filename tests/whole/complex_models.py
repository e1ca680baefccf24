"""A model with complex parameters, and its batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Fourier(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(2, 8), nn.Linear(8, 1)
        self.weight = nn.Parameter(0.1 * torch.randn(8, 8, 4, 3, dtype=torch.cfloat))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.lift(x).permute(0, 3, 1, 2)
        found = torch.einsum("bixy,ioxy->boxy", torch.fft.rfft2(h)[:, :, :4, :3], self.weight)
        return F.mse_loss(self.head((h + torch.fft.irfft2(found, s=(8, 8))).permute(0, 2, 3, 1)), y)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def fields() -> dict[str, Tensor]:
    return {"x": rows(4, 8, 8, 2), "y": rows(4, 8, 8, 1)}
