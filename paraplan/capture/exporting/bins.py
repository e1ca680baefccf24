"""Counts by a number of bins that the user gives, which have a size while exporting.

`torch.bincount(x, minlength=n)` has n bins, or more where the data need more, so that no graph of static sizes holds
it. Here it is what it is for data within its n bins: n zeros to which each index adds one, or its weight. A step whose
data need more is refused by the addition, which checks its indices as any indexing of torch does (an error on CPU, a
device-side assertion on CUDA). Without a `minlength` the size stays unknown, and capture refuses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_BINCOUNT = (torch.bincount, Tensor.bincount)


class BinsAsGiven(TorchFunctionMode):
    """Under it, a `bincount` has as many bins as its `minlength`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, or what stands for it."""
        kwargs = kwargs or {}
        if func in _BINCOUNT:
            counts = _counts(*args, **kwargs)
            if counts is not None:
                return counts
        return func(*args, **kwargs)


def _counts(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
    """The counts; None where their number is not given, or torch refuses the arguments."""
    whole = not (input.is_floating_point() or input.is_complex() or input.dtype == torch.bool)
    if minlength <= 0 or input.dim() != 1 or not whole or (weights is not None and weights.shape != input.shape):
        return None
    at = input.to(torch.int64)
    if weights is None:
        added = torch.ones_like(at)
    else:  # torch has no gradient of the weights, and double sums of what is not float32
        added = weights.detach().to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
    return added.new_zeros(minlength).scatter_add(0, at, added)
