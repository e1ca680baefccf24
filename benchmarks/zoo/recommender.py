"""DLRM: a stack of tables, tables of their own, a bag."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.zoo.small import Small
from examples.models.dlrm import factory


def dlrm(dropout: float) -> Small:
    """Clicks; the model has no dropout."""
    torch.manual_seed(0)
    model, batch = factory()
    lifted = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    return Small("dlrm", model.double().train(), lifted)


MODELS: dict[str, Callable[[float], Small]] = {"dlrm": dlrm}
