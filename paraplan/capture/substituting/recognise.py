"""Compositions that are a canonical op, written out by hand: root-mean-square norms and the tanh form of GELU.

    x · rsqrt(mean(x²) + eps) [· w],                        each over the same last dims
    ½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))

They are found from the one op they cannot do without, going backwards, whatever the order of factors. Of a norm in
float32 whose input was cast there and whose result is cast back, the casts go into the op, which sums in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import fx

from paraplan.capture.canonical import autograd
from paraplan.capture.cutting.flow import aten_name, value_of
from paraplan.capture.rewriting.rewrite import Rewriter

aten = torch.ops.aten
_CASTS = frozenset({"_to_copy", "to", "float", "type_as"})


def recognise(rewriter: Rewriter, graph: fx.Graph) -> None:
    """Puts the ops in for what they are written out of."""
    for node in list(graph.nodes):
        name = aten_name(node.target) if node.op == "call_function" else ""
        if name == "rsqrt":
            _rms_norms(rewriter, node)
        elif name == "tanh":
            _gelu(rewriter, node)


def _factors(node: object, name: str) -> tuple[object, object] | None:
    """The two operands of an addition or multiplication."""
    if not isinstance(node, fx.Node) or aten_name(node.target) != name or len(node.args) != 2 or node.kwargs:
        return None
    return node.args[0], node.args[1]


def _with_number(node: object, name: str) -> Iterator[tuple[fx.Node, float]]:
    """A sum or product of a tensor and a number, as both."""
    for a, b in _orders(_factors(node, name)):
        if isinstance(a, fx.Node) and isinstance(b, (int, float)) and not isinstance(b, bool):
            yield a, float(b)


def _orders(pair: tuple[object, object] | None) -> tuple[tuple[object, object], ...]:
    return () if pair is None else (pair, (pair[1], pair[0]))


def _is_square(node: object, x: object) -> bool:
    if not isinstance(node, fx.Node):
        return False
    name = aten_name(node.target)
    return (
        (name == "pow" and node.args == (x, 2))
        or (name == "mul" and node.args == (x, x))
        or (name == "square" and node.args == (x,))
    )


def _rms_norms(rewriter: Rewriter, rsqrt: fx.Node) -> None:
    """Every product of a tensor with the reciprocal root of its own mean square."""
    for mean, eps in _with_number(rsqrt.args[0], "add"):
        if aten_name(mean.target) != "mean" or len(mean.args) < 3 or mean.args[2] is not True:
            continue
        squares, dims = mean.args[0], mean.args[1]
        for product in list(rsqrt.users):
            for x, other in _orders(_factors(product, "mul")):
                if other is rsqrt and isinstance(x, fx.Node) and _is_square(squares, x):
                    count = _last_dims(dims, value_of(x).dim())
                    if count and value_of(x).dtype in (torch.float32, torch.float64):
                        _put_norm(rewriter, product, x, count, eps)
                        break


def _last_dims(dims: object, rank: int) -> int:
    """How many last dims these are; 0 if others."""
    given = dims if isinstance(dims, (tuple, list)) else [dims]
    places = sorted(int(dim) % rank for dim in given)  # type: ignore[call-overload]
    return len(places) if places == list(range(rank - len(places), rank)) else 0


def _put_norm(rewriter: Rewriter, product: fx.Node, x: fx.Node, dims: int, eps: float) -> None:
    narrow = x.args[0] if aten_name(x.target) in _CASTS else None
    users = list(product.users)
    back = users[0] if len(users) == 1 and aten_name(users[0].target) in _CASTS else None
    if isinstance(narrow, fx.Node) and back is not None:
        dtype = value_of(narrow).dtype
        if dtype in (torch.bfloat16, torch.float16) and value_of(back).dtype == dtype:
            product, x = back, narrow
    weighed, weight = _weighed(product, tuple(value_of(x).shape[-dims:]))
    rewriter.replace(weighed, rewriter.call(weighed, autograd.rms_norm, x, dims, weight, eps))


def _weighed(norm: fx.Node, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node | None]:
    """A norm times a weight of its dims, if nothing else reads it, and that weight; else the norm."""
    users = list(norm.users)
    for one, weight in _orders(_factors(users[0], "mul")) if len(users) == 1 else ():
        if one is norm and isinstance(weight, fx.Node):
            value = value_of(weight)
            if tuple(value.shape) == shape and value.dtype == value_of(norm).dtype:
                return users[0], weight
    return norm, None


def _gelu(rewriter: Rewriter, tanh: fx.Node) -> None:
    x = _of_tanh(tanh.args[0])
    if x is None:
        return
    for one in list(tanh.users):
        if (tanh, 1.0) not in _with_number(one, "add"):
            continue
        for whole in list(one.users):
            for half, other in _orders(_factors(whole, "mul")):
                if other is one and (x, 0.5) in _with_number(half, "mul"):
                    rewriter.replace(whole, rewriter.call(whole, aten.gelu.default, x, approximate="tanh"))
                    break


def _of_tanh(inner: object) -> fx.Node | None:
    """x of √(2/π) (x + 0.044715 x³); None for anything else."""
    for total, root in _with_number(inner, "mul"):
        for x, cubed in _orders(_factors(total, "add")):
            for cube, factor in _with_number(cubed, "mul"):
                close = abs(root - math.sqrt(2 / math.pi)) < 1e-6 and abs(factor - 0.044715) < 1e-9
                if close and isinstance(x, fx.Node) and _is_cube(cube, x):
                    return x
    return None


def _is_cube(node: fx.Node, x: fx.Node) -> bool:
    if aten_name(node.target) == "pow":
        return node.args[0] is x and node.args[1] in (3, 3.0)
    return any(other is x and _is_square(square, x) for square, other in _orders(_factors(node, "mul")))
