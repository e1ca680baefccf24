"""What the correctness benchmarks run: a real architecture with a few thousand parameters and one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LossFn = Callable[[object, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Small:
    """A model in float64, with the batch it is given, and what a user would say beside them."""

    name: str
    model: nn.Module
    batch: dict[str, Any]
    loss_fn: LossFn | None = None
    batch_dims: dict[str, int | None] = field(default_factory=dict)


def made(
    name: str,
    model: Callable[[], nn.Module],
    inputs: Mapping[str, Callable[[], Any]],
    loss_fn: LossFn | None = None,
    batch_dims: dict[str, int | None] | None = None,
) -> Small:
    """A model and inputs from the same seed every time, in float64 and training mode."""
    torch.manual_seed(0)
    built = model().double().train()
    torch.manual_seed(1)
    return Small(name, built, {key: doubled(draw()) for key, draw in inputs.items()}, loss_fn, batch_dims or {})


def doubled(value: Any) -> Any:
    """Floats in float64, wherever they are in dicts and lists."""
    if isinstance(value, dict):
        return {key: doubled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(doubled(item) for item in value)
    return value.double() if value.is_floating_point() else value
