"""A multi-layer perceptron with a mean squared error: the smallest model there is to plan for."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """`depth` blocks of linear, GELU and dropout, then a head.

    Args:
        width: features in and out, [batch, width].
        hidden: features of every hidden layer.
        depth: hidden layers.
        dropout: probability of dropping a hidden feature.
    """

    def __init__(self, width: int = 32, hidden: int = 128, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        sizes = [width] + [hidden] * depth
        blocks = [nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Dropout(dropout)) for a, b in itertools.pairwise(sizes)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(hidden, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss: mean squared error of the prediction for x against y, both [batch, width]."""
        return nn.functional.mse_loss(self.head(self.blocks(x)), y)


def factory(batch: int = 32, width: int = 32, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one global batch."""
    inputs = torch.Generator().manual_seed(0)
    x, y = (torch.randn(batch, width, generator=inputs) for _ in range(2))
    return MLP(width, dropout=dropout), {"x": x, "y": y}


def with_dropout() -> tuple[nn.Module, dict[str, Tensor]]:
    """The same with a tenth of the hidden features dropped."""
    return factory(dropout=0.1)
