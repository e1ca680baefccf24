"""as_strided, read or written through, spelt by elements: which elements they are depends on a tensor's strides.

Functional graphs have as_strided_scatter(x, src, size, stride, offset) for `x.fill_diagonal_(v)` and for writes to
`x.as_strided(...)`. Element (i, j, ...) of src goes to place offset + i·stride₀ + j·stride₁ + ... of x's storage. Plans
choose strides anew, and torch's derivative reads the gradient's storage instead, so the places are written out here,
where x's strides are those of the user's model: as indices into x with its dims ordered as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from paraplan.capture.cutting.flow import aten_name, value_of
from paraplan.capture.rewriting.rewrite import Rewriter
from paraplan.capture.source_lines import line_of_stack
from paraplan.ir.errors import CaptureError

aten = torch.ops.aten


def by_index(graph: fx.Graph, rewriter: Rewriter) -> None:
    """Replaces as_strided and as_strided_scatter in a graph whose values still have the strides of the user's model.

    Raises:
        CaptureError: what is read or written to is not stored densely, or places are written several times.
    """
    for node in list(graph.nodes):
        name = aten_name(node.target) if node.op == "call_function" else ""
        if name == "as_strided_scatter":
            rewriter.replace(node, _indexed(rewriter, node))
        elif name in ("as_strided", "as_strided_copy"):
            rewriter.replace(node, _read(rewriter, node))


class _Strided(NamedTuple):
    """What is read or written through.

    Attributes:
        base: the tensor.
        whole: its value, fake, with the user's strides.
        size, stride: of the elements.
        first: the place of the first of them, counted from the tensor's own first.
        order: the tensor's dims as they are stored.
    """

    base: fx.Node
    whole: Tensor
    size: Sequence[int]
    stride: Sequence[int]
    first: int
    order: Sequence[int]

    @property
    def is_within(self) -> bool:
        """Whether the tensor is stored densely, and all elements are its own."""
        last = self.first + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.whole.permute(self.order).is_contiguous() and self.first >= 0 and last < self.whole.numel()

    def refused(self, node: fx.Node, what: str, why: str) -> CaptureError:
        """The error of a call, which `what` does, and why it cannot be."""
        line = line_of_stack(node.meta.get("stack_trace")) or "unknown line"
        given = f"as_strided(size={list(self.size)}, stride={list(self.stride)})"
        of = f"a tensor of shape {list(self.whole.shape)} and strides {list(self.whole.stride())}"
        return CaptureError(f"{line}: {what.format(given)} {of} {why}")

    def flat(self, rewriter: Rewriter, node: fx.Node) -> fx.Node:
        """The tensor's elements as they are stored, before a node."""
        stored = rewriter.call(node, aten.permute.default, self.base, self.order)
        return rewriter.call(node, aten.reshape.default, stored, [-1])


def _strided(node: fx.Node, at: int) -> _Strided:
    """Of a call whose size stands in so many a place."""
    base, size, stride, *rest = node.args[0], *node.args[at : at + 3]
    assert isinstance(base, fx.Node)
    whole = value_of(base)
    given: Any = rest[0] if rest else node.kwargs.get("storage_offset")
    first = (whole.storage_offset() if given is None else int(given)) - whole.storage_offset()
    order = sorted(range(whole.dim()), key=lambda dim: (-whole.stride(dim), -whole.shape[dim], dim))
    return _Strided(base, whole, size, stride, first, order)  # type: ignore[arg-type]


def _read(rewriter: Rewriter, node: fx.Node) -> fx.Node:
    """What as_strided reads; its very source where that is the same."""
    of = _strided(node, 1)
    if of.first == 0 and (list(of.size), list(of.stride)) == (list(of.whole.shape), list(of.whole.stride())):
        return of.base
    if not of.is_within:
        raise of.refused(node, "{} of", "reads elements of another tensor; take parts of that one, or use unfold")
    index = _places(rewriter, node, of.size, of.stride, of.first)
    taken = rewriter.call(node, aten.index.Tensor, of.flat(rewriter, node), [index])
    return rewriter.call(node, aten.reshape.default, taken, list(of.size))


def _indexed(rewriter: Rewriter, node: fx.Node) -> fx.Node:
    of, source = _strided(node, 2), node.args[1]
    assert isinstance(source, fx.Node)
    if not of.is_within or not _are_apart(of.size, of.stride):
        why = "reaches elements of another tensor or one element twice; write with indices or torch.where"
        raise of.refused(node, "a write through {} to", why)
    index = _places(rewriter, node, of.size, of.stride, of.first)
    values = rewriter.call(node, aten.reshape.default, source, [-1])
    written = rewriter.call(node, aten.index_put.default, of.flat(rewriter, node), [index], values)
    shaped = rewriter.call(node, aten.reshape.default, written, [of.whole.shape[dim] for dim in of.order])
    return rewriter.call(node, aten.permute.default, shaped, [of.order.index(dim) for dim in range(of.whole.dim())])


def _are_apart(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no two elements have one place, each dim stepping over all of those within."""
    reach = 1
    for step, count in sorted((step, count) for step, count in zip(stride, size, strict=True) if count > 1):
        if step < reach:
            return False
        reach = step * (count - 1) + reach
    return True


def _places(rewriter: Rewriter, node: fx.Node, size: Sequence[int], stride: Sequence[int], first: int) -> fx.Node:
    """The flat places of all elements."""
    found: fx.Node | None = None
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        start = first if not dim else 0
        jump = max(step, 1)
        steps = rewriter.call(
            node,
            aten.arange.start_step,
            start,
            start + count * jump,
            jump,
            dtype=torch.int64,
            device=torch.device("cpu"),
            pin_memory=False,
        )
        if step == 0 and count > 1:  # read again and again
            first_one = rewriter.call(node, aten.slice.Tensor, steps, 0, 0, 1)
            steps = rewriter.call(node, aten.expand.default, first_one, [count])
        column = rewriter.call(node, aten.reshape.default, steps, [-1, *(1 for _ in size[dim + 1 :])])
        found = column if found is None else rewriter.call(node, aten.add.Tensor, found, column)
    if found is None:  # one element
        one = aten.full.default, [1], first
        return rewriter.call(node, *one, dtype=torch.int64, device=torch.device("cpu"), pin_memory=False)
    return rewriter.call(node, aten.reshape.default, found, [-1])
