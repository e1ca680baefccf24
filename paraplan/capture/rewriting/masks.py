"""Attention masks that depend on nothing are computed once: all true means none, lower triangular means causal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from paraplan.capture.canonical import autograd
from paraplan.capture.cutting.flow import value_of
from paraplan.capture.rewriting.rewrite import Rewriter, remove_dead
from paraplan.kernels.torch_private import OpOverload, tree_map_only

MAX_BYTES = 64 << 20
_ATTENTION = frozenset({autograd.attention, autograd.attention_dropout})


def simplify_masks(
    graph: fx.Graph, names: Mapping[fx.Node, str], constants: Mapping[str, Tensor], rewriter: Rewriter
) -> None:
    """Recognises constant bool masks of attention; every other mask stays data.

    Args:
        graph: forward graph with canonical attention.
        names: what its placeholders are.
        constants: tensors the model wrote out.
        rewriter: of the graph.
    """
    known: dict[fx.Node, Tensor | None] = {}
    verdicts: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.target not in _ATTENTION or not isinstance(node.args[3], fx.Node) or node.args[4]:
            continue
        mask = node.args[3]
        if mask not in verdicts:
            verdicts[mask] = _verdict(mask, names, constants, known)
        if verdicts[mask] != "data":
            node.args = (*node.args[:3], None, verdicts[mask] == "causal", *node.args[5:])
    remove_dead(graph)


def _verdict(
    mask: fx.Node, names: Mapping[fx.Node, str], constants: Mapping[str, Tensor], known: dict[fx.Node, Tensor | None]
) -> str:
    value = value_of(mask)
    if value.dtype != torch.bool:
        return "data"
    concrete = _concrete(mask, names, constants, known)
    if concrete is None:
        return "data"
    if bool(concrete.all()):
        return "none"
    rows, columns = concrete.shape[-2:]
    return (
        "causal"
        if rows == columns and bool((concrete == torch.ones(rows, columns, dtype=torch.bool).tril()).all())
        else "data"
    )


def _concrete(
    root: fx.Node, names: Mapping[fx.Node, str], constants: Mapping[str, Tensor], known: dict[fx.Node, Tensor | None]
) -> Tensor | None:
    """A node's value where it depends on constants alone and everything on the way is small."""
    stack = [root]
    while stack:
        node = stack[-1]
        if node in known:
            stack.pop()
        elif waiting := [source for source in node.all_input_nodes if source not in known]:
            if node.op == "placeholder":
                break
            stack += waiting
        else:
            known[node] = _compute(node, names, constants, known)
            stack.pop()
    return known.get(root)


def _compute(
    node: fx.Node, names: Mapping[fx.Node, str], constants: Mapping[str, Tensor], known: Mapping[fx.Node, Tensor | None]
) -> Tensor | None:
    value = node.meta.get("val")
    if node.op == "placeholder":
        kind, name = names[node].split(":", 1)
        return constants[name] if kind == "constant" else None
    small = isinstance(value, Tensor) and value.numel() * value.element_size() <= MAX_BYTES
    if (
        not small
        or not isinstance(node.target, OpOverload)
        or any(known[source] is None for source in node.all_input_nodes)
    ):
        return None
    args, kwargs = tree_map_only(fx.Node, lambda n: known[n], (node.args, node.kwargs))
    made = node.target(*args, **kwargs)
    return made if isinstance(made, Tensor) else None
