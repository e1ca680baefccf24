"""Losses written out as sums over the batch, so that shards and microbatches of them simply add.

torch's own loss ops reduce with a mean inside one op, which is not the mean of shard means. Each function here is
plain differentiable torch code that the joint trace records op by op.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy_rows(
    logits: Tensor, labels: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float
) -> Tensor:
    """(Weighted, label-smoothed) cross-entropies: [...].

    per row: (1 − ε) · w[y] · (−log p_y) + ε/v · Σ_c w_c · (−log p_c), zero where y is ignored.

    Args:
        logits: [..., v].
        labels: [...], classes.
        weight: [v], of classes; None for ones.
        ignore_index: the label of rows that count for nothing.
        smoothing: ε.
    """
    logp = F.log_softmax(logits, -1)
    rows = likelihood_rows(logp, labels, weight, ignore_index)
    if not smoothing:
        return rows
    everywhere = -logp if weight is None else -logp * weight
    spread = torch.where(labels != ignore_index, everywhere.sum(-1) * (smoothing / logits.shape[-1]), 0.0)
    return (1 - smoothing) * rows + spread


def likelihood_rows(logp: Tensor, labels: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """−w[y] · log p_y, zero where y is ignored: [...].

    Args:
        logp: [..., v], logarithms of probabilities.
        labels, weight, ignore_index: as `cross_entropy_rows` takes them.
    """
    valid = labels != ignore_index
    index = torch.where(valid, labels, 0)
    rows = -logp.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return torch.where(valid, rows if weight is None else rows * weight[index], 0.0)


def soft_cross_entropy(logits: Tensor, shares: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    """Σ_c −w_c · s_c · log p_c of targets that are probabilities: [...].

    Args:
        logits: [..., v].
        shares: [..., v], the targets, before smoothing.
        weight: [v], of classes; None for ones.
        smoothing: ε, of s = (1 − ε) · shares + ε/v.
    """
    each = -F.log_softmax(logits, -1) * (shares * (1 - smoothing) + smoothing / logits.shape[-1])
    return (each if weight is None else each * weight).sum(-1)


def count_valid(labels: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """Number of labels that count: [].

    Args:
        labels: any shape.
        ignore_index: the label that does not count.
        dtype: of the result, a float.
    """
    return (labels != ignore_index).sum().to(dtype)


def weight_of_valid(labels: Tensor, weight: Tensor, ignore_index: int) -> Tensor:
    """Sum of the class weights of labels that count: [].

    Args:
        labels: any shape, classes.
        weight: [v], of classes.
        ignore_index: the label that does not count.
    """
    valid = labels != ignore_index
    return torch.where(valid, weight[torch.where(valid, labels, 0)], 0.0).sum()


def mse(x: Tensor, y: Tensor) -> Tensor:
    """(x − y)², elementwise."""
    return (x - y).pow(2)


def l1(x: Tensor, y: Tensor) -> Tensor:
    """|x − y|, elementwise."""
    return (x - y).abs()


def smooth_l1(x: Tensor, y: Tensor, beta: float) -> Tensor:
    """(x − y)² / (2 beta) within beta, |x − y| − beta/2 beyond, elementwise.

    Args:
        x, y: broadcastable to one shape.
        beta: the distance where the one becomes the other.
    """
    distance = (x - y).abs()
    return torch.where(distance < beta, distance.pow(2) * (0.5 / beta), distance - 0.5 * beta)


def huber(x: Tensor, y: Tensor, delta: float) -> Tensor:
    """(x − y)² / 2 within delta, delta · (|x − y| − delta/2) beyond, elementwise.

    Args:
        x, y: broadcastable to one shape.
        delta: the distance where the one becomes the other.
    """
    distance = (x - y).abs()
    return torch.where(distance < delta, distance.pow(2) * 0.5, (distance - 0.5 * delta) * delta)


def bce_with_logits(x: Tensor, y: Tensor, weight: Tensor | None, pos_weight: Tensor | None) -> Tensor:
    """((1 − y) · x + (1 + (pos − 1) · y) · softplus(−x)) · weight, elementwise.

    Args:
        x: logits.
        y: targets in [0, 1], of x's shape.
        weight: of elements, broadcastable to x; None for ones.
        pos_weight: pos, of positive targets, broadcastable to x; None for ones.
    """
    log_weight = 1.0 if pos_weight is None else 1 + (pos_weight - 1) * y
    rows = (1 - y) * x + log_weight * (torch.log1p(torch.exp(-x.abs())) + torch.clamp_min(-x, 0))
    return rows if weight is None else rows * weight


def mean(x: Tensor) -> Tensor:
    """Mean over all elements."""
    return x.mean()


HEAVY = frozenset({cross_entropy_rows, soft_cross_entropy})
"""Worth storing the result of."""
