"""Functions of torch that export would refuse or mistake, by others that compute the same.

An einsum that only turns a tensor's dims is a permutation of them, for it is a view. The negative log likelihood of a
Gaussian asks whether a variance is negative, and a covariance whether there are samples enough, which only data say:
here neither is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _turned(equation: object, *operands: Any, **named: object) -> Tensor | None:
    """What an einsum of one tensor gives that only turns its dims: a view, which a trace would take for a new tensor;
    None of any other."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or len(given) != 1 or not isinstance(given[0], Tensor):
        return None
    dims, _, order = equation.replace(" ", "").partition("->")
    if sorted(dims) != sorted(order) or not dims.isalpha() or len({*dims}) != len(dims) or len(dims) != given[0].dim():
        return None
    return given[0].permute([dims.index(dim) for dim in order])


def _gaussian_nll(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor | None:
    """`F.gaussian_nll_loss`; None of arguments that it refuses or reads no data of."""
    if not isinstance(var, Tensor) or reduction not in ("none", "mean", "sum"):
        return None
    if var.shape == input.shape[:-1] and var.shape != input.shape:
        var = var.unsqueeze(-1)
    if var.dim() != input.dim() or any(mine not in (1, its) for mine, its in zip(var.shape, input.shape, strict=True)):
        return None
    var = var + (var.clamp(min=eps) - var).detach()  # whose gradient is that of the variance as it was
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor | None:
    """`torch.cov` without weights."""
    if fweights is not None or aweights is not None or input.dim() > 2 or input.numel() == 0:
        return None
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    off = rows - rows.mean(1, keepdim=True)
    found = off @ off.mT.conj() / max(rows.shape[1] - correction, 0)
    return found if input.dim() == 2 else found.reshape(())


def _corrcoef(input: Tensor) -> Tensor | None:
    """`torch.corrcoef`."""
    found = None if input.is_complex() or input.dim() != 2 else _cov(input)
    if found is None:
        return None
    deviations = found.diagonal().sqrt()
    return (found / deviations[:, None] / deviations).clamp(-1, 1)


REWRITTEN: dict[object, Callable[..., Any]] = {
    torch.einsum: _turned,
    F.gaussian_nll_loss: _gaussian_nll,
    **dict.fromkeys((torch.cov, Tensor.cov), _cov),
    **dict.fromkeys((torch.corrcoef, Tensor.corrcoef), _corrcoef),
}
"""Per function, what gives the same; None where it is to run itself."""
