"""as_strided, read or written through, spelt by elements: which elements they are depends on a tensor's strides.

Functional graphs have as_strided_scatter(x, src, size, stride, offset) for `x.fill_diagonal_(v)` and for writes to
`x.as_strided(...)`. Element (i, j, ...) of src goes to place offset + i·stride₀ + j·stride₁ + ... of x's storage. Plans
choose strides anew, and torch's derivative reads the gradient's storage instead, so the places are written out here,
where x's strides are those of the user's model: as indices into x with its dims ordered as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def _read(rewriter: Rewriter, node: fx.Node) -> fx.Node:
    """What as_strided reads; its very source where that is the same."""
    base, size, stride = node.args[:3]
    assert isinstance(base, fx.Node)
    whole = value_of(base)
    given = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    first = (whole.storage_offset() if given is None else int(given)) - whole.storage_offset()  # type: ignore[call-overload]
    if first == 0 and (list(size), list(stride)) == (list(whole.shape), list(whole.stride())):  # type: ignore[call-overload, arg-type]
        return base
    order = sorted(range(whole.dim()), key=lambda dim: (-whole.stride(dim), -whole.shape[dim], dim))
    places = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))  # type: ignore[call-overload, arg-type]
    if not _is_dense(whole, order) or first < 0 or places >= whole.numel():
        line = line_of_stack(node.meta.get("stack_trace")) or "unknown line"
        raise CaptureError(
            f"{line}: as_strided(size={list(size)}, stride={list(stride)}) of a tensor of shape "  # type: ignore[call-overload]
            f"{list(whole.shape)} and strides {list(whole.stride())} reads elements of another tensor; take parts of "
            "that one, or use unfold"
        )
    index = _places(rewriter, node, size, stride, first)  # type: ignore[arg-type]
    stored = rewriter.call(node, aten.permute.default, base, order)
    flat = rewriter.call(node, aten.reshape.default, stored, [-1])
    return rewriter.call(node, aten.reshape.default, rewriter.call(node, aten.index.Tensor, flat, [index]), list(size))  # type: ignore[call-overload]


def _indexed(rewriter: Rewriter, node: fx.Node) -> fx.Node:
    base, source, size, stride = node.args[:4]
    assert isinstance(base, fx.Node) and isinstance(source, fx.Node)
    whole = value_of(base)
    given = node.args[4] if len(node.args) > 4 else node.kwargs.get("storage_offset")
    first = (whole.storage_offset() if given is None else int(given)) - whole.storage_offset()  # type: ignore[call-overload]
    order = sorted(range(whole.dim()), key=lambda dim: (-whole.stride(dim), -whole.shape[dim], dim))
    places = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))  # type: ignore[call-overload, arg-type]
    if not _is_dense(whole, order) or first < 0 or places >= whole.numel() or not _are_apart(size, stride):  # type: ignore[arg-type]
        line = line_of_stack(node.meta.get("stack_trace")) or "unknown line"
        raise CaptureError(
            f"{line}: a write through as_strided(size={list(size)}, stride={list(stride)}) to a tensor of shape "  # type: ignore[call-overload]
            f"{list(whole.shape)} and strides {list(whole.stride())} reaches elements of another tensor or one element "
            "twice; write with indices or torch.where"
        )
    index = _places(rewriter, node, size, stride, first)  # type: ignore[arg-type]
    stored = rewriter.call(node, aten.permute.default, base, order)
    flat = rewriter.call(node, aten.reshape.default, stored, [-1])
    values = rewriter.call(node, aten.reshape.default, source, [-1])
    written = rewriter.call(node, aten.index_put.default, flat, [index], values)
    shaped = rewriter.call(node, aten.reshape.default, written, [whole.shape[dim] for dim in order])
    return rewriter.call(node, aten.permute.default, shaped, [order.index(dim) for dim in range(whole.dim())])


def _is_dense(x: Tensor, order: Sequence[int]) -> bool:
    return x.permute(order).is_contiguous()


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
