"""The order in which a block executes a kind's ops."""

from __future__ import annotations

import msgspec

from paraplan.ir.graph import Phase
from paraplan.ir.lower.remat import NOTHING, Remat
from paraplan.ir.plan import KindChoice
from paraplan.ir.program import SegmentKind


def ops_of(kind: SegmentKind, phase: Phase) -> list[int]:
    """Indices of a phase's ops, in order."""
    return [index for index, op in enumerate(kind.graph.ops) if op.phase is phase]


def phase_order(kind: SegmentKind, phase: Phase, remat: Remat = NOTHING) -> list[int]:
    """A phase's ops in order, each after what it reads that is to be made again."""
    ops = kind.graph.ops
    makers = {out: index for index in remat.again for out in ops[index].outs if out is not None}
    found: dict[int, None] = {}

    def take(index: int) -> None:
        for name in ops[index].tensors:
            ensure(name)
        found[index] = None

    def ensure(name: str) -> None:
        if name in makers and makers[name] not in found:
            take(makers[name])

    for index in ops_of(kind, phase):
        take(index)
    if phase is Phase.BACKWARD:
        for grad in (*kind.input_grads, *kind.param_grads):
            if grad is not None:
                ensure(grad)
    return list(found)


def executed(kind: SegmentKind, choice: KindChoice) -> SegmentKind:
    """The kind as its choice runs it: where forward and backward are one, all of its ops are the forward's."""
    if choice.split is None or not choice.split.at_once:
        return kind
    ops = tuple(msgspec.structs.replace(op, phase=Phase.FORWARD) for op in kind.graph.ops)
    return msgspec.structs.replace(kind, graph=msgspec.structs.replace(kind.graph, ops=ops))
