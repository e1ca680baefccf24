"""Canonical forms of reductions beyond sums, of reads from a stack of tables, and of experts."""

from __future__ import annotations

import operator

import torch
from torch import fx

from paraplan.capture.canonical import autograd, experts
from paraplan.capture.cutting.flow import aten_name, value_of
from paraplan.capture.rewriting import moments
from paraplan.capture.rewriting.rewrite import Rewriter

aten = torch.ops.aten
Found = dict[str, object]
_MAX = 2  # embedding_bag's modes: sum, mean, max
_PASS = frozenset({"_to_copy", "unsqueeze", "view", "reshape", "expand"})


def _dims(value: object, rank: int) -> tuple[int, ...]:
    if value is None or value == [] or rank == 0:
        return tuple(range(rank))
    given = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(int(dim) % rank for dim in given)


def _moment(found: Found, rank: int) -> tuple[tuple[int, ...], float, bool]:
    """dims, correction and keepdim of the variants of var and std."""
    if "unbiased" in found:
        correction = 1.0 if found["unbiased"] else 0.0
    else:
        given = found.get("correction")
        correction = 1.0 if given is None else float(given)  # type: ignore[arg-type]
    return _dims(found.get("dim"), rank), correction, bool(found.get("keepdim", False))


def _is_plain(x: object) -> bool:
    return isinstance(x, fx.Node) and value_of(x).is_floating_point() and value_of(x).dim() > 0


