"""Where a forward graph ends: what it may not return, and one node for what is tied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from paraplan.capture.cutting.loss_terms import LossFraction
from paraplan.capture.rewriting.rewrite import remove_dead
from paraplan.capture.source_lines import line_of_stack
from paraplan.ir.errors import CaptureError

aten = torch.ops.aten


def refuse_numbers(graph: fx.Graph) -> None:
    """Numbers that are read out of tensors, which no graph has.

    Raises:
        CaptureError: there is one; names the line.
    """
    for node in graph.nodes:
        if node.target in (aten._local_scalar_dense.default, aten.item.default):
            raise CaptureError(
                f"{line_of_stack(node.meta.get('stack_trace')) or 'somewhere in the forward'}: a Python number or a "
                "shape depends on tensor data; keep values as tensors instead of .item(), and sizes fixed"
            )


def ends_of(terms: Sequence[LossFraction]) -> list[fx.Node]:
    """What the loss is made of."""
    return [term.numerator for term in terms] + [term.denominator for term in terms if term.denominator is not None]


def end_in(graph: fx.Graph, results: Sequence[fx.Node]) -> None:
    """What the graph gives; other calls are removed."""
    graph.output_node().args = (tuple(results),)
    remove_dead(graph)


def join_ties(names: dict[fx.Node, str], first_names: dict[str, str]) -> None:
    """All uses of a tied parameter go through its first name."""
    owners: dict[str, fx.Node] = {}
    for node, name in list(names.items()):
        kind, target = name.split(":", 1)
        if kind != "param":
            continue
        owner = owners.setdefault(first_names[target], node)
        names[node] = f"param:{first_names[target]}"
        if owner is not node:
            node.replace_all_uses_with(owner)
