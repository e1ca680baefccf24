"""Gradients of the pieces of a tensor, joined: padded with zeros and added up they are one concatenation.

A tensor that is cut into slices (queries, keys and values of one product, the halves of a rotary embedding) gets as
many gradients of its own size from autograd, mostly zeros, and their sums. Where the slices cover it without overlap,
their sum is `cat` of them, to the bit: one kernel that writes once, and nothing of the whole size beside it.
"""

from __future__ import annotations

import msgspec

from paraplan.ir.model.graph import Graph, Op

ADD, PADDED, CAT = "aten.add.Tensor", "aten.slice_backward.default", "aten.cat.default"


def join_slices(graph: Graph) -> Graph:
    """The graph with padded slices that cover a dim and are added up, maybe to others, as concatenations."""
    sums = _Sums(graph)
    made: dict[str, list[Op]] = {}
    gone: set[str] = set()
    for op in reversed(graph.ops):
        out = op.outs[0]
        if out is None or out in gone or not sums.adds(op):
            continue
        inner, leaves = sums.tree(out)
        parts = [sums.makers[name] for name in leaves if sums.pads(name)]
        if _cover(parts):
            others = [name for name in leaves if not sums.pads(name)]
            made[out] = _joined(op, sorted(parts, key=_start), others, inner)
            gone.update(inner)
            gone.update(str(part.outs[0]) for part in parts)
    if not made:
        return graph
    ops = []
    for op in graph.ops:
        if op.outs[0] not in gone:
            ops += made.get(op.outs[0] or "", [op])
    named = {*graph.inputs, *(out for op in ops for out in op.outs)}
    values = {name: spec for name, spec in graph.values.items() if name in named}
    return msgspec.structs.replace(graph, ops=tuple(ops), values=values)


def _joined(op: Op, parts: list[Op], others: list[str], inner: list[str]) -> list[Op]:
    """The concatenation of the parts, and the others added to it; under the names of the sums that it stands for."""
    names = [*inner[: len(others)], op.outs[0]]
    ordered = tuple(f"%{part.tensors[0]}" for part in parts)
    ops = [msgspec.structs.replace(op, target=CAT, args=(ordered, parts[0].args[2]), outs=(names[0],))]
    for before, other, name in zip(names, others, names[1:], strict=False):
        ops.append(msgspec.structs.replace(op, args=(f"%{before}", f"%{other}"), outs=(name,)))
    return ops


class _Sums:
    """What the values of a graph are the sums of."""

    def __init__(self, graph: Graph) -> None:
        self.values = graph.values
        self.makers = {out: op for op in graph.ops for out in op.outs if out is not None}
        self.readers: dict[str, int] = {}
        for name in (*(name for op in graph.ops for name in op.tensors), *graph.outputs):
            if name is not None:
                self.readers[name] = self.readers.get(name, 0) + 1

    def adds(self, op: Op) -> bool:
        """Whether an op adds two tensors of its result's shape and dtype."""
        same = op.target == ADD and not op.kwargs and len(op.tensors) == 2
        return same and all(self.values[name] == self.values[op.outs[0] or ""] for name in op.tensors)

    def pads(self, name: str) -> bool:
        """Whether a value is a slice padded with zeros that nothing else reads."""
        op = self.makers.get(name)
        return op is not None and op.target == PADDED and op.args[5] == 1 and self.readers[name] == 1

    def tree(self, name: str) -> tuple[list[str], list[str]]:
        """Sums below a sum that nothing else reads, and what they add."""
        inner: list[str] = []
        leaves: list[str] = []
        for each in self.makers[name].tensors:
            maker = self.makers.get(each)
            if maker is not None and self.readers[each] == 1 and self.adds(maker):
                below = self.tree(each)
                inner += [each, *below[0]]
                leaves += below[1]
            else:
                leaves.append(each)
        return inner, leaves


def _start(part: Op) -> int:
    start = part.args[3]
    assert isinstance(start, int)
    return start


def _cover(parts: list[Op]) -> bool:
    """Whether slices of one dim follow each other from its first element to its last."""
    if len(parts) < 2 or any(part.args[1:3] != parts[0].args[1:3] for part in parts):
        return False
    sizes, dim = parts[0].args[1:3]
    assert isinstance(sizes, (tuple, list)) and isinstance(dim, int)
    at = 0
    for part in sorted(parts, key=_start):
        if part.args[3] != at:
            return False
        at = _start(part) if part.args[4] is None else int(part.args[4])  # type: ignore[arg-type]
    return at == sizes[dim]
