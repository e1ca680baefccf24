"""A small model of token ids whose batches have several lengths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Reader(nn.Module):
    """A tiny language model, over sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + torch.tanh(self.mix(x.cumsum(1)))
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def ids(rows: int, length: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 12, (rows, length), generator=torch.Generator().manual_seed(length))}


def reader() -> Reader:
    torch.manual_seed(0)
    return Reader().double().train()
