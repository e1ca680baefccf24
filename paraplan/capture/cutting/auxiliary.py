"""The outputs a model has beside its loss: graphs of their own over values of the segments.

Nodes that the loss does not need are kept out of every segment, so cuts, kinds and training steps are those of the
loss alone. What such a node reads of a segment's inside becomes an aside of that segment. An output is left out where
it needs a parameter that the loss does not (nothing says where it would be stored), or a value that is no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from paraplan.capture.canonical import autograd
from paraplan.capture.cutting.kinds import make_output
from paraplan.capture.cutting.segments import ForwardGraph, Piece, closure
from paraplan.ir.model.program import Output
from paraplan.kernels.torch_private import FakeTensorMode


class Wanted(NamedTuple):
    """An auxiliary output.

    Attributes:
        node: its value.
        piece: what computes it from values of the segments; without nodes where it is one itself.
    """

    node: fx.Node
    piece: Piece

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """Parameters and values from outside, in the order of the piece's placeholders."""
        return (*self.piece.params, *self.piece.inputs)


def ancestors(roots: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes some roots are computed from, themselves included."""
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def asides_of(graph: fx.Graph, ends: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """The calls that `ends` (what training needs) are not computed from; random ones among them made certain."""
    needed = ancestors(ends)
    found = [node for node in graph.nodes if node.op == "call_function" and node not in needed]
    for node in found:
        if node.target is autograd.dropout:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
        elif node.target is autograd.attention_dropout:
            node.target, node.args = autograd.attention, node.args[:6]
    return frozenset(found)


def plain(node: fx.Node) -> fx.Node:
    """The value behind a detach."""
    while node.target is torch.ops.aten.detach.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def wanted_outputs(forward: ForwardGraph, nodes: Mapping[str, fx.Node]) -> dict[str, Wanted]:
    """What computes each output."""
    found = {}
    for name, node in nodes.items():
        if not isinstance(node.meta.get("val"), Tensor):
            continue
        if node.op == "placeholder" or forward.is_main(node):
            found[name] = Wanted(node, Piece((), (), (node,), (), (node,)))
        else:
            found[name] = Wanted(node, closure(forward, node))
    return found


def read_asides(wanted: Mapping[str, Wanted]) -> dict[fx.Node, None]:
    """Nodes of segments that outputs read, in order."""
    return {node: None for each in wanted.values() for node in each.piece.inputs if node.op == "call_function"}


def make_outputs(
    forward: ForwardGraph,
    wanted: Mapping[str, Wanted],
    values: Mapping[fx.Node, str],
    params: set[str],
    mode: FakeTensorMode,
) -> dict[str, Output]:
    """The outputs that can be computed.

    Args:
        forward: the forward graph.
        wanted: `wanted_outputs`.
        values: names of the values that segments give (outputs and asides).
        params: parameters that segments read.
        mode: the fake mode values live in.
    """
    found = {}
    for name, each in wanted.items():
        names = [values.get(node) or forward.names.get(node, "") for node in each.reads]
        known = all(
            text and not text.startswith("constant:") and isinstance(node.meta.get("val"), Tensor)
            for text, node in zip(names, each.reads, strict=True)
        )
        if not known or any(text.startswith("param:") and text[6:] not in params for text in names):
            continue
        if any(node.target in autograd.RANDOM for node in each.piece.nodes):
            continue
        found[name] = make_output(forward, each.piece, names, mode)
    return found
