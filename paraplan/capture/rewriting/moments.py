"""Reductions written out as sums, so that shards of what they reduce add up: moments, norms, log-sum-exp.

Each function is plain differentiable torch code that the joint trace records op by op, with the gradients torch's own
ops have (a norm's is zero at zero).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def variance(x: Tensor, dims: Sequence[int], correction: float, keepdim: bool) -> Tensor:
    """Σ (x − mean)² / max(n − correction, 0) over `dims`.

    Args:
        x: real, any shape.
        dims: those reduced; n is the product of their sizes.
        correction: 1 for an unbiased estimate, 0 for the mean square.
        keepdim: whether they stay, with size 1.
    """
    count = math.prod(x.shape[dim] for dim in dims)
    centred = x - x.mean(dims, keepdim=True)
    return (centred * centred).sum(dims, keepdim=keepdim) / max(count - correction, 0.0)


def deviation(x: Tensor, dims: Sequence[int], correction: float, keepdim: bool) -> Tensor:
    """The square root of `variance`, with no gradient where it is zero.

    Args:
        x, dims, correction, keepdim: as `variance` takes them.
    """
    return _root(variance(x, dims, correction, keepdim))


def mean(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Mean over some dims.

    Args:
        x, dims, keepdim: as `variance` takes them.
    """
    return x.mean(dims, keepdim=keepdim)


def vector_norm(x: Tensor, order: float, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """(Σ |x|^order)^(1/order) over `dims`.

    Args:
        x, dims, keepdim: as `variance` takes them.
        order: 1, 2 or infinite.
        dtype: in which it is computed and given; None for x's.
    """
    wide = x if dtype is None else x.to(dtype)
    if order == 2:
        return _root((wide * wide).sum(dims, keepdim=keepdim))
    return wide.abs().sum(dims, keepdim=keepdim) if order == 1 else wide.abs().amax(dims, keepdim=keepdim)


def log_sum_exp(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """log Σ exp(x) over `dims`.

    Args:
        x, dims, keepdim: as `variance` takes them.
    """
    top = x.detach().amax(dims, keepdim=True)
    top = torch.where(top.abs() == math.inf, 0.0, top)
    total = (x - top).exp().sum(dims, keepdim=keepdim).log()
    return total + (top if keepdim else top.reshape(total.shape))


def _root(x: Tensor) -> Tensor:
    empty = x == 0
    return torch.where(empty, 0.0, torch.where(empty, 1.0, x).sqrt())