def _variance(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node | None:
    """var and std; of (var, mean) and (std, mean) each result by itself."""
    x = found["self"]
    if not _is_plain(x):
        return None
    dims, correction, keep = _moment(found, value_of(x).dim())  # type: ignore[arg-type]
    name = aten_name(node.target)
    function = moments.deviation if name.startswith("std") else moments.variance
    if not name.endswith("_mean"):
        return rewriter.call(node, function, x, dims, correction, keep)
    for user in list(node.users):
        if user.target is not operator.getitem:
            return None
        made = (
            rewriter.call(user, function, x, dims, correction, keep)
            if user.args[1] == 0
            else rewriter.call(user, moments.mean, x, dims, keep)
        )
        rewriter.replace(user, made)
    return None


def _vector_norm(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node | None:
    """linalg_vector_norm and norm of order 1, 2 or infinity."""
    x = found["self"]
    given = found.get("ord", found.get("p"))
    order = 2.0 if given is None else float(given)  # type: ignore[arg-type]
    if not _is_plain(x) or order not in (1.0, 2.0, float("inf")):
        return None
    dims = _dims(found.get("dim"), value_of(x).dim())  # type: ignore[arg-type]
    return rewriter.call(
        node, moments.vector_norm, x, order, dims, bool(found.get("keepdim", False)), found.get("dtype")
    )


def _log_sum_exp(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node | None:
    """logsumexp."""
    x = found["self"]
    if not _is_plain(x):
        return None
    return rewriter.call(
        node,
        moments.log_sum_exp,
        x,
        _dims(found["dim"], value_of(x).dim()),
        bool(found["keepdim"]),  # type: ignore[arg-type]
    )


def _tables(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node | None:
    """w[arange(t), ids] of a parameter [t, v, h]: one read from each of t tables."""
    x, indices = node.args[0], list(found["indices"])  # type: ignore[call-overload]
    if not isinstance(x, fx.Node) or value_of(x).dim() != 3 or len(indices) != 2 or None in indices:
        return None
    number, ids = indices
    shape = value_of(ids).shape
    if not shape or value_of(ids).dtype not in (torch.int64, torch.int32) or shape[-1] != value_of(x).shape[0]:
        return None
    if not _is_arange(number, value_of(x).shape[0]):
        return None
    return rewriter.call(node, experts.embedding_tables, x, ids)


def _embedding_bag(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node | None:
    """Bags of one length each: rows [bag, id, column] summed, averaged or their largest taken over ids, but padding."""
    ids, offsets, mode = found["indices"], found["offsets"], found["mode"]
    count = value_of(offsets).shape[0]  # type: ignore[arg-type]
    length = value_of(ids).numel() // max(count, 1)  # type: ignore[arg-type]
    padding = found.get("padding_idx")
    padding = None if padding == -1 else padding  # type: ignore[comparison-overlap]
    if found["scale_grad_by_freq"] or found["include_last_offset"]:
        return None
    if not _is_steps(offsets, count, length) or any(user.args[1] for user in node.users):  # type: ignore[arg-type]
        return None
    made = rewriter.call(node, aten.reshape.default, ids, [count, length])
    rows = rewriter.call(node, autograd.embedding, found["weight"], made, -1)
    if found["per_sample_weights"] is not None:
        shares = rewriter.call(node, aten.reshape.default, found["per_sample_weights"], [count, length, 1])
        rows = rewriter.call(node, aten.mul.Tensor, rows, shares)
    if padding is not None:
        total = _without_padding(rewriter, node, rows, rewriter.call(node, aten.eq.Scalar, made, padding), mode)
    elif mode == _MAX:
        total = rewriter.call(node, operator.getitem, rewriter.call(node, aten.max.dim, rows, 1), 0)
    else:
        total = rewriter.call(node, aten.sum.dim_IntList if mode == 0 else aten.mean.dim, rows, [1])
    for user in list(node.users):
        rewriter.replace(user, total)
    return None


def _without_padding(rewriter: Rewriter, node: fx.Node, rows: fx.Node, is_padding: fx.Node, mode: object) -> fx.Node:
    """Sums, means or maxima of rows [bag, id, column] but those of padding; zeros for bags of nothing else."""
    away = rewriter.call(node, aten.unsqueeze.default, is_padding, -1)
    rows = rewriter.call(node, aten.masked_fill.Scalar, rows, away, float("-inf") if mode == _MAX else 0.0)
    if mode == 0:
        return rewriter.call(node, aten.sum.dim_IntList, rows, [1])
    is_kept = rewriter.call(node, aten.logical_not.default, is_padding)
    kept = rewriter.call(node, aten._to_copy.default, is_kept, dtype=value_of(rows).dtype)
    number = rewriter.call(node, aten.sum.dim_IntList, kept, [1], True)
    if mode == _MAX:
        total = rewriter.call(node, operator.getitem, rewriter.call(node, aten.max.dim, rows, 1), 0)
        return rewriter.call(node, aten.masked_fill.Scalar, total, rewriter.call(node, aten.eq.Scalar, number, 0), 0.0)
    total = rewriter.call(node, aten.sum.dim_IntList, rows, [1])
    return rewriter.call(node, aten.div.Tensor, total, rewriter.call(node, aten.clamp.default, number, 1.0))


def _is_steps(node: fx.Node, count: int, step: int) -> bool:
    """Whether a node is 0, step, 2 · step, ..., `count` of them."""
    return _range_of(node) == (0, count * step, step)


def _is_arange(node: fx.Node, size: int) -> bool:
    """Whether a node is 0, 1, ..., size − 1 along its last dim."""
    shape = value_of(node).shape
    if not shape or shape[-1] != size or value_of(node).numel() != size:
        return False
    while aten_name(node.target) in _PASS:
        node = node.args[0]  # type: ignore[assignment]
    return _range_of(node) == (0, size, 1)


def _range_of(node: fx.Node) -> tuple[int, int, int] | None:
    """Start, end and step of an arange of integers, those that are not given included; None of anything else."""
    if aten_name(node.target) != "arange" or not all(isinstance(arg, int) for arg in node.args):
        return None
    start, end, step = (0, *node.args, 1) if len(node.args) == 1 else (*node.args, 1)[:3]
    return start, end, step  # type: ignore[return-value]


def _mixture(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node | None:
    """The experts' forward that capture put into the model (see `hf`)."""
    return rewriter.call(node, experts.experts, *node.args[:7])


def _masked_write(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node | None:
    """x[mask] = value, of one element, is a choice element by element."""
    x, indices, values = found["self"], found["indices"], found["values"]
    assert isinstance(x, fx.Node) and isinstance(indices, (list, tuple)) and isinstance(values, fx.Node)
    mask = indices[0] if len(indices) == 1 and not found["accumulate"] else None
    if not isinstance(mask, fx.Node) or value_of(mask).dtype != torch.bool or value_of(values).numel() != 1:
        return None
    shape, rank = list(value_of(mask).shape), value_of(x).dim()
    if list(value_of(x).shape)[: len(shape)] != shape:
        return None
    if len(shape) < rank:
        mask = rewriter.call(node, aten.reshape.default, mask, [*shape, *(1 for _ in range(rank - len(shape)))])
    if value_of(values).dim():
        values = rewriter.call(node, aten.reshape.default, values, [])
    return rewriter.call(node, aten.where.self, mask, values, x)


def _complex_write(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node | None:
    """x[..., a:b] = y and x[i] = y of complex numbers, whose scatters torch does not differentiate: pieces joined."""
    x, source = found["self"], found["src"]
    assert isinstance(x, fx.Node) and isinstance(source, fx.Node)
    if not value_of(x).is_complex() or found.get("step", 1) != 1:
        return None
    dim = int(found["dim"]) % value_of(x).dim()  # type: ignore[call-overload]
    size = value_of(x).shape[dim]
    if "index" in found:
        start = int(found["index"]) % size  # type: ignore[call-overload]
        source = rewriter.call(node, aten.unsqueeze.default, source, dim)
    else:
        start, _, _ = slice(found["start"], found["end"]).indices(size)
    end = start + value_of(source).shape[dim]
    parts = [
        rewriter.call(node, aten.slice.Tensor, x, dim, 0, start, 1) if start else None,
        source,
        rewriter.call(node, aten.slice.Tensor, x, dim, end, size, 1) if end < size else None,
    ]
    return rewriter.call(node, aten.cat.default, [part for part in parts if part is not None], dim)


MANY = 4


def join_selects(graph: fx.Graph, rewriter: Rewriter) -> None:
    """x[0], x[1], ... read one by one (a step at a time) become the pieces of one unbind.

    Steps then read a piece each and are equal, and their gradients are stacked once instead of being added up one
    whole tensor per step.
    """
    for node in list(graph.nodes):
        by_dim: dict[int, list[fx.Node]] = {}
        for user in node.users:
            if aten_name(user.target) == "select" and isinstance(node.meta.get("val"), torch.Tensor):
                by_dim.setdefault(int(user.args[1]) % value_of(node).dim(), []).append(user)
        for dim, readers in by_dim.items():
            size = value_of(node).shape[dim]
            if len(readers) > MANY and 2 * len({int(user.args[2]) % size for user in readers}) > size:
                _join(rewriter, node, dim, readers)


def _join(rewriter: Rewriter, node: fx.Node, dim: int, readers: list[fx.Node]) -> None:
    following = node.next
    while following.op == "placeholder" or following.target is operator.getitem:
        following = following.next
    pieces = rewriter.call(following, aten.unbind.int, node, dim)
    size = value_of(node).shape[dim]
    places = sorted({int(user.args[2]) % size for user in readers})  # type: ignore[call-overload]
    made = {place: rewriter.call(following, operator.getitem, pieces, place) for place in places}
    for user in readers:
        rewriter.replace(user, made[int(user.args[2]) % size])  # type: ignore[call-overload]


def is_piece(node: fx.Node) -> bool:
    """Whether a node is a piece of an unbind: a view that costs nothing to keep beside its source."""
    return node.target is operator.getitem and aten_name(node.args[0].target) == "unbind"  # type: ignore[union-attr]


TENSOR_RULES = {
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _variance),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _vector_norm),
    "logsumexp": _log_sum_exp,
    "index": _tables,
    **dict.fromkeys(("slice_scatter", "select_scatter"), _complex_write),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _masked_write),
    **dict.fromkeys(("embedding_bag", "_embedding_bag"), _embedding_bag),
    "paraplan.experts": _mixture,
}
