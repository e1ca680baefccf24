"""Loops that write the steps of a tensor made for that as loops that append them to a list.

    y = torch.zeros_like(x)                     y = torch.zeros_like(x)
    for t in range(n):                    ->    written = []
        y[:, t] = f(x[:, t])                    for t in range(n):
                                                    written.append(f(x[:, t]))
                                                y = loop.written(y, written, 1, 0)

What a step reads of the tensor, or has another name for it, stays the loop it was: the tensor is made right before, by
what makes none but new ones, and a step asks for nothing but its dtype, device and shape.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from typing import NamedTuple

from paraplan.capture.recurrences.loop_purity import made_for_it
from paraplan.capture.recurrences.unbound_loops import parsed

_ASKED = ("dtype", "device", "shape")
"""What writing a tensor's parts does not change."""


class Appending(NamedTuple):
    """A loop without its writes.

    Attributes:
        before: what stands before it.
        loop: that appends.
        tensors: of each list, the tensor, the dim and the offset of the index, as code.
    """

    before: list[ast.stmt]
    loop: ast.For
    tensors: list[tuple[str, str, int, int]]

    @property
    def lists(self) -> list[str]:
        """Their names."""
        return [name for name, *_ in self.tensors]

    def after(self, loop: str) -> list[str]:
        """Lines that follow it.

        Args:
            loop: name of the loop's object.
        """
        return [f"{of} = {loop}.written({of}, {name}, {dim}, {offset})" for name, of, dim, offset in self.tensors]


def as_appended(node: ast.For, before: Sequence[ast.stmt], shared: Sequence[str], number: int) -> Appending | None:
    """The loop, appending; None where it writes nothing, or more than this knows of.

    Args:
        node: over numbers.
        before: the statements before it in its block.
        shared: names that other functions know too.
        number: of the loop within its function.
    """
    assert isinstance(node.target, ast.Name)
    found, body = list[tuple[str, str, int, int]](), list[ast.stmt]()
    for line in node.body:
        target = line.targets[0] if isinstance(line, ast.Assign) and len(line.targets) == 1 else None
        if not isinstance(line, ast.Assign) or not isinstance(target, ast.Subscript):
            body.append(line)
            continue
        place = _place(target.slice, node.target.id)
        if place is None or not isinstance(target.value, ast.Name):
            return None
        of = target.value.id
        if of in shared or not made_for_it(of, before, numbers=False) or not _is_only_written(of, node):
            return None
        name = f"__paraplan_written_{number}_{len(found)}__"
        found.append((name, of, *place))
        (made,) = parsed([f"{name}.append(None)"], line)
        assert isinstance(made, ast.Expr) and isinstance(made.value, ast.Call)
        made.value.args = [line.value]
        body.append(made)
    if not found:
        return None
    loop = copy.copy(node)
    loop.body = body
    return Appending(parsed([f"{name} = []" for name, *_ in found], node), loop, found)


def _is_only_written(name: str, node: ast.For) -> bool:
    """Whether a step writes a part of a tensor once, and otherwise asks for what that does not change."""
    inside = [each for line in node.body for each in ast.walk(line)]
    every = sum(isinstance(each, ast.Name) and each.id == name for each in inside)
    asked = sum(isinstance(each, ast.Attribute) and each.attr in _ASKED and _is(each.value, name) for each in inside)
    return every == asked + 1


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _place(index: ast.expr, step: str) -> tuple[int, int] | None:
    """The dim that a step's index is of, and what is added to it; None where other parts are taken too."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    offsets = [_offset(part, step) for part in parts]
    at = [place for place, offset in enumerate(offsets) if offset is not None]
    others = [part for part, offset in zip(parts, offsets, strict=True) if offset is None]
    dots = [place for place, part in enumerate(parts) if isinstance(part, ast.Constant) and part.value is Ellipsis]
    if len(at) != 1 or len(dots) > 1 or any(not _is_all(part) for part in others):
        return None
    dim = at[0] - len(parts) if dots and dots[0] < at[0] else at[0]
    return dim, offsets[at[0]] or 0


def _offset(part: ast.expr, step: str) -> int | None:
    if _is(part, step):
        return 0
    if isinstance(part, ast.BinOp) and _is(part.left, step) and isinstance(part.right, ast.Constant):
        of = part.right.value
        if type(of) is int and isinstance(part.op, (ast.Add, ast.Sub)):
            return of if isinstance(part.op, ast.Add) else -of
    return None


def _is_all(part: ast.expr) -> bool:
    if isinstance(part, ast.Slice):
        return part.lower is part.upper is part.step is None
    return isinstance(part, ast.Constant) and part.value is Ellipsis
