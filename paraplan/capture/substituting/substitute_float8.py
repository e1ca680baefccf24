"""precision="fp8": which products with a weight go in float8.

As torchtitan converts a model with torchao: linear layers whose two dims are multiples of 16, in bfloat16 until then,
and not the last ones before the loss (a vocabulary's head), whose rounding the loss would see. Layers are told by the
graph, not by name: a product with a parameter of two dims, after which another product follows.
"""

from __future__ import annotations

import torch
from torch import fx

from paraplan.capture.canonical import autograd, float8
from paraplan.capture.cutting.flow import is_heavy, value_of
from paraplan.capture.rewriting import losses
from paraplan.capture.rewriting.rewrite import Rewriter, remove_dead
from paraplan.kernels.float8_kernels import ALIGNED

_NO_PRODUCTS = frozenset({autograd.cross_entropy_sum, autograd.dropout, autograd.uniform, *losses.HEAVY})


def convert_linears(graph: fx.Graph, names: dict[fx.Node, str], rewriter: Rewriter) -> None:
    """Rewrites such products in place; a bias is added afterwards, in bfloat16.

    Args:
        graph: forward graph of canonical ops.
        names: what its placeholders are.
        rewriter: of the graph.
    """
    inner = _before_a_product(graph)
    for node in list(graph.nodes):
        if node.target is not autograd.linear or node not in inner or not _fits(node, names):
            continue
        x, w, bias, transposed = node.args
        made = rewriter.call(node, float8.float8_linear, x, w, transposed)
        if bias is not None:
            made = rewriter.call(node, torch.ops.aten.add.Tensor, made, bias)
        rewriter.replace(node, made)
    remove_dead(graph)


def _before_a_product(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose result another product depends on."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in found or (is_heavy(user.target) and user.target not in _NO_PRODUCTS) for user in node.users):
            found.add(node)
    return found


def _fits(node: fx.Node, names: dict[fx.Node, str]) -> bool:
    x, w = node.args[0], node.args[1]
    if not isinstance(w, fx.Node) or not names.get(w, "").startswith("param:"):
        return False
    halves = value_of(x).dtype == value_of(w).dtype == torch.bfloat16  # type: ignore[arg-type]
    return halves and all(size % ALIGNED == 0 for size in value_of(w).shape)
