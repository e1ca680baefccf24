"""Weights cast to float8 once a step, and held until it ends (`Plan.hold_casts`).

As captured, a weight is cast where it is multiplied: in every microbatch's forward, and again in its backward, where it
lies the other way and is copied. Held, it is cast before the first forward that reads it, in the layout it is stored in
and to its transpose at once, and both stay until their last reader: two bytes an element save a cast and a copy for
every product of a step but one. Products read what they want to read, so none copies.

To lowering a held cast is a parameter of the segment, gathered in its blocks as any sharded one is; the ops that made
it are left in the graph, of `Phase.STEP`, so that numbers of ops stay those of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from paraplan.ir.execution.names import held
from paraplan.ir.execution.rank_program import Block, BlockRole
from paraplan.ir.machine.mesh import Layout, Partial, Placement, R, Shard, layout_text, parse_layout
from paraplan.ir.model.graph import Graph, Op, Phase
from paraplan.ir.model.program import ParamSpec, Program, SegmentKind
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.plan import KindChoice, ParamLayouts, Plan, Stage
from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.rewrites.float8_casts import CAST, SCALE
from paraplan.lowering.steps.step_writer import StepWriter
from paraplan.rules.strategies import Strategy

FORWARD, BACKWARD = "paraplan.float8_linear", "paraplan.float8_linear_grad_input"
ROWS, TURNED, SCALED = "^8", "^8t", "^8s"
SUFFIXES = (ROWS, TURNED, SCALED)
"""What the cast of a weight as it lies, its transpose and their scale are called after the weight."""

Dims = tuple[int, ...]


@dataclass(frozen=True)
class HeldCasts:
    """What is held.

    Attributes:
        plan: with casts as parameters.
        of: their names -> the parameter and the dtype it is cast to.
    """

    plan: Plan
    of: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def held_casts(plan: Plan) -> HeldCasts:
    """The plan as lowering takes it."""
    if not plan.hold_casts:
        return HeldCasts(plan)
    kinds = {index: _held_kind(kind) for index, kind in enumerate(plan.program.kinds) if _may_hold(plan, index)}
    of: dict[str, tuple[str, str]] = {}
    segments = []
    for segment in plan.program.segments:
        kind, found = kinds.get(segment.kind, (None, {}))
        names = dict(zip(plan.program.kinds[segment.kind].params, segment.params, strict=True))
        more = tuple(names[local] + suffix for local in found for suffix in SUFFIXES)
        of |= {names[local] + suffix: (names[local], found[local]) for local in found for suffix in SUFFIXES}
        segments.append(msgspec.structs.replace(segment, params=(*segment.params, *more)) if kind else segment)
    program = msgspec.structs.replace(
        plan.program,
        segments=tuple(segments),
        params=plan.program.params | _specs(plan.program, of),
        kinds=tuple(kinds[index][0] if index in kinds else kind for index, kind in enumerate(plan.program.kinds)),
    )
    stages = tuple(_with_casts(stage, program, of) for stage in plan.stages)
    return HeldCasts(msgspec.structs.replace(plan, program=program, stages=stages), of)


_KINDS: Lately[tuple[SegmentKind, dict[str, str]]] = SESSION.lately("held_casts.kinds", 64)


def _held_kind(kind: SegmentKind) -> tuple[SegmentKind, dict[str, str]]:
    """A kind with held casts for parameters, and of which (local names, dtypes) there are."""
    return _KINDS.get(Same(kind), lambda: _rewritten(kind))


def _may_hold(plan: Plan, index: int) -> bool:
    """Whether all parameters of a kind are on the device, and nothing of it runs in chunks."""
    away = {name for stage in plan.stages for name, layouts in stage.params.items() if layouts.stored_tier}
    read = {name for segment in plan.program.segments if segment.kind == index for name in segment.params}
    split = any(choice.split for stage in plan.stages for choice in stage.choices if choice.kind == index)
    return not split and away.isdisjoint(read)


def _rewritten(kind: SegmentKind) -> tuple[SegmentKind, dict[str, str]]:
    ops, values = list(kind.graph.ops), dict(kind.graph.values)
    found: dict[str, str] = {}
    dropped: set[int] = set()
    for local in kind.params:
        scales = [index for index, op in enumerate(ops) if op.target == SCALE and op.tensors == (local,)]
        casts = [index for index, op in enumerate(ops) if op.target == CAST and op.tensors[0] == local]
        made = {out for index in (*scales, *casts) for out in ops[index].outs if out is not None}
        readers = [index for index, op in enumerate(ops) if index not in casts and not made.isdisjoint(op.tensors)]
        if len(scales) != 1 or not casts or any(ops[index].target not in _READS for index in readers):
            continue
        dtype, (rows, columns) = str(ops[casts[0]].args[2]), values[local].shape
        found[local] = dtype
        dropped.update((*scales, *casts))
        values |= {
            local + ROWS: TensorSpec(dtype[1:], (rows, columns)),
            local + TURNED: TensorSpec(dtype[1:], (columns, rows)),
            local + SCALED: values[ops[scales[0]].outs[0] or ""],
        }
        for index in readers:
            ops[index] = _reading(ops[index], local)
    ops = [msgspec.structs.replace(op, phase=Phase.STEP) if index in dropped else op for index, op in enumerate(ops)]
    more = tuple(local + suffix for local in found for suffix in SUFFIXES)
    inputs = (*kind.graph.inputs, *more)
    graph = msgspec.structs.replace(kind.graph, inputs=inputs, ops=tuple(ops), values=values)
    grads = (*kind.param_grads, *(None for _ in more))
    return msgspec.structs.replace(kind, graph=graph, params=(*kind.params, *more), param_grads=grads), found


_READS = (FORWARD, BACKWARD)


def _reading(op: Op, local: str) -> Op:
    """A product that reads a held cast as it wants it to lie: [n, k] forward, [k, n] backward."""
    backward = op.target == BACKWARD
    name = local + (ROWS if bool(op.args[4]) == backward else TURNED)
    return msgspec.structs.replace(op, args=(op.args[0], "%" + name, op.args[2], f"%{local}{SCALED}", backward))


def _specs(program: Program, of: Mapping[str, tuple[str, str]]) -> dict[str, ParamSpec]:
    found = {}
    for name, (param, dtype) in of.items():
        rows, columns = program.params[param].spec.shape
        shape = {ROWS: (rows, columns), TURNED: (columns, rows), SCALED: ()}[name.removeprefix(param)]
        spec = TensorSpec("float32" if name.endswith(SCALED) else dtype[1:], shape)
        found[name] = ParamSpec(spec=spec, trainable=False)
    return found


def _with_casts(stage: Stage, program: Program, of: Mapping[str, tuple[str, str]]) -> Stage:
    """A stage that holds casts where it holds their weights; nothing of them is recomputed."""
    params = dict(stage.params)
    for name, (param, _) in of.items():
        if param in params:
            layout = parse_layout(params[param].stored)
            text = layout_text(_layout(name.removeprefix(param), layout))
            params[name] = ParamLayouts(stored=text, grad=text, state=text, ahead=True)
    choices = tuple(_without_casts(choice, program.kinds[choice.kind]) for choice in stage.choices)
    return msgspec.structs.replace(stage, params=params, choices=choices)


def _without_casts(choice: KindChoice, kind: SegmentKind) -> KindChoice:
    made = {out for op in kind.graph.ops if op.phase is Phase.STEP for out in op.outs}
    fates = {name: fate for name, fate in choice.activations.items() if name not in made}
    return choice if len(fates) == len(choice.activations) else msgspec.structs.replace(choice, activations=fates)


def _layout(suffix: str, layout: Layout) -> Layout:
    """How what is made of a weight lies where the weight lies so."""
    if suffix == SCALED:
        return (R,) * len(layout)
    return layout if suffix == ROWS else tuple(map(_turned, layout))


def _turned(place: Placement) -> Placement:
    return Shard(dim=1 - place.dim) if isinstance(place, Shard) else place


class CastSteps:
    """Writes the casts of weights.

    Args:
        rank, writer: whose steps are written.
    """

    def __init__(self, rank: RankGroup, writer: StepWriter) -> None:
        self._rank, self._writer = rank, writer
        self._cast: set[str] = set()

    def reach(self, index: int) -> None:
        """A segment is run next: the weights that it is the first to read are cast."""
        rank = self._rank
        for name in rank.program.segments[index].params:
            weight, dtype = rank.lowered.casts.get(name, ("", ""))
            if not weight or not name.endswith(ROWS) or weight in self._cast:
                continue
            self._cast.add(weight)
            spec, stored = rank.program.params[weight].spec, parse_layout(rank.holding.params[weight].stored)
            block = self._writer.cache.get("held.", _cast_block, spec, stored, dtype, rank.extended)
            self._writer.call(block, (rank.stored(weight),), tuple(held(f"{weight}{suffix}") for suffix in SUFFIXES))


def cast_graph(spec: TensorSpec, dtype: str) -> Graph:
    """A weight's scale, its cast and its transpose's: values `w`, `scale`, `rows`, `turned`; `dtype` as an argument."""
    rows, columns = spec.shape
    values = {
        "w": spec,
        "scale": TensorSpec("float32", ()),
        "rows": TensorSpec(dtype[1:], (rows, columns)),
        "turned": TensorSpec(dtype[1:], (columns, rows)),
    }
    scale = Op(target=SCALE, args=("%w", dtype), outs=("scale",))
    cast = Op(target=f"{CAST}_both", args=("%w", "%scale", dtype), outs=("rows", "turned"))
    return Graph(inputs=("w",), outputs=("rows", "turned", "scale"), values=values, ops=(scale, cast))


def _cast_block(name: str, spec: TensorSpec, stored: Layout, dtype: str, extended: Dims) -> Block:
    """A weight's shard scaled by the whole weight's maximum, cast, and cast to its transpose."""
    emitter, graph = BlockEmitter(name, extended, BlockRole.HOLD_CAST), cast_graph(spec, dtype)
    lies, turned, whole = (R, *stored), (R, *_layout(TURNED, stored)), (R,) * len(extended)
    emitter.give("w", spec, lies, zeros=True)
    partial = tuple(Partial(op="max") if isinstance(place, Shard) else R for place in lies)
    emitter.op(graph.ops[0], graph, Strategy("", (lies,), (partial,), (whole,)), -1)
    emitter.op(graph.ops[1], graph, Strategy("", (lies, whole), (lies, turned), (lies, turned)), -1)
    results = (emitter.get("rows", lies), emitter.get("turned", turned), emitter.get("scale", whole))
    return emitter.finish(results, ())
