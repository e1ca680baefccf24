"""Loss ops -> sums over the batch and, where they are means, a count that depends on the batch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from paraplan.capture.canonical import autograd
from paraplan.capture.cutting.flow import aten_name, value_of
from paraplan.capture.rewriting import losses
from paraplan.capture.rewriting.rewrite import Rewriter

aten = torch.ops.aten
Found = dict[str, object]
NONE, MEAN, SUM = 0, 1, 2
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "flatten"})


def _source_of_flat(node: fx.Node) -> fx.Node:
    return node.args[0] if aten_name(node.target) in _VIEWS else node


def _unflattened(logits: fx.Node, labels: fx.Node) -> tuple[fx.Node, fx.Node]:
    """[b, s, v] and [b, s] behind view(-1, v) and view(-1), where they match."""
    wide, ids = _source_of_flat(logits), _source_of_flat(labels)
    shape = value_of(wide).shape
    if shape[-1] == value_of(logits).shape[-1] and tuple(shape[:-1]) == tuple(value_of(ids).shape):
        return wide, ids
    return logits, labels


def _narrow(logits: fx.Node) -> fx.Node:
    """Logits before a cast to float32: the kernels compute in float32 anyway."""
    if aten_name(logits.target) == "_to_copy":
        source = logits.args[0]
        if value_of(source).is_floating_point() and value_of(source).element_size() < value_of(logits).element_size():
            return source
    return logits


def _cross_entropy(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node | None:
    logits, labels, weight = found["self"], found["target"], found["weight"]
    reduction, smoothing = found["reduction"], float(found["label_smoothing"])
    ignore = int(found["ignore_index"])
    is_soft = value_of(labels).is_floating_point()
    if value_of(logits).dim() > 2:
        rank = value_of(logits).dim()
        order = [0, *range(2, rank), 1]
        logits = rewriter.call(node, aten.permute.default, logits, order)
        labels = rewriter.call(node, aten.permute.default, labels, order) if is_soft else labels
    elif value_of(logits).dim() == 2 and not is_soft and reduction != NONE:
        if value_of(_narrow(logits)).dim() == 2 and aten_name(logits.target) in _VIEWS:
            logits, labels = _unflattened(logits, labels)
    if is_soft:
        rows = rewriter.call(node, losses.soft_cross_entropy, logits, labels, weight, smoothing)
        return _reduced(rewriter, node, rows, reduction)
    if weight is None and not smoothing and reduction != NONE:
        total = rewriter.call(node, autograd.cross_entropy_sum, _narrow(logits), labels, ignore)
    else:
        rows = rewriter.call(node, losses.cross_entropy_rows, logits, labels, weight, ignore, smoothing)
        total = rows if reduction == NONE else rewriter.call(node, aten.sum.default, rows)
    return _over_valid(rewriter, node, total, labels, weight, ignore) if reduction == MEAN else total


def _log_likelihood(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node | None:
    logp, labels, weight = found["self"], found["target"], found["weight"]
    ignore, reduction = int(found["ignore_index"]), found["reduction"]
    if value_of(logp).dim() > 2:
        logp = rewriter.call(node, aten.permute.default, logp, [0, *range(2, value_of(logp).dim()), 1])
    rows = rewriter.call(node, losses.likelihood_rows, logp, labels, weight, ignore)
    if reduction == NONE:
        return rows
    total = rewriter.call(node, aten.sum.default, rows)
    return _over_valid(rewriter, node, total, labels, weight, ignore) if reduction == MEAN else total


def _over_valid(
    rewriter: Rewriter, node: fx.Node, total: fx.Node, labels: fx.Node, weight: object, ignore: int
) -> fx.Node:
    """A sum over valid labels, by their number or by the sum of their weights."""
    if weight is None:
        count = rewriter.call(node, losses.count_valid, labels, ignore, value_of(total).dtype)
    else:
        count = rewriter.call(node, losses.weight_of_valid, labels, weight, ignore)
    return rewriter.call(node, aten.div.Tensor, total, count)


def _binary_cross_entropy(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node | None:
    """torch's own op, elementwise: logarithms are clamped there, and their gradients otherwise."""
    rows = rewriter.call(node, aten.binary_cross_entropy.default, found["self"], found["target"], None, NONE)
    if found["weight"] is not None:
        rows = rewriter.call(node, aten.mul.Tensor, rows, found["weight"])
    return _reduced(rewriter, node, rows, found["reduction"])


def _reduced(rewriter: Rewriter, node: fx.Node, rows: fx.Node, reduction: object) -> fx.Node:
    if reduction == NONE:
        return rows
    return rewriter.call(node, losses.mean if reduction == MEAN else aten.sum.default, rows)


def _elementwise(
    function: Callable[..., object], extra: tuple[str, ...]
) -> Callable[[Rewriter, fx.Node, Found], fx.Node | None]:
    def rule(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node | None:
        rows = rewriter.call(node, function, found["self"], found["target"], *(found[name] for name in extra))
        return _reduced(rewriter, node, rows, found["reduction"])

    return rule


LOSSES: dict[str, Callable[[Rewriter, fx.Node, Found], fx.Node | None]] = {
    "cross_entropy_loss": _cross_entropy,
    "nll_loss": _log_likelihood,
    "nll_loss_nd": _log_likelihood,
    "nll_loss2d": _log_likelihood,
    "binary_cross_entropy": _binary_cross_entropy,
    "mse_loss": _elementwise(losses.mse, ()),
    "l1_loss": _elementwise(losses.l1, ()),
    "smooth_l1_loss": _elementwise(losses.smooth_l1, ("beta",)),
    "huber_loss": _elementwise(losses.huber, ("delta",)),
    "binary_cross_entropy_with_logits": _elementwise(losses.bce_with_logits, ("weight", "pos_weight")),
}
