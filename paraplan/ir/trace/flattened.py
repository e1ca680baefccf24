"""Dims that a reshape merges stay apart as long as no op needs them merged.

Models flatten [batch, sequence, hidden] to rows before a linear layer and back after it (torch's own attention layers
and mixtures of experts do). Of merged dims only the leading one can be sharded or cut into microbatches, so a merge
is moved below the ops that do not see it:

    op(reshape(x, merged)) = reshape(op(x), merged)   op is elementwise (its other operands merged alike, or scalars)
    f(reshape(x, merged)) = reshape(f(x), merged)     f acts on the last dim alone: linear, softmax, norms over it
    sum(reshape(x, merged)) = sum(x)                  and the mean, over all elements

Reshapes that meet their inverse vanish when graphs are put into normal form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from paraplan.ir.trace import autograd, losses
from paraplan.ir.trace.flow import aten_name, value_of
from paraplan.ir.trace.rewrite import Rewriter, remove_dead
from paraplan.ir.trace.torch_private import OpOverload

aten = torch.ops.aten
VIEWS = frozenset({"view", "_unsafe_view", "reshape", "flatten"})
_ELEMENTWISE = frozenset({autograd.dropout, losses.mse, losses.l1, losses.smooth_l1, losses.huber})
_ROWWISE = frozenset({"softmax", "_softmax", "log_softmax", "_log_softmax"})


def merged_groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, ...]] | None:
    """The source dims that each target dim is made of; None where the reshape does not merely merge neighbours.

    >>> merged_groups((2, 3, 4), (6, 4))
    [(2, 3), (4,)]
    """
    groups: list[tuple[int, ...]] = []
    at = 0
    for size in target:
        taken: list[int] = []
        while at < len(source) and (not taken or math.prod(taken) < size):
            taken.append(source[at])
            at += 1
        if math.prod(taken) != size:
            return None
        groups.append(tuple(taken))
    rest = source[at:]
    if math.prod(rest) != 1:
        return None
    if rest and groups:
        groups[-1] += tuple(rest)
    return groups


def sink_merges(graph: fx.Graph, rewriter: Rewriter) -> None:
    """Moves merges below linear layers, elementwise ops and what acts on the last dim alone."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        if _is_total(node) and (found := _merge(node.args[0])) is not None:
            node.replace_input_with(node.args[0], found[0])  # type: ignore[arg-type]
            continue
        made = _elementwise(rewriter, node) or _on_last_dim(rewriter, node)
        if made is not None:
            merged = rewriter.call(node, aten.reshape.default, made, list(value_of(node).shape))
            rewriter.replace(node, merged)
    remove_dead(graph)


def _is_total(node: fx.Node) -> bool:
    """Whether an op sums or averages all elements of its one input."""
    return node.target is losses.mean or (aten_name(node.target) in ("sum", "mean") and len(node.args) == 1)


def _merge(node: object) -> tuple[fx.Node, list[tuple[int, ...]]] | None:
    """What a node merges, and how; None where it is no merge of dims larger than one."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or aten_name(node.target) not in VIEWS:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    groups = merged_groups(tuple(value_of(source).shape), tuple(value_of(node).shape))
    if groups is None or all(sum(size > 1 for size in group) < 2 for group in groups):
        return None
    return source, groups


def _elementwise(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    target = node.target
    if target not in _ELEMENTWISE and not (isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags):
        return None
    operands = [x for x in node.all_input_nodes if value_of(x).dim()]
    found = [_merge(x) for x in operands]
    first = found[0] if found else None
    if first is None or tuple(value_of(operands[0]).shape) != tuple(value_of(node).shape):
        return None
    shape = value_of(first[0]).shape
    alike = all(
        each is not None and value_of(each[0]).shape == shape and value_of(x).shape == value_of(node).shape
        for x, each in zip(operands, found, strict=True)
    )
    if not alike:
        return None
    sources = {x: each[0] for x, each in zip(operands, found, strict=True) if each is not None}
    args = fx.map_arg(node.args, lambda x: sources.get(x, x))
    kwargs = fx.map_arg(node.kwargs, lambda x: sources.get(x, x))
    if target is not autograd.dropout:
        return rewriter.call(node, target, *args, **kwargs)
    with rewriter.mode:
        value = torch.empty(shape, dtype=value_of(node).dtype)
    return rewriter.call(node, target, *args, val=value, **kwargs)


def _on_last_dim(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    found = _merge(node.args[0]) if node.args and _sees_last_dim(node) else None
    if found is None:
        return None
    source, groups = found
    apart = [size for group in groups[:-1] for size in group]
    if len(apart) == len(groups) - 1:
        return None  # it merges nothing but what the op needs merged
    width = math.prod(groups[-1])
    if tuple(value_of(source).shape) != (*apart, width):
        source = rewriter.call(node, aten.reshape.default, source, [*apart, width])
    rest = list(node.args[1:])
    if aten_name(node.target) in _ROWWISE:
        rest[0] = len(apart)
    return rewriter.call(node, node.target, source, *rest, **node.kwargs)  # type: ignore[arg-type]


def _sees_last_dim(node: fx.Node) -> bool:
    """Whether an op maps every row along its first input's last dim by itself."""
    name = aten_name(node.target)
    if node.target is autograd.linear:
        return True
    if node.target is losses.rms_norm:
        return node.args[1] == 1
    if name == "layer_norm":
        return len(node.args[1]) == 1  # type: ignore[arg-type]
    return name in _ROWWISE and int(node.args[1]) % max(value_of(node).dim(), 1) == value_of(node).dim() - 1  # type: ignore[call-overload]
