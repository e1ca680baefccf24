"""The loss as a sum of terms: numerators that add over the batch, over counts the batch alone gives.

    loss = constant + sum of factor · scale · numerator / denominator

Sums, differences, numbers and scalars that no sample decides (a learned temperature) are taken apart as far as the loss
is linear, and what is left is a numerator: a node that nothing else reads, so that what microbatches and ranks make of
it can be added up in place. Addends that are one loss are one term.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from functools import reduce
from typing import NamedTuple

import torch
from torch import fx

from paraplan.capture.cutting.flow import Flow, aten_name, value_of
from paraplan.capture.rewriting import losses
from paraplan.capture.rewriting.rewrite import Rewriter

aten = torch.ops.aten
_ADDITIVE = frozenset({"sum", "_to_copy", "view", "reshape", "squeeze", "mul", "div", "count_nonzero"})
_SAME = frozenset({"view", "reshape", "squeeze", "unsqueeze", "alias", "sum", "mean"})
"""Of one element, these are that element."""

_FILLED: dict[str, Callable[[fx.Node], object]] = {
    "zeros": lambda node: 0.0,
    "ones": lambda node: 1.0,
    "full": lambda node: node.args[1],
    "scalar_tensor": lambda node: node.args[0],
}
"""Scalars that are numbers."""


class LossFraction(NamedTuple):
    """One addend of the loss; `denominator` is None where the numerator is already a mean.

    `name` and `weight` are those of the loss it belongs to; the weight is in the numerator.
    """

    numerator: fx.Node
    denominator: fx.Node | None
    name: str = ""
    weight: float = 1.0


class _Addend(NamedTuple):
    """What is added, but for its factor; `scales` are scalars it is multiplied by or divided by, with the op.

    `numerator` is None in a constant.
    """

    numerator: fx.Node | None
    denominator: fx.Node | None = None
    scales: tuple[tuple[fx.Node, object], ...] = ()


def loss_terms(
    loss: fx.Node,
    flows: dict[fx.Node, Flow],
    rewriter: Rewriter,
    dtype: torch.dtype,
    name: str = "",
    weight: float = 1.0,
) -> list[LossFraction]:
    """Takes the loss apart; factors are moved into the numerators as new nodes.

    Args:
        loss: the scalar loss.
        flows: flow of every node; new nodes are added to it.
        rewriter: places the new nodes.
        dtype: of what is added up, the widest of all losses.
        name, weight: of the loss, where there are several.
    """
    found = _Found(loss, flows)
    found.take(loss, weight, ())
    order = {node: index for index, node in enumerate(rewriter.graph.nodes)}
    terms = []
    for addend, factor in found.factors.items():
        if addend.numerator is None and not factor:
            continue
        numerator = _cast(_numerator(addend, factor, loss, order, flows, rewriter), dtype, flows, rewriter)
        count = addend.denominator
        terms.append(LossFraction(numerator, count and _cast(count, dtype, flows, rewriter), name, weight))
    return terms


def own_numerators(
    terms: Sequence[LossFraction], taken: Set[fx.Node], flows: dict[fx.Node, Flow], rewriter: Rewriter
) -> list[LossFraction]:
    """The terms, each with a numerator that is a node of its own.

    Args:
        terms: of all losses; what is no part of the program any longer has been removed from the graph.
        taken: nodes that are results of the program otherwise.
        flows, rewriter: as of `loss_terms`.
    """
    found, seen = [], set(taken)
    for term in terms:
        node = term.numerator
        alone = node.op != "placeholder" and node not in seen and all(user.op == "output" for user in node.users)
        seen.add(node)
        own = alone and not value_of(node).dim()
        found.append(term if own else term._replace(numerator=_copied(node, flows, rewriter)))
    return found


def _copied(node: fx.Node, flows: dict[fx.Node, Flow], rewriter: Rewriter) -> fx.Node:
    """A node of its own with the value of another, a scalar."""
    before = _behind(node, rewriter)
    if value_of(node).dim():
        flat = rewriter.call(before, aten.reshape.default, node, [])
        flows[flat] = flows[node]
        node = flat
    made = rewriter.call(before, aten.mul.Tensor, node, 1.0)
    flows[made] = flows[node]
    return made


def _cast(node: fx.Node, dtype: torch.dtype, flows: dict[fx.Node, Flow], rewriter: Rewriter) -> fx.Node:
    """A node in the dtype of the losses, where an addition widens it.

    Never in a narrower one: a half holds no count, and a sum over shards is no sum once it is rounded.
    """
    own = value_of(node).dtype
    wide = torch.promote_types(own, dtype)
    wanted = wide if own.is_floating_point else torch.promote_types(wide, torch.float32)
    if own == wanted:
        return node
    made = rewriter.call(_behind(node, rewriter), aten._to_copy.default, node, dtype=wanted)
    flows[made] = flows[node]
    return made


def alike(terms: Sequence[LossFraction], flows: dict[fx.Node, Flow], rewriter: Rewriter) -> list[LossFraction]:
    """The terms in the widest dtype of any, for all are added up.

    Args:
        terms: of the loss.
        flows: of nodes; those of casts are added.
        rewriter: of the graph.
    """
    dtype = reduce(torch.promote_types, (value_of(term.numerator).dtype for term in terms))
    found = []
    for term in terms:
        count = term.denominator
        wide = None if count is None else _cast(count, dtype, flows, rewriter)
        found.append(term._replace(numerator=_cast(term.numerator, dtype, flows, rewriter), denominator=wide))
    return found


def _behind(node: fx.Node, rewriter: Rewriter) -> fx.Node:
    """The node that what reads `node` is to be placed before."""
    if node.op != "placeholder":
        return node.next
    return next(each for each in rewriter.graph.nodes if each.op != "placeholder")


def _numerator(
    addend: _Addend,
    factor: float,
    loss: fx.Node,
    order: Mapping[fx.Node, int],
    flows: dict[fx.Node, Flow],
    rewriter: Rewriter,
) -> fx.Node:
    """An addend times its factor as a node, placed where everything it reads is there."""
    if addend.numerator is None:
        made = rewriter.call(_behind(loss, rewriter), aten.full.default, [], factor, dtype=value_of(loss).dtype)
        flows[made] = Flow()
        return made
    node, sources = addend.numerator, (addend.numerator, *(scale for scale, _ in addend.scales))
    before = _behind(max(sources, key=order.__getitem__), rewriter)
    calls: list[tuple[object, object]] = [(op, scale) for scale, op in addend.scales]
    for op, other in (*calls, *([(aten.mul.Tensor, factor)] if factor != 1.0 else [])):
        made = rewriter.call(before, op, node, other)  # type: ignore[arg-type]
        read = [flows[x] for x in (node, other) if isinstance(x, fx.Node)]
        flows[made] = Flow(*(any(each) for each in zip(*read, strict=True)))
        node = made
    return node


def _number(value: object) -> float | None:
    if isinstance(value, fx.Node) and value.meta["val"].dim() == 0 and aten_name(value.target) in _FILLED:
        value = _FILLED[aten_name(value.target)](value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


class _Found:
    """The addends of a loss with their factors, equal ones joined."""

    def __init__(self, loss: fx.Node, flows: dict[fx.Node, Flow]) -> None:
        self.loss, self.flows = loss, flows
        self.factors: dict[_Addend, float] = {}

    def add(self, addend: _Addend, factor: float) -> None:
        """One more."""
        self.factors[addend] = self.factors.get(addend, 0.0) + factor

    def take(self, value: object, factor: float, scales: tuple[tuple[fx.Node, object], ...]) -> None:
        """Add a value, a scalar or a number, times a factor and scales."""
        number = _number(value)
        if number is not None and not scales:
            self.add(_Addend(None), number * factor)
            return
        assert isinstance(value, fx.Node)
        if not self._parts(value, factor, scales):
            self.add(_Addend(value, None, scales), factor)

    def _parts(self, node: fx.Node, factor: float, scales: tuple[tuple[fx.Node, object], ...]) -> bool:
        """Add what a node is the sum of; whether it is one."""
        name, args = aten_name(node.target), node.args
        if not name or not value_of(node).is_floating_point():
            return False
        if name in _SAME and self._is_scalar(args[0]):
            self.take(args[0], factor, scales)
        elif name == "neg":
            self.take(args[0], -factor, scales)
        elif name in ("add", "sub", "rsub"):
            return self._sum(node, factor, scales)
        elif name == "mul" and len(args) == 2:
            return self._product(args[0], args[1], factor, scales) or self._product(args[1], args[0], factor, scales)
        elif name == "div" and len(args) == 2 and not node.kwargs:
            return self._quotient(args[0], args[1], factor, scales)
        else:
            return name == "sum" and len(args) == 1 and self._stacked(args[0], factor, scales)
        return True

    def _is_scalar(self, value: object) -> bool:
        return isinstance(value, fx.Node) and value_of(value).numel() == 1 and value_of(value).is_floating_point()

    def _sum(self, node: fx.Node, factor: float, scales: tuple[tuple[fx.Node, object], ...]) -> bool:
        left, right = node.args[:2]
        alpha = _number(node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1))
        known = [self._is_scalar(each) or (_number(each) is not None and not scales) for each in (left, right)]
        if alpha is None or not all(known):
            return False
        if aten_name(node.target) == "rsub":  # right − alpha · left
            self.take(right, factor, scales)
            self.take(left, -alpha * factor, scales)
        else:
            self.take(left, factor, scales)
            self.take(right, alpha * factor if aten_name(node.target) == "add" else -alpha * factor, scales)
        return True

    def _product(self, node: object, by: object, factor: float, scales: tuple[tuple[fx.Node, object], ...]) -> bool:
        number = _number(by)
        if not self._is_scalar(node) or (number is None and not self._scales(node, by)):
            return False
        if number is not None:
            self.take(node, factor * number, scales)
        else:
            assert isinstance(by, fx.Node)
            self.take(node, factor, (*scales, (by, aten.mul.Tensor)))
        return True

    def _quotient(self, node: object, by: object, factor: float, scales: tuple[tuple[fx.Node, object], ...]) -> bool:
        number = _number(by)
        if not self._is_scalar(node):
            return False
        assert isinstance(node, fx.Node)
        if number:
            self.take(node, factor / number, scales)
        elif isinstance(by, fx.Node) and _counts(by, self.flows):
            self.add(_Addend(node, by, scales), factor)
        elif self._scales(node, by):
            assert isinstance(by, fx.Node)
            self.take(node, factor, (*scales, (by, aten.div.Tensor)))
        else:
            return False
        return True

    def _scales(self, node: object, by: object) -> bool:
        """Whether a value of the batch is scaled by a scalar that no sample decides."""
        if not isinstance(node, fx.Node) or not isinstance(by, fx.Node) or not self._is_scalar(by):
            return False
        return self.flows[node].batch and not self.flows[by].batch

    def _stacked(self, node: object, factor: float, scales: tuple[tuple[fx.Node, object], ...]) -> bool:
        """The sum of scalars that were stacked."""
        if not isinstance(node, fx.Node) or aten_name(node.target) not in ("stack", "cat"):
            return False
        parts = node.args[0]
        if not isinstance(parts, Sequence) or not all(self._is_scalar(part) for part in parts):
            return False
        for part in parts:
            self.take(part, factor, scales)
        return True


def _counts(node: fx.Node, flows: dict[fx.Node, Flow]) -> bool:
    """Whether a scalar depends on the batch (and buffers) alone and adds over it."""
    flow = flows[node]
    if flow.param or flow.heavy or not flow.batch or value_of(node).numel() != 1:
        return False
    while value_of(node).numel() == 1:
        if node.target in (losses.count_valid, losses.weight_of_valid):
            return not any(
                flows[each].batch for each in node.all_input_nodes[1:]
            )  # weights that count the batch mix it
        if node.target is operator.getitem or aten_name(node.target) not in _ADDITIVE:
            return False
        if aten_name(node.target) in ("mul", "div") and _number(node.args[1]) is None:
            return False
        if aten_name(node.target) == "sum" and value_of(node.args[0]).numel() > 1:
            return True
        node = node.args[0]
    return False
