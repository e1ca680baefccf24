"""Capturing a model as it runs under the caller's `torch.autocast`: casts become ops of the program.

The context is entered inside the model's forward, by a class of its own for the length of a capture; the ambient one is
left meanwhile, lest it cast what capture itself computes. Programs are traced on CPU, so the CPU's lists of ops say
what is cast.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def ambient_autocast(device: str) -> torch.dtype | None:
    """The dtype autocast casts to on a kind of device just now; None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@contextmanager
def forward_under(model: nn.Module, device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast off, but for inside of the model's forward, where it casts to a dtype.

    Args:
        model: its class is another one for the while; equal in name.
        device: kind of device whose ambient autocast is left.
        dtype: None leaves the model as it is.
    """
    own = type(model)

    @functools.wraps(own.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return own.forward(self, *args, **kwargs)

    with torch.autocast(device, enabled=False):
        if dtype is None:
            yield
            return
        names = {"forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__}
        model.__class__ = type(own.__name__, (own,), names)  # type: ignore[assignment]
        try:
            yield
        finally:
            model.__class__ = own
