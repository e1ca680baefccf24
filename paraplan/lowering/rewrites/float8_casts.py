"""Casts of weights to float8 in a block: before everything else where what is gathered is the cast, and each made once.

A gather is issued as soon as its input exists. A stored shard exists when the block begins, its cast where the cast
stands: right before the product that waits for it. Casts whose results are gathered therefore stand at the block's
begin, all maxima before the first cast, so that each reduction is under way beside the next maximum. And where the
forward is executed again, its cast of a weight is the backward's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paraplan.ir.machine.mesh import Layout
from paraplan.ir.model.graph import Graph, map_refs
from paraplan.ir.model.program import SegmentKind
from paraplan.rules.strategies import Strategy

SCALE, CAST = "paraplan.float8_scale", "paraplan.float8_cast"


def casts_first(kind: SegmentKind, strategies: Sequence[Strategy], order: Sequence[int]) -> list[int]:
    """The order with scales, then casts, of weights that are gathered as float8 in front.

    Args:
        kind: whose ops.
        strategies: of its ops.
        order: numbers of ops.
    """
    ops = kind.graph.ops
    wanted: dict[str, set[Layout]] = {}
    for index in order:
        for name, layout in zip(ops[index].tensors, strategies[index].inputs, strict=True):
            wanted.setdefault(name, set()).add(layout)
    casts = [
        index
        for index in order
        if ops[index].target == CAST
        and ops[index].tensors[0] in kind.params
        and any(layout != strategies[index].outputs[0] for layout in wanted.get(ops[index].outs[0] or "", ()))
    ]
    read = {name for index in casts for name in ops[index].tensors}
    scales = [index for index in order if ops[index].target == SCALE and ops[index].outs[0] in read]
    first = dict.fromkeys((*scales, *casts))
    return [*first, *(index for index in order if index not in first)]


def each_once(graph: Graph, strategies: Sequence[Strategy], order: Sequence[int]) -> tuple[Graph, list[int]]:
    """The graph and the order without casts that repeat an earlier one, whose result their readers take.

    Args:
        graph: of the kind.
        strategies: of its ops.
        order: numbers of ops.
    """
    made: dict[object, str] = {}
    same: dict[str, str] = {}
    here = frozenset(order)
    read_elsewhere = {name for index, op in enumerate(graph.ops) if index not in here for name in op.tensors}
    for index in order:
        op, out = graph.ops[index], graph.ops[index].outs[0]
        if op.target == CAST and out is not None and out not in read_elsewhere:
            first = made.setdefault((op.args, strategies[index]), out)
            if first != out:
                same[out] = first
    if not same:
        return graph, list(order)

    def named(name: str) -> str:
        return same.get(name, name)

    ops = tuple(msgspec.structs.replace(op, args=tuple(map_refs(arg, named) for arg in op.args)) for op in graph.ops)
    return msgspec.structs.replace(graph, ops=ops), [index for index in order if graph.ops[index].outs[0] not in same]
