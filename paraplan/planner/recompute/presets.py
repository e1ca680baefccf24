"""Recomputation as systems mean it: by layer, after what they keep.

A named strategy says of a layer (`ir.model.layers`) which values are made again and which ops are executed again though
nothing needs it. Layers are then one segment each (`in_layers`), so that what is kept is kept of a layer, not of the
segments it was cut into; what is in no layer (embeddings, the loss) is kept. Of a model without layers every segment
counts as one.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

import msgspec

from paraplan.cost_models.ops.product_shapes import PRODUCTS
from paraplan.cost_models.ops.roofline import is_free, op_name
from paraplan.ir.model.graph import Phase, users
from paraplan.ir.model.joined_segments import join
from paraplan.ir.model.layers import layers_of
from paraplan.ir.model.program import Program, SegmentKind
from paraplan.lowering.blocks.remat import RECOMPUTE, RERUN, recomputable
from paraplan.lowering.rewrites.float8_casts import SCALE
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints

Fates = dict[str, str]
"""As `KindChoice.activations`."""

_LINEARS = ("paraplan.linear", "paraplan.float8_linear")
_CORES = frozenset(
    {"aten.bmm", "aten.baddbmm", "aten.mm", "aten.einsum", "paraplan.batched_product", "paraplan.attention"}
)
"""Products of what may be no parameter, and attention as one op."""


def _full(kind: SegmentKind) -> Fates:
    """All of it, to the end; not what makes outputs alone that have no gradient, as new values of buffers."""
    fates: Fates = {}
    flat = {out for out, tangent in zip(kind.outputs, kind.tangents, strict=True) if tangent is None}
    for op in kind.graph.ops:
        if op.phase is not Phase.FORWARD or op.target == SCALE or flat.issuperset(filter(None, op.outs)):
            continue
        ends = [out for out in op.outs if out in kind.outputs]
        fates |= dict.fromkeys(ends, RERUN) if ends else dict.fromkeys((out for out in op.outs if out), RECOMPUTE)
    return fates


def _full_early_stop(kind: SegmentKind) -> Fates:
    """All of it that the backward needs."""
    return dict.fromkeys(recomputable(kind), RECOMPUTE)


def _selective(kind: SegmentKind) -> Fates:
    """Attention from its heads' queries, keys and values on, with biases and masks that are made for it alone."""
    inside = set(_attention_core(kind))
    inside.update(_without_gradient(kind, inside))
    ops, readers = kind.graph.ops, users(kind.graph)
    ends = {
        out
        for index in inside
        for out in ops[index].outs
        if out and inside.isdisjoint(readers[out]) and any(ops[r].phase is Phase.FORWARD for r in readers[out])
    }
    able = recomputable(kind)
    made = [name for name in able if any(name in ops[index].outs for index in inside)]
    return dict.fromkeys(made, RECOMPUTE) | dict.fromkeys(sorted(ends), RERUN)


def _attention_core(kind: SegmentKind) -> list[int]:
    """Attention, or the products of what is no parameter and the ops that lie between two of them."""
    ops = kind.graph.ops
    fixed = set(kind.params)
    products, after = set[int](), dict[str, bool]()
    for index, op in enumerate(ops):
        if op.phase is not Phase.FORWARD or op.target in _LINEARS:
            continue
        if op.tensors and fixed.issuperset(op.tensors):
            fixed.update(out for out in op.outs if out)
        elif op_name(op.target) in _CORES and not fixed.intersection(op.tensors):
            products.add(index)
        follows = index in products or any(after.get(name) for name in op.tensors)
        after |= dict.fromkeys((out for out in op.outs if out), follows)
    before = set[str]()
    found = set(products)
    for index in sorted(range(len(ops)), reverse=True):
        op = ops[index]
        if op.phase is not Phase.FORWARD or op.target in _LINEARS:
            continue
        leads = any(out in before for out in op.outs)
        if leads and any(after.get(name) for name in op.tensors):
            found.add(index)
        if leads or index in products:
            before.update(op.tensors)
    return sorted(found)


