"""Losses written out as sums over the batch, so that shards and microbatches of them simply add.

torch's own loss ops reduce with a mean inside one op, which is not the mean of shard means. Each function here is
plain differentiable torch code that the joint trace records op by op.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def smoothed_cross_entropy_sum(
    logits: Tensor, labels: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float
) -> Tensor:
    """Sum of (weighted, label-smoothed) cross-entropies."""
    return smoothed_cross_entropy(logits, labels, weight, ignore_index, smoothing).sum()


def smoothed_cross_entropy(
    logits: Tensor, labels: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float
) -> Tensor:
    """(Weighted, label-smoothed) cross-entropies; logits [..., v], labels and result [...].

    per row: (1 − ε) · w[y] · (−log p_y) + ε/v · Σ_c w_c · (−log p_c), zero where y is ignored.
    """
    logp = F.log_softmax(logits, -1)
    valid = labels != ignore_index
    index = torch.where(valid, labels, 0)
    rows = -logp.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    everywhere = -logp
    if weight is not None:
        rows = rows * weight[index]
        everywhere = everywhere * weight
    if smoothing:
        rows = (1 - smoothing) * rows + everywhere.sum(-1) * (smoothing / logits.shape[-1])
    return torch.where(valid, rows, 0.0)


def count_valid(labels: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """Number of labels that count, as a float."""
    return (labels != ignore_index).sum().to(dtype)


def weight_of_valid(labels: Tensor, weight: Tensor, ignore_index: int) -> Tensor:
    """Sum of the class weights of labels that count."""
    valid = labels != ignore_index
    return torch.where(valid, weight[torch.where(valid, labels, 0)], 0.0).sum()


def mse(x: Tensor, y: Tensor) -> Tensor:
    """(x − y)², elementwise."""
    return (x - y).pow(2)


def l1(x: Tensor, y: Tensor) -> Tensor:
    """|x − y|, elementwise."""
    return (x - y).abs()


def smooth_l1(x: Tensor, y: Tensor, beta: float) -> Tensor:
    """Quadratic within beta, linear beyond, elementwise."""
    distance = (x - y).abs()
    return torch.where(distance < beta, distance.pow(2) * (0.5 / beta), distance - 0.5 * beta)


def huber(x: Tensor, y: Tensor, delta: float) -> Tensor:
    """Quadratic within delta, linear beyond, elementwise."""
    distance = (x - y).abs()
    return torch.where(distance < delta, distance.pow(2) * 0.5, (distance - 0.5 * delta) * delta)


def bce_with_logits(x: Tensor, y: Tensor, weight: Tensor | None, pos_weight: Tensor | None) -> Tensor:
    """(1 − y) · x + (1 + (pos − 1) · y) · softplus(−x), elementwise."""
    log_weight = 1.0 if pos_weight is None else 1 + (pos_weight - 1) * y
    rows = (1 - y) * x + log_weight * (torch.log1p(torch.exp(-x.abs())) + torch.clamp_min(-x, 0))
    return rows if weight is None else rows * weight


def mean(x: Tensor) -> Tensor:
    """Mean over all elements."""
    return x.mean()


def rms_norm(x: Tensor, dims: int, weight: Tensor | None, eps: float) -> Tensor:
    """x · rsqrt(mean(x²) + eps) · weight over the last `dims` dims, in float32 at least."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)
    normal = wide * torch.rsqrt(wide.pow(2).mean(list(range(-dims, 0)), keepdim=True) + eps)
    return (normal if weight is None else normal * weight).to(x.dtype)


SUMS = frozenset({smoothed_cross_entropy_sum})
