"""Einsums as products of matrices whose dims stay apart where they can.

torch merges the subscripts of an einsum in alphabetical order, so that which of them leads a merged dim, and may be
sharded there, depends on how the user named them. Here operands are joined two at a time, from the left; of each pair

* a subscript only one has and nobody needs afterwards is summed at once;
* subscripts both have and later ones need are the batch, in the result's order; where nothing is contracted the pair is
  multiplied elementwise, every subscript a dim of its own;
* contracted subscripts are merged in the first operand's order, as are those only one side keeps: of the experts and
  slots of a dispatch mask "gtec" the experts lead;
* without a batch the product is `paraplan.linear`, which keeps the first operand's dims apart.
"""

from __future__ import annotations

import math

from torch import Tensor

from paraplan.capture.canonical import autograd


def parse(equation: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[str, ...], str] | None:
    """Subscripts of the operands and of the result; None for forms not covered: ellipses, diagonals, broadcast ones.

    Args:
        equation: as torch's.
        shapes: of the operands.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = tuple(left.split(","))
    if "." in equation or len(terms) != len(shapes) or any(len(set(term)) != len(term) for term in (*terms, right)):
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        if len(term) != len(shape) or any(sizes.setdefault(*pair) != pair[1] for pair in zip(term, shape, strict=True)):
            return None
    every = "".join(terms)
    out = right if arrow else "".join(sorted(subscript for subscript in sizes if every.count(subscript) == 1))
    return (terms, out) if set(out) <= set(every) else None


def einsum(equation: str, operands: list[Tensor]) -> Tensor:
    """`torch.einsum`, of the forms `parse` covers."""
    found = parse(equation, tuple(tuple(x.shape) for x in operands))
    assert found is not None, equation
    (name, *names), out = found
    made, *others = operands
    for index, (other, subscripts) in enumerate(zip(others, names, strict=True)):
        needed = set(out).union(*names[index + 1 :])
        made, name = _pair(made, name, other, subscripts, needed, out)
    made, name = _sum_out(made, name, set(out))
    return _in_order(made, name, out)


def _sum_out(x: Tensor, subscripts: str, needed: set[str]) -> tuple[Tensor, str]:
    dims = [dim for dim, subscript in enumerate(subscripts) if subscript not in needed]
    kept = "".join(subscript for subscript in subscripts if subscript in needed)
    return (x.sum(dims), kept) if dims else (x, subscripts)


def _in_order(x: Tensor, subscripts: str, wanted: str) -> Tensor:
    return x if subscripts == wanted else x.permute([subscripts.index(subscript) for subscript in wanted])


def _pair(x: Tensor, xs: str, y: Tensor, ys: str, needed: set[str], out: str) -> tuple[Tensor, str]:
    """The product of two operands, and its subscripts: those needed afterwards."""
    x, xs = _sum_out(x, xs, needed | set(ys))
    y, ys = _sum_out(y, ys, needed | set(xs))
    sizes = dict(zip(xs + ys, x.shape + y.shape, strict=True))
    shared = [subscript for subscript in xs if subscript in ys]
    contracted = "".join(subscript for subscript in shared if subscript not in needed)
    if not contracted:
        subscripts = "".join(dict.fromkeys(out + xs + ys))
        subscripts = "".join(subscript for subscript in subscripts if subscript in sizes)
        return _spread(x, xs, subscripts) * _spread(y, ys, subscripts), subscripts
    batch = "".join(sorted((subscript for subscript in shared if subscript in needed), key=(out + xs).index))
    rows = "".join(subscript for subscript in xs if subscript not in shared)
    columns = "".join(subscript for subscript in ys if subscript not in shared)
    count = math.prod(sizes[subscript] for subscript in columns)
    inner = math.prod(sizes[subscript] for subscript in contracted)
    shape = [sizes[subscript] for subscript in batch + rows + columns]
    if not batch and rows:
        whole = _in_order(x, xs, rows + contracted).reshape([*(sizes[subscript] for subscript in rows), inner])
        weight = _in_order(y, ys, contracted + columns).reshape([inner, count])
        return autograd.linear(whole, weight, None, True).reshape(shape), rows + columns
    groups = [sizes[subscript] for subscript in batch] or [1]
    height = math.prod(sizes[subscript] for subscript in rows)
    left = _in_order(x, xs, batch + rows + contracted).reshape([*groups, height, inner])
    right = _in_order(y, ys, batch + contracted + columns).reshape([*groups, inner, count])
    return autograd.matmul(left, right).reshape(shape), batch + rows + columns


def _spread(x: Tensor, subscripts: str, wanted: str) -> Tensor:
    """With a dim for every wanted subscript, of size 1 where it has none."""
    x = _in_order(x, subscripts, "".join(subscript for subscript in wanted if subscript in subscripts))
    present = set(subscripts)
    sizes = iter(x.shape)
    return x.reshape([next(sizes) if subscript in present else 1 for subscript in wanted])


HEAVY = frozenset({einsum})
