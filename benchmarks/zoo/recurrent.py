"""Recurrent language models: a few steps of a cell, which are written out, and loops over more steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.small import Small, made
from examples.models.lstm import LSTM, factory

BATCH, STEPS, WIDTH, STATE, WORDS = 8, 12, 8, 4, 16


def lstm(dropout: float) -> Small:
    """A few steps of one cell."""
    torch.manual_seed(0)
    model = LSTM(dropout=dropout).double().train()
    return Small("lstm", model, factory()[1])


class Layers(nn.Module):
    """Two recurrent layers in both directions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True, dropout=dropout)
        self.head = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """The loss of words: [batch, time]."""
        return F.cross_entropy(self.head(self.cell(self.words(words))[0]).flatten(0, 1), words.flatten())


class Selective(nn.Module):
    """A selective state space model: the scan of Mamba (Gu and Dao 2023), written out in Python."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(dropout)
        self.into = nn.Linear(WIDTH, 2 * WIDTH)
        self.parts = nn.Linear(WIDTH, WIDTH + 2 * STATE)
        self.rates = nn.Parameter(torch.randn(WIDTH, STATE))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """The loss of words: [batch, time]."""
        x, gate = self.into(self.drop(self.words(words))).chunk(2, -1)
        step, write, read = self.parts(x).split([WIDTH, STATE, STATE], -1)
        step = F.softplus(step)
        decay = torch.exp(step[..., None] * -self.rates.exp())
        given = (step * x)[..., None] * write[:, :, None]
        state, results = torch.zeros_like(given[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + given[:, t]
            results.append((state @ read[:, t, :, None])[..., 0])
        return F.cross_entropy(self.out(torch.stack(results, 1) * F.silu(gate)).flatten(0, 1), words.flatten())


def words(rows: int = BATCH) -> Tensor:
    """Random token numbers."""
    return torch.randint(0, WORDS, (rows, STEPS))


MODELS: dict[str, Callable[[float], Small]] = {"lstm": lstm}
LOOPS: dict[str, Callable[[float], Small]] = {
    "lstm_layers": lambda dropout: made("lstm_layers", lambda: Layers(dropout), {"words": words}),
    "selective": lambda dropout: made("selective", lambda: Selective(dropout), {"words": words}),
}
"""Models over so many steps that these are a loop."""
