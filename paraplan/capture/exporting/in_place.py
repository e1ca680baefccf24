"""Writes in place made functional without retracing, where what is written is a forward's own and has no other name.

Problem: one `w /= w.sum()` or `y[..., :n] = x` in a layer sends a whole graph to `run_decompositions`, which traces it
once more. Method: a write to a tensor that an op of the graph has made anew becomes the op that gives the written
value, which is what later readers read; a write to a slice or an index of it is put back by `slice_scatter` or
`select_scatter`, as torch's functionalization spells it. Limits: left to `run_decompositions` are writes to inputs,
parameters and buffers, to views of any other kind, and those where an alias made before is read after.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from paraplan.kernels.torch_private import FakeTensor, OpOverload, gives_alias, is_composite, tree_leaves, tree_map_only

aten = torch.ops.aten
_SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}


class Write(NamedTuple):
    """A call that writes its first argument.

    Attributes:
        node: the call.
        target: the op that gives what it writes.
        base: what was made anew, and is written.
        value: what it gives, fake.
        part: whether the argument is a part of the base, and not the whole.
    """

    node: fx.Node
    target: OpOverload
    base: fx.Node
    value: Tensor
    part: bool


def has_writes(graph: fx.Graph) -> bool:
    """Whether a graph writes any tensor in place."""
    return any(isinstance(node.target, OpOverload) and node.target._schema.is_mutable for node in graph.nodes)


def writes_of(graph: fx.Graph, kept: Callable[[OpOverload], bool]) -> list[Write] | None:
    """The writes of a graph without regions; None where one cannot be made functional.

    Args:
        graph: is not changed; no write of it stood in a region.
        kept: whether a composite op is one whose results share memory with nothing.
    """
    if not has_writes(graph):
        return []
    order = {node: place for place, node in enumerate(graph.nodes)}
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    sharing: dict[fx.Node, list[fx.Node]] = {}  # what may share its memory with a root, so far
    found: list[Write] = []
    for node in graph.nodes:
        target = node.target
        if isinstance(target, OpOverload) and target._schema.is_mutable:
            write = _write(node, target, roots)
            if write is None or not _is_alone(write, sharing[write.base], order):
                return None
            found.append(write)
            roots[node] = frozenset((write.base,))
        else:
            roots[node] = _roots(node, roots, kept)
        for root in roots[node]:
            sharing.setdefault(root, []).append(node)
    return found


def _roots(
    node: fx.Node, roots: dict[fx.Node, frozenset[fx.Node]], kept: Callable[[OpOverload], bool]
) -> frozenset[fx.Node]:
    """What a value may share its memory with: made anew it is its own root."""
    target = node.target
    own = frozenset((node,))
    if node.op != "call_function":
        return own
    if target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return own if roots[source] == frozenset((source,)) else roots[source]
    if not isinstance(target, OpOverload):
        return own.union(*(roots[each] for each in node.all_input_nodes))
    if gives_alias(target):
        return frozenset().union(*(roots[each] for each in node.all_input_nodes))
    if is_composite(target) and not kept(target):
        return own.union(*(roots[each] for each in node.all_input_nodes))
    return own


def _write(node: fx.Node, target: OpOverload, roots: dict[fx.Node, frozenset[fx.Node]]) -> Write | None:
    x, functional = node.args[0] if node.args else None, _functional(target)
    if functional is None or not isinstance(x, fx.Node) or len(roots[x]) != 1:
        return None
    (base,) = roots[x]
    whole = _is_whole(x, base)
    part = x.target in _SCATTERS and _is_whole(x.args[0], base) and not node.users
    if base.op != "call_function" or not (whole or part):
        return None
    value, before = _evaluated(functional, node), x.meta["val"]
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (before.shape, before.dtype):
        return None
    return Write(node, functional, base, value, part)


def _is_whole(x: object, base: fx.Node) -> bool:
    """Whether a value is a base, or what a write to the whole of it returned."""
    while x is not base:
        if not (isinstance(x, fx.Node) and isinstance(x.target, OpOverload) and x.target._schema.is_mutable):
            return False
        x = x.args[0]
    return True


def _evaluated(target: OpOverload, node: fx.Node) -> object:
    args, kwargs = tree_map_only(fx.Node, lambda each: each.meta["val"], (node.args, node.kwargs))
    mode = next((x.fake_mode for x in tree_leaves(args) if isinstance(x, FakeTensor)), None)
    with nullcontext() if mode is None else mode:
        return target(*args, **kwargs)


def _functional(target: OpOverload) -> OpOverload | None:
    """The op that gives what another one writes to its first argument."""
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(aten, name.removesuffix("_"), None)
    if target.namespace != "aten" or not name.endswith("_") or name == "set_" or packet is None:
        return None
    found = getattr(packet, target._overloadname or "default", None)
    if not isinstance(found, OpOverload) or found._schema.is_mutable:
        return None
    written = [each.name for each in target._schema.arguments if each.alias_info is not None]
    mine, theirs = ([(each.name, str(each.type)) for each in op._schema.arguments] for op in (target, found))
    new = len(found._schema.returns) == 1 and found._schema.returns[0].alias_info is None
    return found if new and mine == theirs and written == [mine[0][0]] else None


def _is_alone(write: Write, sharing: list[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Whether of what was made before a write and shares memory with what it writes only the whole is read after it."""
    at = order[write.node]
    parts = (node for node in sharing if not _is_whole(node, write.base))
    return not any(order[user] > at for node in parts for user in node.users)


def make_functional(graph: fx.Graph, writes: list[Write]) -> None:
    """Puts functional calls in place of writes.

    Args:
        graph: of the writes.
        writes: as `writes_of` found them.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node, target, _, value, part in writes:
        x = node.args[0]
        assert isinstance(x, fx.Node)
        made = _before(node, target, node.args, node.kwargs, value)
        node.replace_all_uses_with(made)
        old, new = x, made
        if part:
            old = x.args[0]  # type: ignore[assignment]
            new = _before(node, _SCATTERS[x.target], (old, made, *x.args[1:]), x.kwargs, old.meta["val"])  # type: ignore[index]
        at = order[made] = order[new] = order[node]
        old.replace_all_uses_with(new, delete_user_cb=partial(_is_after, order, at))
        graph.erase_node(node)


def _is_after(order: dict[fx.Node, int], at: int, user: fx.Node) -> bool:
    return order[user] > at


def _before(node: fx.Node, target: Callable[..., object], args: Any, kwargs: Any, value: Tensor) -> fx.Node:
    """A call before another, of its source line."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, kwargs)
    made.meta = {**node.meta, "val": value}
    return made
