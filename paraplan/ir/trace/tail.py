"""The loss as a sum of terms: numerators that add over the batch, over counts the batch alone gives."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import fx

from paraplan.ir.trace import losses
from paraplan.ir.trace.flow import Flow, aten_name, value_of
from paraplan.ir.trace.rewrite import Rewriter

aten = torch.ops.aten
_ADDITIVE = frozenset({"sum", "_to_copy", "view", "reshape", "squeeze", "mul", "div", "count_nonzero"})


class Term(NamedTuple):
    """One addend of the loss; `denominator` is None where the numerator is already a mean.

    `name` and `weight` are those of the loss it belongs to; the weight is in the numerator.
    """

    numerator: fx.Node
    denominator: fx.Node | None
    name: str = ""
    weight: float = 1.0


def loss_terms(
    loss: fx.Node, flows: dict[fx.Node, Flow], rewriter: Rewriter, name: str = "", weight: float = 1.0
) -> list[Term]:
    """Takes the loss apart; constants are moved into the numerators as new nodes.

    Args:
        loss: the scalar loss.
        flows: flow of every node; new nodes are added to it.
        rewriter: places the new nodes.
        name, weight: of the loss, where there are several.
    """
    return [term._replace(name=name, weight=weight) for term in _terms(loss, weight, flows, rewriter)]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _terms(node: fx.Node, factor: float, flows: dict[fx.Node, Flow], rewriter: Rewriter) -> list[Term]:
    name, args = aten_name(node.target), node.args
    if name in ("add", "sub") and not node.kwargs and all(isinstance(x, fx.Node) for x in args[:2]) and len(args) == 2:
        if all(value_of(x).numel() == 1 and flows[x].carries for x in args):
            sign = -1.0 if name == "sub" else 1.0
            return _terms(args[0], factor, flows, rewriter) + _terms(args[1], factor * sign, flows, rewriter)
    if name in ("mul", "div") and isinstance(args[0], fx.Node) and len(args) == 2 and not node.kwargs:
        number = _number(args[1])
        if number:
            return _terms(args[0], factor * number if name == "mul" else factor / number, flows, rewriter)
        if name == "div" and isinstance(args[1], fx.Node) and _counts(args[1], flows):
            return [Term(_scaled(args[0], factor, flows, rewriter), args[1])]
    if name in ("view", "reshape", "squeeze", "alias") and value_of(node).numel() == 1:
        return _terms(args[0], factor, flows, rewriter)
    if name == "neg":
        return _terms(args[0], -factor, flows, rewriter)
    return [Term(_scaled(node, factor, flows, rewriter), None)]


def _scaled(node: fx.Node, factor: float, flows: dict[fx.Node, Flow], rewriter: Rewriter) -> fx.Node:
    if factor == 1.0:
        return node
    made = rewriter.call(node.next, aten.mul.Tensor, node, factor)
    flows[made] = flows[node]
    return made


def _counts(node: fx.Node, flows: dict[fx.Node, Flow]) -> bool:
    """Whether a scalar depends on the batch alone and adds over it."""
    flow = flows[node]
    if flow.param or flow.heavy or not flow.batch or value_of(node).numel() != 1:
        return False
    while value_of(node).numel() == 1:
        if node.target in (losses.count_valid, losses.weight_of_valid):
            return True
        if node.target is operator.getitem or aten_name(node.target) not in _ADDITIVE:
            return False
        if aten_name(node.target) in ("mul", "div") and _number(node.args[1]) is None:
            return False
        if aten_name(node.target) == "sum" and value_of(node.args[0]).numel() > 1:
            return True
        node = node.args[0]
    return False
