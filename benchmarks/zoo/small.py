"""What the correctness benchmarks run: a real architecture with a few thousand parameters and one batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Small:
    """A model in float64, with the batch it is given."""

    name: str
    model: nn.Module
    batch: dict[str, Tensor]
