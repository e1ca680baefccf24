"""Dims that a reshape merges stay apart as long as no op needs them merged.

Models flatten [batch, sequence, hidden] to rows before a linear layer and back after it (torch's own attention layers
and mixtures of experts do). Of merged dims only the leading one can be sharded or cut into microbatches, so a merge
is moved below the ops that do not see it:

    op(reshape(x, merged)) = reshape(op(x), merged)   op is elementwise (its other operands merged alike, or broadcast)
    f(reshape(x, merged)) = reshape(f(x), merged)     f acts on the last dim alone: linear, softmax, norms over it
    sum(reshape(x, merged)) = sum(x)                  and the mean, over all elements
    permute(reshape(x, merged)) = reshape(permute(x), merged)
    bmm(reshape(x, [b·h, m, k]), reshape(y, [b·h, k, n])) = reshape(matmul(x, y), [b·h, m, n])      and baddbmm alike

Reshapes that meet their inverse vanish when graphs are put into normal form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from paraplan.capture.canonical import autograd, elementwise
from paraplan.capture.cutting.flow import aten_name, value_of
from paraplan.capture.rewriting import losses
from paraplan.capture.rewriting.rewrite import Rewriter, remove_dead
from paraplan.kernels.torch_private import OpOverload

aten = torch.ops.aten
Groups = tuple[tuple[int, ...], ...]
VIEWS = frozenset({"view", "_unsafe_view", "reshape", "flatten"})
_ELEMENTWISE = frozenset({autograd.dropout, elementwise.gated, losses.mse, losses.l1, losses.smooth_l1, losses.huber})
_UNTAGGED = frozenset({"_to_copy", "masked_fill"})
_ROWWISE = frozenset({"softmax", "_softmax", "log_softmax", "_log_softmax"})


def refined(source: Sequence[int], target: Sequence[int]) -> Groups | None:
    """The dims that a reshape to `target` merges each of its dims of, once those of `source` are split.

    Dims of size one are left out of what is merged. None where splitting and merging do not make the reshape.

    >>> refined((5, 4, 8), (5, 8, 4))
    ((5,), (4, 2), (4,))
    """
    bounds = {math.prod(shape[index:]) for shape in (source, target) for index in range(len(shape) + 1)}
    steps = sorted(bounds, reverse=True)
    if 0 in bounds or any(above % below for above, below in itertools.pairwise(steps)):
        return None
    fine = [above // below for above, below in itertools.pairwise(steps)]
    groups: list[tuple[int, ...]] = []
    for size in target:
        count = next(n for n in range(len(fine) + 1) if math.prod(fine[:n]) == size)
        groups.append(tuple(fine[:count]) or (1,))
        fine = fine[count:]
    return tuple(groups)


def sink_merges(graph: fx.Graph, rewriter: Rewriter) -> None:
    """Moves merges below linear layers, elementwise ops and what acts on the last dim alone."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        if _is_total(node) and (found := _merge(node.args[0])) is not None:
            node.replace_input_with(node.args[0], found.source)  # type: ignore[arg-type]
            continue
        made = next((made for rule in _RULES if (made := rule(rewriter, node)) is not None), None)
        if made is not None:
            merged = rewriter.call(node, aten.reshape.default, made, list(value_of(node).shape))
            rewriter.replace(node, merged)
    remove_dead(graph)


def _is_total(node: fx.Node) -> bool:
    """Whether an op sums or averages all elements of its one input."""
    return node.target is losses.mean or (aten_name(node.target) in ("sum", "mean") and len(node.args) == 1)


class _Merge(NamedTuple):
    """reshape(x, ...) that merges: x, and per dim of the result the dims it is made of once x's are split."""

    source: fx.Node
    groups: Groups

    @property
    def fine(self) -> tuple[int, ...]:
        return tuple(itertools.chain(*self.groups))

    def shaped(self, rewriter: Rewriter, before: fx.Node, shape: Sequence[int]) -> fx.Node:
        """The source in a shape."""
        if tuple(value_of(self.source).shape) == tuple(shape):
            return self.source
        return rewriter.call(before, aten.reshape.default, self.source, list(shape))


