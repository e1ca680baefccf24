"""What a segment's forward saves for its backward, where that waits, and which of its ops the backward executes again.

A choice may ask for values to be recomputed (`KindChoice.activations`). The op that makes such a value is executed
again in the backward, once, just before its first reader there; what that op reads must then be at hand in turn: saved,
made again too, or the segment's own inputs, parameters and outputs, which are held outside of it anyhow. An op executed
again makes all its results again, so none of them is saved. A choice may also ask for an op to be executed again though
nothing needs it ("rerun"), as systems do that run whole layers again (Megatron-LM): its result, kept as it would be
otherwise, is made with the first of what it depends on, and dropped. Or a choice may ask for a value to wait on a tier
(`activation_offload`); that says nothing of a value which is not saved.

Random ops draw the same numbers (their generator is keyed by seed and element index); collectives inside are repeated.
Source: checkpointing at the level of ops, as Checkmate (Jain et al. 2020) plans it, with one recomputation per value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.graph import Phase
from paraplan.ir.model.program import SegmentKind
from paraplan.lowering.rewrites.float8_casts import SCALE

RECOMPUTE, RERUN = "recompute", "rerun"
FATES = (RECOMPUTE, RERUN, *TIERS)
"""What may become of a value that is not simply kept."""


@dataclass(frozen=True)
class Remat:
    """What passes from forward to backward.

    Attributes:
        saved: values kept, in the order of the graph's values.
        again: forward ops the backward executes again, ascending.
        offloaded: (value, tier) of those saved that wait on one.
        rerun: further ones, whose results nothing takes.
    """

    saved: tuple[str, ...] = ()
    again: tuple[int, ...] = ()
    offloaded: tuple[tuple[str, str], ...] = ()
    rerun: tuple[int, ...] = ()


NOTHING = Remat()
"""Nothing is saved and nothing made again."""


def recomputable(kind: SegmentKind) -> tuple[str, ...]:
    """The values a choice may name: what the forward makes inside and the backward reads, however far.

    Results of ops that make an output are not among them: other segments hold that. Nor are scales of casts to float8:
    they are four bytes each, and over several ranks a reduction.
    """
    makers = _makers(kind)
    found = set()
    wanted = list(read_by_backward(kind))
    while wanted:
        name = wanted.pop()
        if name in makers and name not in found and kind.graph.ops[makers[name]].target != SCALE:
            found.add(name)
            wanted += kind.graph.ops[makers[name]].tensors
    return tuple(name for name in kind.graph.values if name in found)


def boundary_values(kind: SegmentKind) -> tuple[str, ...]:
    """The outputs of a kind that a choice may have wait on a tier: those that gradients come back to, scalars apart."""
    handed = zip(kind.outputs, kind.tangents, strict=True)
    return tuple(name for name, tangent in handed if tangent is not None and kind.graph.values[name].shape)


def remat_of(kind: SegmentKind, activations: Mapping[str, str]) -> Remat:
    """What is saved, where, and what is made again under a choice's activations.

    Raises:
        InvalidPlanError: a value is none the forward makes inside, or what becomes of it has no such name.
    """
    makers, ops = _makers(kind), kind.graph.ops
    every = _forward_makers(kind)
    for name, fate in activations.items():
        if name in boundary_values(kind) and fate in TIERS:
            continue  # see `boundary_offload`
        if name in every and fate == RERUN:
            continue
        if name not in makers:
            raise InvalidPlanError(
                f"kind {kind.name}: activations name {name!r}, no value that its forward makes and keeps to itself, "
                "nor one it hands on and gets a gradient for, which could wait on a tier"
            )
        if fate not in FATES:
            can = ", ".join(map(repr, FATES))
            raise InvalidPlanError(f"kind {kind.name}: activations[{name!r}] is {fate!r}; it can be {can}")
    asked = {makers[name] for name, fate in activations.items() if fate == RECOMPUTE}
    again: set[int] = set()
    saved: set[str] = set()
    rerun = {every[name] for name, fate in activations.items() if fate == RERUN}
    wanted = [*read_by_backward(kind), *(name for index in rerun for name in ops[index].tensors)]
    while wanted:
        name = wanted.pop()
        maker = every.get(name)
        if maker is None or name in kind.outputs or name in saved or maker in again:
            continue
        if maker in asked:
            again.add(maker)
            wanted += ops[maker].tensors
        else:
            saved.add(name)
    kept = tuple(name for name in kind.graph.values if name in saved)
    offloaded = tuple((name, activations[name]) for name in kept if activations.get(name) in TIERS)
    return Remat(kept, tuple(sorted(again)), offloaded, tuple(sorted(rerun - again)))


def _makers(kind: SegmentKind) -> dict[str, int]:
    """Who makes what may be made again: no op of which a result is an output."""
    ops = kind.graph.ops
    return {name: at for name, at in _forward_makers(kind).items() if not set(kind.outputs) & set(ops[at].outs)}


def _forward_makers(kind: SegmentKind) -> dict[str, int]:
    ops = enumerate(kind.graph.ops)
    return {out: index for index, op in ops if op.phase is Phase.FORWARD for out in op.outs if out is not None}


def read_by_backward(kind: SegmentKind) -> set[str]:
    """What the backward needs of a kind: what its ops read, and gradients that are values of the forward."""
    reads = {name for op in kind.graph.ops if op.phase is Phase.BACKWARD for name in op.tensors}
    return reads | {grad for grad in (*kind.input_grads, *kind.param_grads) if grad is not None}
