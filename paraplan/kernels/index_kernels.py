"""Kernels of reading and writing by index tensors, with results that are row-major whatever their inputs' order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """x[indices], None standing for a whole dim."""
    given = [None if each is None else each.contiguous() for each in indices]
    return torch.ops.aten.index.Tensor(x.contiguous(), given)


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """x with `values` written, or added, at [indices].

    Args:
        x: is not changed.
        indices: for each leading dim of x integers or a bool mask, or None for the whole dim; they are broadcast
            together.
        values: x's dtype; broadcast to the shape of x[indices].
        accumulate: whether values are added; else one of those written to the same place remains.
    """
    out = x.clone(memory_format=torch.contiguous_format)
    return torch.ops.aten.index_put_.default(out, list(indices), values, accumulate)