def _merge(node: object) -> _Merge | None:
    """What a node merges, and how; None where it is no merge of dims larger than one."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or aten_name(node.target) not in VIEWS:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    groups = refined(tuple(value_of(source).shape), tuple(value_of(node).shape))
    return None if groups is None or all(len(group) == 1 for group in groups) else _Merge(source, groups)


def _elementwise(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    target = node.target
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    if not pointwise and target not in _ELEMENTWISE and aten_name(target) not in _UNTAGGED:
        return None
    merges = {x: _merge(x) for x in node.all_input_nodes if value_of(x).dim()}
    groups = _common(merges, tuple(value_of(node).shape))
    if groups is None:
        return None
    sources: dict[fx.Node, fx.Node] = {}
    for x, merge in merges.items():
        shape = _apart(tuple(value_of(x).shape), merge, groups)
        if shape is None:
            return None
        sources[x] = (merge or _Merge(x, ())).shaped(rewriter, node, shape)
    args = fx.map_arg(node.args, lambda x: sources.get(x, x))
    kwargs = fx.map_arg(node.kwargs, lambda x: sources.get(x, x))
    if target is not autograd.dropout:
        return rewriter.call(node, target, *args, **kwargs)
    with rewriter.mode:
        value = torch.empty([*itertools.chain(*groups)], dtype=value_of(node).dtype)
    return rewriter.call(node, target, *args, val=value, **kwargs)


def _common(merges: Mapping[fx.Node, _Merge | None], shape: tuple[int, ...]) -> Groups | None:
    """What the dims of an elementwise op's result are merged of, as its operands say; None if of nothing else."""
    groups = [(size,) for size in shape]
    for merge in merges.values():
        for back, group in enumerate(reversed(merge.groups if merge is not None else ()), 1):
            if len(group) > 1:
                groups[-back] = group
    return tuple(groups) if any(len(group) > 1 for group in groups) else None


def _apart(shape: tuple[int, ...], merge: _Merge | None, groups: Groups) -> tuple[int, ...] | None:
    """The shape of an operand with merged dims taken apart; None where it has one whose merging is not seen."""
    lead = len(groups) - len(shape)
    own = merge.groups if merge is not None else tuple((size,) for size in shape)
    found: list[int] = []
    for size, has, group in zip(shape, own, groups[lead:], strict=True):
        if has != group and size != 1:
            return None
        found += group if size != 1 else (1,) * len(group)
    return tuple(found)


def _on_last_dim(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    found = _merge(node.args[0]) if node.args and _sees_last_dim(node) else None
    if found is None:
        return None
    apart = [size for group in found.groups[:-1] for size in group]
    if len(apart) == len(found.groups) - 1:
        return None  # it merges nothing but what the op needs merged
    source = found.shaped(rewriter, node, [*apart, math.prod(found.groups[-1])])
    rest = list(node.args[1:])
    if aten_name(node.target) in _ROWWISE:
        rest[0] = len(apart)
    return rewriter.call(node, node.target, source, *rest, **node.kwargs)  # type: ignore[arg-type]


def _sees_last_dim(node: fx.Node) -> bool:
    """Whether an op maps every row along its first input's last dim by itself."""
    name = aten_name(node.target)
    if node.target is autograd.linear:
        return True
    if node.target is autograd.rms_norm:
        return node.args[1] == 1
    if name == "layer_norm":
        return len(node.args[1]) == 1  # type: ignore[arg-type]
    return name in _ROWWISE and int(node.args[1]) % max(value_of(node).dim(), 1) == value_of(node).dim() - 1  # type: ignore[call-overload]


def _permuted(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    name = aten_name(node.target)
    found = _merge(node.args[0]) if name in ("permute", "transpose") else None
    if found is None:
        return None
    groups = found.groups
    order = list(range(len(groups)))
    if name == "permute":
        order = [int(dim) % len(order) for dim in node.args[1]]  # type: ignore[union-attr]
    else:
        a, b = (int(dim) % len(order) for dim in node.args[1:3])  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    first = [sum(map(len, groups[:index])) for index in range(len(groups))]
    dims = [first[index] + offset for index in order for offset in range(len(groups[index]))]
    return rewriter.call(node, aten.permute.default, found.shaped(rewriter, node, found.fine), dims)


def _batched(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    name = aten_name(node.target)
    if name not in ("bmm", "baddbmm"):
        return None
    operands = node.args[-2:]
    left, right = map(_merge, operands)
    if left is None or right is None or left.groups[0] != right.groups[0] or len(left.groups[0]) == 1:
        return None
    batch = left.groups[0]
    pair = zip((left, right), operands, strict=True)
    apart = [each.shaped(rewriter, node, (*batch, *value_of(x).shape[1:])) for each, x in pair]  # type: ignore[arg-type]
    if name == "bmm":
        return rewriter.call(node, autograd.matmul, *apart)
    added = node.args[0]
    assert isinstance(added, fx.Node)
    rows = (1, 1, 1, *value_of(added).shape)[-3:]
    lead = batch if rows[0] != 1 else (1,) * len(batch)
    shaped = rewriter.call(node, aten.reshape.default, added, [*lead, *rows[1:]])
    return rewriter.call(node, autograd.batched_product, *apart, shaped, **node.kwargs)


_RULES = (_elementwise, _on_last_dim, _permuted, _batched)
