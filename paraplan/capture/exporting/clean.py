"""Removes from the forward graph what says nothing about the computation: assertions, aliases, devices."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

from paraplan.capture.cutting.flow import aten_name
from paraplan.capture.rewriting.rewrite import remove_dead

_ASSERTIONS = frozenset(
    {
        "_assert_tensor_metadata",
        "_assert_scalar",
        "_assert_async",
        "sym_constrain_range_for_size",
        "sym_constrain_range",
    }
)
_ALIASES = frozenset({"alias", "lift_fresh_copy", "lift_fresh", "contiguous", "clone"})
_VIEWS = frozenset({"view", "_unsafe_view"})
_FILLS = {"zeros_like": 0, "new_zeros": 0, "empty_like": 0, "new_empty": 0, "ones_like": 1, "new_ones": 1}
_PLACES = ("device", "pin_memory", "layout", "memory_format", "non_blocking")


def clean(graph: fx.Graph) -> None:
    """Drops assertions, aliases, clones (the graph is functional), casts to the same dtype, placement arguments."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = aten_name(node.target)
        if name in _ASSERTIONS:
            graph.erase_node(node)
        elif name in _ALIASES or _is_same_cast(node, name):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        else:
            if name in _VIEWS:  # without clones a view may have to copy
                node.target = torch.ops.aten.reshape.default
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in _PLACES}
            _say_dtype(node)
            _forget_source(node, name)
    remove_dead(graph)


def _say_dtype(node: fx.Node) -> None:
    """Factories without a dtype would follow the default of whoever runs them."""
    schema = getattr(node.target, "_schema", None)
    made = node.meta.get("val")
    if schema is None or node.all_input_nodes or not isinstance(made, Tensor) or node.kwargs.get("dtype") is not None:
        return
    place = next((index for index, each in enumerate(schema.arguments) if each.name == "dtype"), None)
    if place is not None and place >= len(node.args):
        node.kwargs = {**node.kwargs, "dtype": made.dtype}


def _forget_source(node: fx.Node, name: str) -> None:
    """Constants shaped like another tensor (zeros_like) become constants of that shape: they depend on nothing."""
    if name in _FILLS:
        value: object = _FILLS[name]
    elif name in ("full_like", "new_full"):
        value = node.args[1 if name == "full_like" else 2]
    else:
        return
    made = node.meta["val"]
    if not isinstance(value, fx.Node):
        node.target = torch.ops.aten.full.default
        node.args = (list(made.shape), bool(value) if made.dtype == torch.bool else value)
        node.kwargs = {"dtype": made.dtype}


def _is_same_cast(node: fx.Node, name: str) -> bool:
    if name != "_to_copy" or not isinstance(node.args[0], fx.Node):
        return False
    source = node.args[0].meta.get("val")
    return isinstance(source, Tensor) and source.dtype == node.kwargs.get("dtype", source.dtype)


def drop_idle_detach(graph: fx.Graph, carries: set[fx.Node], kept: Collection[fx.Node] = ()) -> None:
    """Drops detach where there is no gradient to stop, but those kept.

    Args:
        graph: changed in place.
        carries: nodes that gradients flow to.
        kept: nodes that stay.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default and node.args[0] not in carries and node not in kept:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
