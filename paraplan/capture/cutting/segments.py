"""A run of main nodes made self-contained: its side values cloned in, its inputs and outputs named.

Equal pieces get equal signatures, whatever layer they come from: nodes are numbered in the order the piece needs
them, parameters and inputs by position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, fx

from paraplan.capture.cutting.flow import Flow
from paraplan.kernels.torch_private import OpOverload


class ForwardGraph(NamedTuple):
    """The forward graph after all rewriting.

    Attributes:
        graph: the fx graph.
        names: what its placeholders are, "param:<name>" and so on.
        constants: values of "constant:<name>" placeholders.
        flows: flow of every node.
        roots: nodes the program ends in (numerators of the loss, new values of buffers).
        asides: nodes that only auxiliary outputs need; they belong to no segment.
        numerators: the roots that are added up into the loss.
    """

    graph: fx.Graph
    names: dict[fx.Node, str]
    constants: dict[str, Tensor]
    flows: dict[fx.Node, Flow]
    roots: tuple[fx.Node, ...]
    asides: frozenset[fx.Node] = frozenset()
    numerators: frozenset[fx.Node] = frozenset()

    def is_main(self, node: fx.Node) -> bool:
        """Whether a node belongs to exactly one segment (side values are cloned into all that need them)."""
        if node.op != "call_function" or node in self.asides:
            return False
        return not self.flows[node].side or node in self.roots


def gives_several(node: fx.Node) -> bool:
    """Whether a call's value is several, of which others take parts."""
    return isinstance(node.meta.get("val"), tuple | list)


class Piece(NamedTuple):
    """A self-contained part of the forward graph.

    Attributes:
        nodes: calls in order, cloned side values included.
        params, inputs, constants: nodes from outside, in the order they are first needed.
        outputs: its nodes that are read elsewhere.
    """

    nodes: tuple[fx.Node, ...]
    params: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def make_piece(forward: ForwardGraph, main: Sequence[fx.Node], *, whole: bool = False) -> Piece:
    """The piece whose main nodes are given.

    Args:
        forward: the forward graph.
        main: the nodes.
        whole: whether calls that give several tensors, of which it reads some, are made again in it: segments hand on
            tensors one by one, and only those that training needs.
    """
    own = set(main)
    order: dict[fx.Node, None] = {}
    outside: dict[str, dict[fx.Node, None]] = {"param": {}, "input": {}, "constant": {}}

    def need(node: fx.Node) -> None:
        """Emits a node after what it reads; iterative, for side chains may be deep."""
        stack = [(node, iter(node.all_input_nodes))]
        while stack:
            current, sources = stack[-1]
            source = next(sources, None)
            if source is None:
                stack.pop()
                order[current] = None
            elif source in order:
                continue
            elif source.op == "placeholder":
                kind = forward.names[source].split(":", 1)[0]
                outside[kind if kind in outside else "input"][source] = None
            elif source in own or not forward.is_main(source) or (whole and gives_several(source)):
                stack.append((source, iter(source.all_input_nodes)))
            else:
                outside["input"][source] = None

    for node in main:
        if node not in order:
            need(node)
    outputs = [
        node
        for node in main
        if node in forward.roots or any(user not in own and forward.is_main(user) for user in node.users)
    ]
    return Piece(
        tuple(order), tuple(outside["param"]), tuple(outside["input"]), tuple(outside["constant"]), tuple(outputs)
    )


def closure(forward: ForwardGraph, root: fx.Node) -> Piece:
    """Everything a side value is computed from, as a piece of its own."""
    made = make_piece(forward, (root,), whole=True)
    return made._replace(outputs=(root,))


def signature(forward: ForwardGraph, piece: Piece) -> str:
    """Digest of a piece's structure; equal for pieces one joint graph serves."""
    numbers: dict[fx.Node, str] = {}
    lines: list[str] = []
    for kind, group in (("p", piece.params), ("x", piece.inputs), ("c", piece.constants)):
        for index, node in enumerate(group):
            numbers[node] = f"{kind}{index}"
            value = _content(forward.constants[forward.names[node].split(":", 1)[1]]) if kind == "c" else ""
            lines.append(f"{kind}{index} {_spec(node)} {forward.flows[node].carries} {value}")
    for index, node in enumerate(piece.nodes):
        numbers[node] = f"n{index}"
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        if isinstance(node.target, OpOverload):
            target = str(node.target)
        args = fx.map_arg((node.args, dict(sorted(node.kwargs.items()))), lambda n: _Ref(numbers[n]))
        lines.append(f"{target} {args!r} {_spec(node)}")
    ends = (numbers[node] + "+" * (node in forward.numerators) for node in piece.outputs)
    lines.append("out " + " ".join(ends))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Ref(str):
    """A local number, printed bare."""

    def __repr__(self) -> str:
        return "%" + str(self)


def _spec(node: fx.Node) -> str:
    value = node.meta.get("val")
    values: Iterable[object] = value if isinstance(value, (tuple, list)) else (value,)
    return " ".join(f"{v.dtype}{tuple(v.shape)}" if isinstance(v, Tensor) else str(v) for v in values)


def _content(value: Tensor) -> str:
    return f"{value.dtype}{tuple(value.shape)}{value.flatten().tolist()}"
