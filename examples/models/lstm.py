"""A language model with a recurrent cell: over few tokens every step is a piece of the program, over many a loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LSTM(nn.Module):
    """Predicts the next token from a recurrent state.

    Args:
        vocabulary: number of tokens.
        hidden: width of embedding and state.
        dropout: on the cell's input and result.
    """

    def __init__(self, vocabulary: int = 48, hidden: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden = hidden
        self.embed = nn.Embedding(vocabulary, hidden)
        self.cell = nn.LSTMCell(hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross-entropy of tokens [batch, time] after the first."""
        words = self.dropout(self.embed(tokens))
        h = c = words.new_zeros(tokens.shape[0], self.hidden)
        seen = []
        for step in range(tokens.shape[1] - 1):
            h, c = self.cell(words[:, step], (h, c))
            seen.append(h)
        logits = self.head(self.dropout(torch.stack(seen, 1)))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def factory(batch: int = 8, time: int = 6) -> tuple[LSTM, dict[str, Tensor]]:
    """A small model and a batch, for `paraplan plan examples.models.lstm:factory`."""
    draw = torch.Generator().manual_seed(1)
    return LSTM(), {"tokens": torch.randint(0, 48, (batch, time), generator=draw)}


def with_dropout() -> tuple[LSTM, dict[str, Tensor]]:
    """As `factory`, with dropout."""
    return LSTM(dropout=0.1), factory()[1]
