"""A kind under one choice -> its backward block, or two: input gradients and weight gradients.

A gradient leaves a block in the layout the plan gives it, a small one that is a sum over ranks as it was made
(`partial`). A backward in two parts (Qi et al. 2023, "Zero bubble pipeline parallelism") is a partition of its ops:
what an input's gradient needs is the first part, the rest the second; values of the first that the second reads are
saved until then, and ops executed again go with their first reader. Gradients of matrices that an op of the first part
makes beside an input's, as experts' are, leave with it: they are as large as what they would wait for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.rank_program import Block, BlockRole
from paraplan.ir.execution.schedule import ActionKind
from paraplan.ir.machine.mesh import Layout, R, parse_layout, without
from paraplan.ir.machine.reshard import Move
from paraplan.ir.model.graph import Graph, Op, Phase
from paraplan.ir.model.program import SegmentKind
from paraplan.ir.plan import KindChoice
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.blocks.forward import (
    Given,
    KindContext,
    LoweredForward,
    Path,
    at_once,
    chosen_chunks,
    early,
    executed,
    give_sources,
    ops_of,
    unshared,
)
from paraplan.lowering.blocks.param_grads import grads_beside, param_grads_of
from paraplan.lowering.rewrites.chunks import Chunks
from paraplan.lowering.rewrites.float8_casts import casts_first, each_once
from paraplan.lowering.rewrites.loops import emit_ops
from paraplan.rules.time_axis import KindMicro, dual


@dataclass(frozen=True)
class LoweredBackward:
    """A backward block, or one part of it.

    Attributes:
        block: its inputs are parameters, boundary inputs, seed, saved values (under the forward block's local names),
            outputs and tangents; its results the gradients of the boundary inputs, then those of the parameters.
        grads: how the gradient of each boundary input lies, None where it has none.
        early: as of the forward.
        partial: per parameter slot, the moves that a gradient has yet to make.
        parts: where the backward is split, input gradients and weight gradients; what the first saves for the second
            is bound under the same local names.
    """

    block: Block
    grads: tuple[Given | None, ...]
    early: tuple[Move | None, ...]
    partial: tuple[Path, ...]
    parts: tuple[LoweredBackward, LoweredBackward] | None = None


@dataclass(frozen=True)
class _Task:
    """What all parts of a backward have in common."""

    name: str
    kind: SegmentKind
    choice: KindChoice
    micro: KindMicro
    context: KindContext
    forward: LoweredForward
    tangents: tuple[Given | None, ...]
    chunks: Chunks


@dataclass(frozen=True)
class _Kept:
    """Values one part keeps for the next.

    Attributes:
        values: local name and how it lies.
        own: those of the local names whose storage is nobody else's.
    """

    values: dict[str, tuple[str, Given]]
    own: frozenset[str] = frozenset()


def lower_backward(
    name: str,
    kind: SegmentKind,
    choice: KindChoice,
    micro: KindMicro,
    context: KindContext,
    forward: LoweredForward,
    tangents: tuple[Given | None, ...],
    halves: frozenset[ActionKind] = frozenset({ActionKind.B}),
) -> LoweredBackward:
    """Lower a kind's backward ops; `tangents` says how each output's gradient arrives.

    Args:
        name: of the block.
        kind, choice: what is lowered, and what the plan decides of it.
        micro: what its ops do along the microbatch axis.
        context: the mesh, and where values are given.
        forward: the kind's forward, lowered; what it saves is read here.
        tangents: how each output's gradient arrives; None where none does.
        halves: what actions run of it: all (B), or gradients of inputs (I) and of parameters (W) in a block each; a
            schedule may split some microbatches' backwards and not others'.
    """
    chunks = chosen_chunks(kind, choice, forward.strategies, context)
    kind = executed(kind, choice)
    task = _Task(name, kind, choice, micro, context, forward, tangents, chunks)
    again = (*forward.remat.again, *forward.remat.rerun)
    every = frozenset((*ops_of(kind, Phase.BACKWARD), *again))
    grads = frozenset(grad for grad in kind.param_grads if grad is not None)
    whole = _in_one(task, name, every, grads) if ActionKind.B in halves else None
    if whole is not None and len(halves) == 1:
        return whole
    given, weights = _in_two(task, name, every, grads)
    if whole is not None and (rows := _unlike(whole, given)):
        whole, (given, weights) = _in_one(task, name, every, grads, rows), _in_two(task, name, every, grads, rows)
    partial = tuple(a or b for a, b in zip(given.partial, weights.partial, strict=True))
    if whole is None:
        return LoweredBackward(given.block, given.grads, given.early, partial, (given, weights))
    if (whole.grads, whole.partial) != (given.grads, partial):
        raise InvalidPlanError(
            f"the backward of {kind.name} leaves its gradients otherwise in two halves than in one; take a schedule "
            "that splits the backwards of all microbatches, or of none"
        )
    return replace(whole, parts=(given, weights))


def _unlike(whole: LoweredBackward, given: LoweredBackward) -> frozenset[int]:
    """The inputs whose gradients lie alike but for their strides: what a half keeps for the other may share their
    storage, so that it hands on a copy."""
    pairs = enumerate(zip(whole.grads, given.grads, strict=True))
    return frozenset(slot for slot, (a, b) in pairs if a is not None and b is not None and a.strides != b.strides)


def _in_one(
    task: _Task, name: str, every: frozenset[int], grads: frozenset[str], rows: Collection[int] = ()
) -> LoweredBackward:
    """All of a backward in a block; `rows` as of `_lower_part`."""
    return _lower_part(task, name, BlockRole.BACKWARD, every, grads, _Kept({}), rows=rows)[0]


def _in_two(
    task: _Task, name: str, every: frozenset[int], grads: frozenset[str], rows: Collection[int] = ()
) -> tuple[LoweredBackward, LoweredBackward]:
    """Its gradients of inputs and of parameters in a block each; `rows` as of `_lower_part`."""
    kind = task.kind
    rerun = [out for index in task.forward.remat.rerun for out in kind.graph.ops[index].outs]
    first = _needed_by(kind, every, (*kind.input_grads, *rerun))
    beside = grads_beside(kind, first)
    first |= _needed_by(kind, every, beside)
    later = every - first
    given, kept = _lower_part(task, f"{name}i", BlockRole.BACKWARD_INPUTS, first, beside, _Kept({}), later, rows)
    return given, _lower_part(task, f"{name}w", BlockRole.BACKWARD_WEIGHTS, later, grads - beside, kept)[0]


def _needed_by(kind: SegmentKind, every: Collection[int], results: Collection[str | None]) -> frozenset[int]:
    """Those of some ops that results need."""
    makers = {out: index for index in every for out in kind.graph.ops[index].outs if out is not None}
    found: set[int] = set()
    wanted = [name for name in results if name is not None]
    while wanted:
        index = makers.get(wanted.pop())
        if index is not None and index not in found:
            found.add(index)
            wanted += kind.graph.ops[index].tensors
    return frozenset(found)


def _lower_part(
    task: _Task,
    name: str,
    role: BlockRole,
    ops: Collection[int],
    weights: frozenset[str],
    given: _Kept,
    later: Collection[int] = (),
    rows: Collection[int] = (),
) -> tuple[LoweredBackward, _Kept]:
    """A block of some of the backward's ops.

    Args:
        task: of which backward.
        name, role: of the block; all but the second part give the gradients of boundary inputs.
        ops: which, executed again or the first time.
        weights: the gradients of parameters that it gives.
        given: what a part before it kept.
        later, rows: ops of a part after it; inputs whose gradients are to lie row by row.
    Returns:
        It and what it keeps.
    """
    kind, context, forward = task.kind, task.context, task.forward
    inputs = role is not BlockRole.BACKWARD_WEIGHTS
    emitter = BlockEmitter(name, (context.num_microbatches, *context.mesh_shape), role, kind.name)
    gathered = early(kind, forward.strategies, sorted(ops), context)
    give_sources(emitter, kind, context, gathered)
    for value, (local, lies) in (forward.saved | given.values).items():
        if value in forward.offloads and value not in given.values:
            emitter.arrive(value, kind.graph.values[value], lies.layout, forward.offloads[value].back)
        else:
            emitter.give(local, kind.graph.values[value], lies.layout, lies.strides, known_as=value)
    for out, lies in zip(kind.outputs, forward.outputs, strict=True):
        if out not in forward.saved:
            emitter.give(out, kind.graph.values[out], lies.layout, lies.strides)
    for tangent, arrives in zip(kind.tangents, task.tangents, strict=True):
        if tangent is not None and arrives is not None:
            emitter.give(tangent, kind.graph.values[tangent], arrives.layout, arrives.strides)
    results = (*(kind.input_grads if inputs else ()), *(grad for grad in kind.param_grads if grad in weights))
    order = casts_first(kind, forward.strategies, _ordered(task, ops, results))
    graph, order = each_once(_dropping(kind.graph, forward.remat.rerun), forward.strategies, order)
    wanted = {name for index in later for name in kind.graph.ops[index].tensors}
    wanted |= {grad for grad in (*kind.input_grads, *kind.param_grads) if grad is not None}
    emit_ops(emitter, graph, forward.strategies, order, task.chunks, wanted, forward.remat.again)
    kept = _keep(emitter, task, ops, later, weights) if role is BlockRole.BACKWARD_INPUTS else _Kept({})
    layouts = _input_grad_layouts(kind, task, emitter)
    grads = tuple(
        None if grad is None or layout is None or not inputs else emitter.get(grad, layout)
        for grad, layout in zip(kind.input_grads, layouts, strict=True)
    )
    partial, param_grads = param_grads_of(emitter, kind, context, weights)
    saved = tuple(local for local, _ in kept.values.values())
    own = {local for local, _ in forward.saved.values()} if at_once(task.choice) else frozenset[str]()
    found = unshared(emitter, (*grads, *param_grads), saved, own | given.own, rows)
    grads = found[: len(grads)]
    lies_at = tuple(
        None if local is None or layout is None else Given(layout, emitter.values[local].strides)
        for local, layout in zip(grads, layouts, strict=True)
    )
    return LoweredBackward(emitter.finish(found, saved), lies_at, gathered, partial), kept


def _ordered(task: _Task, taken: Collection[int], results: Collection[str | None]) -> list[int]:
    """Ops of the backward in order, each after what it reads that is to be made again.

    What is executed again for nothing follows the first op that is executed again and that it depends on, as where a
    checkpointed region runs again whole once the backward gets to it.
    """
    ops = task.kind.graph.ops
    again = [index for index in task.forward.remat.again if index in taken]
    makers = {out: index for index in again for out in ops[index].outs if out is not None}
    rerun = {index: _made_of(ops, index, makers) for index in task.forward.remat.rerun if index in taken}
    found: dict[int, None] = {}

    def take(index: int) -> None:
        for name in ops[index].tensors:
            ensure(name)
        found[index] = None

    def ensure(name: str) -> None:
        maker = makers.get(name)
        if maker is None or maker in found:
            return
        for index in [index for index, needed in rerun.items() if maker in needed]:
            if rerun.pop(index, None) is not None:
                take(index)
        if maker not in found:
            take(maker)

    for index in ops_of(task.kind, Phase.BACKWARD):
        if index in taken:
            take(index)
    for grad in results:
        if grad is not None:
            ensure(grad)
    for index in [*again, *rerun]:  # what only a later part reads, or nothing depends on
        if index not in found:
            take(index)
    return list(found)


def _made_of(ops: Sequence[Op], index: int, makers: Mapping[str, int]) -> set[int]:
    """The ops among `makers` that an op depends on, however far."""
    found: set[int] = set()
    wanted = [*ops[index].tensors]
    while wanted:
        maker = makers.get(wanted.pop())
        if maker is not None and maker not in found:
            found.add(maker)
            wanted += ops[maker].tensors
    return found


def _dropping(graph: Graph, rerun: Collection[int]) -> Graph:
    """The graph in which ops that are executed again for nothing make values of their own."""
    ops, values = list(graph.ops), dict(graph.values)
    for index in rerun:
        outs = tuple(None if out is None else f"{out}~again" for out in ops[index].outs)
        values |= {new: values[old] for new, old in zip(outs, ops[index].outs, strict=True) if new and old}
        ops[index] = msgspec.structs.replace(ops[index], outs=outs)
    return msgspec.structs.replace(graph, ops=tuple(ops), values=values) if rerun else graph


def _keep(
    emitter: BlockEmitter, task: _Task, ops: Collection[int], later: Collection[int], given: frozenset[str]
) -> _Kept:
    """What these ops make, or had brought back from a tier, and later ones read (or hand on as a gradient, but for
    those given)."""
    kind = task.kind
    taken = set(ops).difference(task.forward.remat.rerun)
    made = {out for index in taken for out in kind.graph.ops[index].outs if out is not None}
    made |= {value for value, copy in task.forward.offloads.items() if copy.source.base in emitter.values}
    read = {name for index in later for name in kind.graph.ops[index].tensors}
    read |= {grad for grad in kind.param_grads if grad is not None and grad not in given}
    found = {}
    for value in kind.graph.values:
        if value in made and value in read:
            local = emitter.get(value, emitter.home(value))
            found[value] = (local, Given(emitter.home(value), emitter.values[local].strides))
    bases = Counter(emitter.values[local].base for local, _ in found.values())
    own = {base for base, count in bases.items() if count == 1 and base not in emitter.inputs}
    return _Kept(found, frozenset(local for local, _ in found.values() if emitter.values[local].base in own))


def _input_grad_layouts(kind: SegmentKind, task: _Task, backward: BlockEmitter) -> tuple[Layout | None, ...]:
    """As the plan says; of the tail, with the dim whole that microbatches cut."""
    found: list[Layout | None] = []
    rows = task.context.rows or (None,) * len(kind.inputs)
    for name, grad, text, row in zip(kind.inputs, kind.input_grads, task.choice.input_grads, rows, strict=True):
        if grad is None:
            found.append(None)
            continue
        if text is None:
            raise InvalidPlanError(f"kind {kind.name}: the gradient of input {name} has no layout in the plan")
        first = dual(task.micro.placements[name]) if backward.mesh_shape[0] > 1 else R
        found.append((first, *without(parse_layout(text), row)))
    return tuple(found)
