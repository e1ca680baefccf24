"""Rotary embeddings and gated activations, which models write out by hand (see `elementwise_kernels`).

    x · cos + cat(−x₂, x₁) · sin,       silu(gate) · up,       gelu(gate) · up

Factors and addends may be in either order, halves slices or chunks; all have one dtype, and gates the
shape of what they gate.
"""

from __future__ import annotations

import operator

from torch import fx

from paraplan.capture.canonical import elementwise
from paraplan.capture.cutting.flow import aten_name, value_of
from paraplan.capture.rewriting.rewrite import Rewriter


def recognise_elementwise(rewriter: Rewriter, graph: fx.Graph) -> None:
    """Puts the ops in for what they are written out of."""
    for node in list(graph.nodes):
        name = aten_name(node.target) if node.op == "call_function" else ""
        if name == "cat":
            _rotaries(rewriter, node)
        elif name in ("silu", "gelu"):
            _gated(rewriter, node, name)


def _factors(node: fx.Node, name: str) -> tuple[fx.Node, fx.Node] | None:
    """The two operands of a sum or product of tensors."""
    if aten_name(node.target) != name or len(node.args) != 2 or node.kwargs:
        return None
    a, b = node.args
    return (a, b) if isinstance(a, fx.Node) and isinstance(b, fx.Node) else None


def _other(node: fx.Node, name: str, one: fx.Node) -> fx.Node | None:
    """What a sum or product has beside one of its operands."""
    pair = _factors(node, name)
    return None if pair is None or one not in pair else pair[pair[0] is one]


def _half(node: object) -> tuple[fx.Node, int] | None:
    """A tensor, and which half of its last dim this is."""
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source, name = node.args[0], aten_name(node.target)
    if node.target is operator.getitem and aten_name(source.target) in ("chunk", "split"):
        start, source = int(node.args[1]) * value_of(node).shape[-1], source.args[0]  # type: ignore[call-overload]
    elif name == "slice" and len(node.args) > 2 and node.args[4:] in ((), (1,)) and not node.kwargs:
        start = int(node.args[2] or 0)  # type: ignore[call-overload]
    else:
        return None
    shape, part = value_of(source).shape, value_of(node).shape
    start += shape[-1] if start < 0 else 0
    if not shape or 2 * part[-1] != shape[-1] or part[:-1] != shape[:-1] or start not in (0, part[-1]):
        return None
    return source, start // part[-1]


def _rotaries(rewriter: Rewriter, cat: fx.Node) -> None:
    """Every sum of a tensor and its turned halves, each with a factor."""
    parts, rank = cat.args[0], value_of(cat).dim()
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or int(dim) % rank != rank - 1:  # type: ignore[call-overload]
        return
    negated, first = parts
    if not isinstance(negated, fx.Node) or aten_name(negated.target) != "neg":
        return
    second, found = _half(negated.args[0]), _half(first)
    if second is None or found is None or second[0] is not found[0] or (second[1], found[1]) != (1, 0):
        return
    x = found[0]
    for product in list(cat.users):
        sin = _other(product, "mul", cat)
        for total in list(product.users) if sin is not None else ():
            plain = _other(total, "add", product)
            cos = None if plain is None else _other(plain, "mul", x)
            if cos is not None and sin is not None and _is_factor(cos, x) and _is_factor(sin, x):
                rewriter.replace(total, rewriter.call(total, elementwise.rotary, x, cos, sin))


def _is_factor(factor: fx.Node, x: fx.Node) -> bool:
    """Whether a factor has x's dtype, rank and last dim, and each other dim is x's or 1."""
    one, whole = value_of(factor), value_of(x)
    if one.dtype != whole.dtype or not one.is_floating_point() or one.dim() != whole.dim():
        return False
    sizes = zip(one.shape[:-1], whole.shape[:-1], strict=True)
    return one.shape[-1] == whole.shape[-1] and all(a in (1, b) for a, b in sizes)


def _gated(rewriter: Rewriter, node: fx.Node, name: str) -> None:
    """An activation that one product reads, and nothing else."""
    gate, users = node.args[0], list(node.users)
    up = _other(users[0], "mul", node) if len(users) == 1 else None
    if up is None or not isinstance(gate, fx.Node):
        return
    value, other = value_of(gate), value_of(up)
    if value.shape != other.shape or value.dtype != other.dtype or not value.is_floating_point() or not value.dim():
        return
    activation = "gelu_tanh" if name == "gelu" and node.kwargs.get("approximate", "none") == "tanh" else name
    rewriter.replace(users[0], rewriter.call(users[0], elementwise.gated, gate, up, activation))