def _without_gradient(kind: SegmentKind, core: Set[int]) -> set[int]:
    """Ops that lead to a core from parameters, buffers and other inputs without gradient: its biases and masks."""
    ops = kind.graph.ops
    given = {name for name, grad in zip(kind.inputs, kind.input_grads, strict=True) if grad is None}
    given.update(kind.params)
    free = set[int]()
    for index, op in enumerate(ops):
        if op.phase is Phase.FORWARD and index not in core and given.issuperset(op.tensors):
            free.add(index)
            given.update(out for out in op.outs if out)
    wanted = {name for index in core for name in ops[index].tensors}
    found = set[int]()
    for index in sorted(free, reverse=True):
        if not wanted.isdisjoint(filter(None, ops[index].outs)) and ops[index].target not in _LINEARS:
            found.add(index)
            wanted.update(ops[index].tensors)
    return found


def _dear(kind: SegmentKind) -> set[str]:
    ops = kind.graph.ops
    return {out for op in ops for out in op.outs if out and op_name(op.target) in PRODUCTS}


def _seen(kind: SegmentKind, kept: set[str]) -> set[str]:
    """Values, and views of them: what is kept is the last view of a value, which over several ranks is what its sums
    were brought to."""
    found = set(kept)
    for op in kind.graph.ops:
        if is_free(op.target) and op.tensors and found.issuperset(op.tensors):
            found.update(out for out in op.outs if out)
    return found


def _cheap(kind: SegmentKind) -> Fates:
    """All but results of products, convolutions and attention."""
    dear = _seen(kind, _dear(kind))
    return {name: RECOMPUTE for name in recomputable(kind) if name not in dear}


def _alternate(kind: SegmentKind) -> Fates:
    """As `cheap`, and every second product with a weight."""
    ops = kind.graph.ops
    products = [op.outs[0] for op in ops if op.target in _LINEARS and op.phase is Phase.FORWARD]
    dear = _seen(kind, _dear(kind).difference(products[1::2]))
    return {name: RECOMPUTE for name in recomputable(kind) if name not in dear}


STRATEGIES: dict[str, Callable[[SegmentKind], Fates]] = {
    "none": lambda kind: {},
    "selective": _selective,
    "cheap": _cheap,
    "alternate": _alternate,
    "full": _full,
    "full-early-stop": _full_early_stop,
}
"""By `options.values.PRESETS`."""


def preset_fates(program: Program, name: str) -> tuple[Fates, ...]:
    """Per kind, what a named strategy does with its values."""
    layers = {program.segments[index].kind for run in layers_of(program) for index in run}
    chosen = layers or range(len(program.kinds))
    return tuple(STRATEGIES[name](kind) if at in chosen else {} for at, kind in enumerate(program.kinds))


def preset_activations(program: Program, name: str) -> tuple[Fates, ...]:
    """Per segment, what a named strategy does with its values: `Decisions.activations`."""
    fates = preset_fates(program, name)
    return tuple(fates[segment.kind] for segment in program.segments)


def in_layers(job: Job, constraints: Constraints) -> tuple[Job, Constraints]:
    """The job with every layer as one segment, and pinned stages in its terms, where recomputation goes by layer."""
    if constraints.recompute in (None, "none"):
        return job, constraints
    program, stages = layered(job.program, constraints.stages)
    return replace(job, program=program), msgspec.structs.replace(constraints, stages=stages)


Stages = tuple[tuple[int, int], ...] | None


def layered(program: Program, stages: Stages = None) -> tuple[Program, Stages]:
    """The program with every layer as one segment, within pinned stages; and these, in its segments."""
    bounds = [bound for stage in stages or () for bound in stage]
    if any(not 0 <= bound <= len(program.segments) for bound in bounds):
        return program, stages  # who uses them says what is wrong
    joined, place = join(program, layers_of(program, bounds))
    if len(joined.segments) == len(program.segments):
        return program, stages
    place = (*place, len(joined.segments))
    return joined, None if stages is None else tuple((place[first], place[stop]) for first, stop in stages)
