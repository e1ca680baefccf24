"""A recurrent language model, unrolled over time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.zoo.small import Small
from examples.models.lstm import LSTM, factory


def lstm(dropout: float) -> Small:
    """A few steps of one cell."""
    torch.manual_seed(0)
    model = LSTM(dropout=dropout).double().train()
    return Small("lstm", model, factory()[1])


MODELS: dict[str, Callable[[float], Small]] = {"lstm": lstm}
