"""Models the tests name on the command line, and ways a factory can be wrong."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


class Net(nn.Module):
    """Two layers, so that a tensor-parallel pair exists."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Outside(Net):
    """Reads a number that no plan knows of."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(os.environ.get("ZOO_SCALE", "1"))


def loss(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch["x"]).pow(2).mean()


def net():  # type: ignore[no-untyped-def]
    return Net(), {"x": torch.randn(8, 4, 8)}, loss


def outside():  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    return Outside(), {"x": torch.randn(8, 4, 8)}, loss


def wider():  # type: ignore[no-untyped-def]
    return Net(32), {"x": torch.randn(8, 4, 8)}, loss


def bare() -> nn.Module:
    return Net()


def number() -> int:
    return 3


def fails() -> nn.Module:
    raise ValueError("no luck")


constant = 4
