"""Whose storage a value of a kind's graph has."""

from __future__ import annotations

from paraplan.ir.model.program import SegmentKind
from paraplan.rules.dims import op_def


def storage_roots(kind: SegmentKind) -> dict[str, str]:
    """For every value an op makes, the value whose storage it has: a view's is what it views.

    Args:
        kind: whose graph it is, wherever its values lie.
    """
    base: dict[str, str] = {}
    for op in kind.graph.ops:
        definition = op_def(op.target)
        is_view = definition is not None and definition.strides == "view"
        for out in op.outs:
            if out is not None:
                base[out] = base.get(op.tensors[0], op.tensors[0]) if is_view else out
    return base
