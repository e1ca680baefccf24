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

from paraplan.ir.machine.mesh import Layout, Placement, R, Shard, layout_text, parse_layout
from paraplan.ir.model.graph import Graph, Op, Phase, arg_text
from paraplan.ir.model.program import ParamSpec, Program, SegmentKind
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.ir.plan import KindChoice, Plan, Stage
from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.lowering.rewrites.float8_casts import CAST, SCALE

FORWARD, BACKWARD = "paraplan.float8_linear", "paraplan.float8_linear_grad_input"
ROWS, TURNED, SCALED = "^8", "^8t", "^8s"
SUFFIXES = (ROWS, TURNED, SCALED)
"""What the cast of a weight as it lies, its transpose and their scale are called after the weight."""

Dims = tuple[int, ...]


@dataclass(frozen=True)
class HeldCast:
    """What is made of a weight and held.

    Attributes:
        weight: the parameter.
        dtype: that it is cast to, as an argument.
        form: the cast as the weight lies, its transpose, or their scale.
    """

    weight: str
    dtype: str
    form: str

    @property
    def name(self) -> str:
        """The parameter that lowering takes it for."""
        return self.weight + self.form


@dataclass(frozen=True)
class HeldCasts:
    """What is held.

    Attributes:
        plan: with casts as parameters.
        of: each by its name.
    """

    plan: Plan
    of: Mapping[str, HeldCast] = field(default_factory=dict)


def held_casts(plan: Plan) -> HeldCasts:
    """The plan as lowering takes it."""
    if not plan.hold_casts:
        return HeldCasts(plan)
    kinds = {index: _held_kind(kind) for index, kind in enumerate(plan.program.kinds) if _may_hold(plan, index)}
    of: dict[str, HeldCast] = {}
    segments = []
    for segment in plan.program.segments:
        kind, found = kinds.get(segment.kind, (None, {}))
        names = dict(zip(plan.program.kinds[segment.kind].params, segment.params, strict=True))
        casts = [HeldCast(names[local], found[local], form) for local in found for form in SUFFIXES]
        more = tuple(cast.name for cast in casts)
        of |= {cast.name: cast for cast in casts}
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


def _specs(program: Program, of: Mapping[str, HeldCast]) -> dict[str, ParamSpec]:
    found = {}
    for name, cast in of.items():
        rows, columns = program.params[cast.weight].spec.shape
        shape = {ROWS: (rows, columns), TURNED: (columns, rows), SCALED: ()}[cast.form]
        spec = TensorSpec("float32" if cast.form == SCALED else arg_text(cast.dtype), shape)
        found[name] = ParamSpec(spec=spec, trainable=False)
    return found


def _with_casts(stage: Stage, program: Program, of: Mapping[str, HeldCast]) -> Stage:
    """A stage that holds casts where it holds their weights; nothing of them is recomputed."""
    params = dict(stage.params)
    for name, cast in of.items():
        if cast.weight in params:
            layout = parse_layout(params[cast.weight].stored)
            text = layout_text(form_layout(cast.form, layout))
            params[name] = ParamLayouts(stored=text, grad=text, state=text, ahead=True)
    choices = tuple(_without_casts(choice, program.kinds[choice.kind]) for choice in stage.choices)
    return msgspec.structs.replace(stage, params=params, choices=choices)


def _without_casts(choice: KindChoice, kind: SegmentKind) -> KindChoice:
    made = {out for op in kind.graph.ops if op.phase is Phase.STEP for out in op.outs}
    fates = {name: fate for name, fate in choice.activations.items() if name not in made}
    return choice if len(fates) == len(choice.activations) else msgspec.structs.replace(choice, activations=fates)


def form_layout(form: str, layout: Layout) -> Layout:
    """The layout of a form of a weight's cast where the weight's is `layout`."""
    if form == SCALED:
        return (R,) * len(layout)
    return layout if form == ROWS else tuple(map(_turned, layout))


def _turned(place: Placement) -> Placement:
    return Shard(dim=1 - place.dim) if isinstance(place, Shard) else place


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
