"""Loops over the parts of tensors as loops over their numbers, of which `loop_code` knows what to do.

    for x, y in zip(a.unbind(1), b.unbind(1)):      parts_0, parts_1 = a, b
        ...                                   ->    for t in range(min(a.shape[1], b.shape[1])):
                                                        x, y = a[:, t], b[:, t]

What is counted or taken otherwise stays the loop it was.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


class Parts:
    """What something else than a tensor is taken apart into, read as a tensor's parts are."""

    def __init__(self, parts: Sequence[object]) -> None:
        self.parts = parts
        self.shape = defaultdict(lambda: len(parts))

    def dim(self) -> int:
        """Any number will do."""
        return 1

    def __getitem__(self, index: tuple[Any, ...]) -> object:
        return self.parts[index[-1]]


def over_range(node: ast.For, unbound: str, number: int) -> tuple[list[ast.stmt], ast.For]:
    """A loop over the parts of `x.unbind(dim)`, or of several, as one over their numbers, and what stands before it;
    the loop itself where it is none.

    Args:
        node: the loop.
        unbound: the code of what is asked for what is taken apart: given it and the dim.
        number: of the loop within its function.
    """
    taken = _taken(node)
    if taken is None:
        return [], node
    index, is_reversed, pairs = taken
    index = index or f"__paraplan_step_{number}__"
    before, part, lengths = list[str](), list[str](), list[str]()
    for at, ((of, dim), target) in enumerate(pairs):
        name = f"__paraplan_parts_{number}_{at}__"
        before.append(f"{name} = {unbound}({of}, {dim})")
        part.append(f"{ast.unparse(target)} = {name}[(slice(None),) * ({dim} % {name}.dim()) + ({index},)]")
        lengths.append(f"{name}.shape[{dim}]")
    bounds = f"range({lengths[0]})" if len(lengths) == 1 else f"range(min({', '.join(lengths)}))"
    loop = parsed([f"for {index} in {f'reversed({bounds})' if is_reversed else bounds}:\n    pass"], node)[0]
    assert isinstance(loop, ast.For)
    loop.body, loop.orelse, loop.end_lineno = [*parsed(part, node), *node.body], node.orelse, node.end_lineno
    return parsed(before, node), loop


def _taken(node: ast.For) -> tuple[str, bool, list[tuple[tuple[str, int], ast.expr]]] | None:
    """The name that counts a loop's steps ("": none does), whether it begins at the end, and what is taken apart along
    which dim, into what; None where it goes over something else."""
    source, target, counter = node.iter, node.target, ""
    if _is_call(source, "enumerate"):
        pair = target.elts if isinstance(target, ast.Tuple) else []
        inner = _only(source)
        if len(pair) != 2 or inner is None or not isinstance(pair[0], ast.Name):
            return None  # counted from another number on, or taken otherwise
        source, target, counter = inner, pair[1], pair[0].id
    is_reversed = not counter and _is_call(source, "reversed")
    if is_reversed:
        source = _only(source) or source
    several, targets = [source], [target]
    if not is_reversed and isinstance(source, ast.Call) and _is_call(source, "zip"):
        several, targets = source.args, target.elts if isinstance(target, ast.Tuple) else []
        if any(each.arg != "strict" for each in source.keywords):
            return None
    parts = [known for each in several if (known := _unbound(each)) is not None]
    if not parts or not len(parts) == len(several) == len(targets):
        return None
    return counter, is_reversed, list(zip(parts, targets, strict=True))


def parsed(lines: Sequence[str], at: ast.stmt) -> list[ast.stmt]:
    """Lines as statements that stand in another's place."""
    made = ast.parse("\n".join(lines)).body
    for statement in made:
        for node in ast.walk(statement):
            if "lineno" in node._attributes:
                node.lineno = node.end_lineno = at.lineno  # type: ignore[attr-defined]
                node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]
    return made


def _is_call(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def _only(node: ast.expr) -> ast.expr | None:
    """What a call is given, where that is one thing."""
    alone = isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords and _is_plain(node.args[0])
    return node.args[0] if alone and isinstance(node, ast.Call) else None


def _unbound(node: ast.expr) -> tuple[str, int] | None:
    """What is unbound along which dim, where that is written out."""
    if not isinstance(node, ast.Call) or not all(map(_is_plain, node.args)):
        return None
    given = list(node.args)
    if ast.unparse(node.func) != "torch.unbind":
        if not isinstance(node.func, ast.Attribute) or node.func.attr != "unbind":
            return None
        given.insert(0, node.func.value)
    given += [each.value for each in node.keywords if each.arg == "dim" and len(given) == 1]
    dim = given[1] if len(given) > 1 else ast.Constant(0)
    sign = -1 if isinstance(dim, ast.UnaryOp) and isinstance(dim.op, ast.USub) else 1
    dim = dim.operand if isinstance(dim, ast.UnaryOp) else dim
    known = len(given) in (1, 2) and all(each.arg == "dim" for each in node.keywords)
    if not known or not isinstance(dim, ast.Constant) or not isinstance(dim.value, int):
        return None
    return ast.unparse(given[0]), sign * dim.value


def _is_plain(node: ast.expr) -> bool:
    return not isinstance(node, ast.Starred)
