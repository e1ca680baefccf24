"""What a backward in two halves keeps between them: its first half hands a gradient on, its second makes those of
weights.

Gradients of matrices that come with those of inputs do not wait. The second half reads values of the forward, made
again or not, gradients that came or that the first half made, and what is handed on between segments: they wait from
one to the other, so recomputing makes nothing of them smaller. An op that is executed again goes with the half that
needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from paraplan.ir.model.graph import Phase
from paraplan.ir.model.program import SegmentKind
from paraplan.lowering.blocks.param_grads import grads_beside


def handed_on(kind: SegmentKind, again: Collection[int] = ()) -> frozenset[int]:
    """The backward's ops that gradients of inputs depend on, by position.

    Args:
        kind: of segment.
        again: the forward's ops that the backward executes again, of which likewise.
    """
    wanted, found = {name for name in kind.input_grads if name is not None}, set()
    for at, op in reversed(list(enumerate(kind.graph.ops))):
        if (op.phase is Phase.BACKWARD or at in again) and not wanted.isdisjoint(filter(None, op.outs)):
            found.add(at)
            wanted.update(op.tensors)
    return frozenset(found)


def deferred_bytes(
    kind: SegmentKind, nbytes: Mapping[str, float], roots: Mapping[str, str], again: Collection[int] = ()
) -> float:
    """What a microbatch of an instance keeps between the halves.

    Args:
        kind: of segment.
        nbytes: local bytes of every value that its ops make, and of what counts of its inputs, outputs and tangents.
        roots: of every value, what names its storage.
        again: the forward's ops that the backward executes again.
    """
    first = handed_on(kind, again)
    beside = {roots.get(grad, grad) for grad in grads_beside(kind, first)}
    ops = list(enumerate(kind.graph.ops))
    first |= {at for at, op in ops if any(roots.get(out) in beside for out in op.outs if out is not None)}
    second = [op for at, op in ops if (op.phase is Phase.BACKWARD or at in again) and at not in first]
    made = {out for op in second for out in op.outs}
    read = {roots.get(name, name) for op in second for name in op.tensors if name not in made}
    return sum(nbytes.get(name, 0) for name in read)
