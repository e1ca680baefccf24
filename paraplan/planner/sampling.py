"""Random legal plans: every op, parameter and gradient takes any layout the rules allow.

They are rarely good; they exist to hold rules, lowering, simulator and runtime against each other. In half of them some
activations are recomputed, in half of them some wait on the host or on disk, where the
cluster has room there; in half of them some segments run in chunks. What a plan says of its step as a whole (bundles,
reductions under way, late updates) is drawn as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from paraplan.ir.machine.mesh import (
    Layout,
    P,
    Placement,
    R,
    S,
    is_shardable,
    layout_text,
    local_shape,
    make_mesh,
    parse_layout,
)
from paraplan.ir.machine.reshard import only_gathers
from paraplan.ir.machine.tier_placement import HERE, PLACEMENTS
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.graph import Phase
from paraplan.ir.model.program import Program, trained_params
from paraplan.ir.model.strides import contiguous_strides, is_dense
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.ir.plan import KindChoice, Plan, Split
from paraplan.lowering.blocks.forward import Given, chosen_strategies
from paraplan.lowering.blocks.remat import RECOMPUTE, boundary_values, recomputable
from paraplan.lowering.rewrites.chunks import chunkable_dims, gradients_known
from paraplan.lowering.stage_blocks import PlanBlocks
from paraplan.planner.assemble import Decisions, Job, assemble
from paraplan.planner.decision_classes import grad_classes, param_classes
from paraplan.planner.passes.delayed_updates import is_any_late
from paraplan.rules.graph_strategies import GraphKey, graph_strategies
from paraplan.rules.time_axis import ProgramMicro, program_micro, splittable

Pick = Callable[[Sequence[str]], str]


def random_plan(
    job: Job, seed: int, max_microbatches: int = 2, states_leave: bool = False, pick: Pick | None = None
) -> Plan:
    """A legal plan drawn at random on the whole cluster.

    Args:
        job: what to plan for.
        seed: equal seeds give equal plans.
        max_microbatches: microbatches are drawn up to this.
        states_leave: in two thirds of the plans, optimizer states and stored parameters live on the host or on disk,
            wherever they may, come to their update in runs of a size that is drawn, some before the last backward, and
            where the host updates them it may do so late: the one thing here that changes numbers. What segments hand
            on may wait on a tier as well, which only one stage can do.
        pick: takes each op's strategy out of the keys of those that are legal; None draws it.
    """
    rng = random.Random(seed)
    program, n = job.program, job.cluster.num_devices
    shape = rng.choice(_mesh_shapes(n))
    counts = [m for m in range(1, max(max_microbatches, program.apart) + 1) if splittable(program, m)]
    count = rng.choice(counts)
    mesh = make_mesh(shape, tuple(f"axis{i}" for i in range(len(shape))))
    micro, m = program_micro(program, count), program.shares(count)
    along = {segment.kind: found.choices for segment, found in zip(program.segments, micro.segments, strict=True)}
    ops = []
    calm = rng.random()
    for index, kind in enumerate(program.kinds):
        legal = graph_strategies(GraphKey(kind.graph, shape, along[index], m))
        keys = [[option.key for option in options] for options in legal]
        ops.append(tuple(_draw(rng, each, calm) if pick is None else pick(each) for each in keys))
    batch = {}
    for name, entry in program.batch.items():
        first = micro.values[f"batch:{name}"]
        batch[name] = layout_text(_random_layout(rng, entry.spec.shape, shape, first, m, partial=False))
    decisions = Decisions(
        mesh=mesh,
        num_microbatches=count,
        ops=tuple(ops),
        input_grads=_input_grads(rng, program, shape, m, micro.values),
        params=_params(rng, program, shape),
        batch=batch,
    )
    share = rng.choice((0.0, 0.0, 0.3, 1.0))
    fates = [
        [{name: RECOMPUTE for name in recomputable(kind) if rng.random() < share} for _ in range(2)]
        for kind in program.kinds
    ]
    tiers = [tier for tier in TIERS if job.cluster.has_room(tier, mesh.devices)]
    away = rng.choice((0.0, 0.0, 0.3, 1.0)) if tiers else 0.0
    for kind, drawn in zip(program.kinds, fates, strict=True):
        for fate in drawn:
            fate |= {n: rng.choice(tiers) for n in recomputable(kind) if n not in fate and rng.random() < away}
    activations = tuple(rng.choice(fates[segment.kind]) for segment in program.segments)
    decisions = replace(decisions, activations=activations)
    plan = assemble(job, replace(decisions, splits=_splits(rng, program, decisions, micro)))
    if states_leave and away:
        plan = _with_boundaries_away(plan, random.Random(f"boundaries {seed}"), tiers, away)
    if states_leave:
        plan = _with_states_away(plan, random.Random(f"states {seed}"))
    return _timed(plan, random.Random(f"timing {seed}"))


def _coin(rng: random.Random) -> bool:
    return rng.random() < 0.5


DRAWN: dict[str, Callable[[random.Random], Any]] = {
    "reducing_bytes": lambda rng: rng.choice((0, 4096, 1 << 30)),
    "states_ahead": _coin,
    "delayed_update": lambda rng: rng.choice((None, 0, 1)),
    "reduce_every": lambda rng: rng.choice((1, 1, 2, 3)),
    "params_ahead": _coin,
}
"""How options of a step are drawn, in order: a new one comes last, so that plans of a seed stay as they were."""
DRAWN_ELSEWHERE = frozenset({"bundle_bytes"})
NOT_DRAWN = frozenset({"hold_casts", "parted_messages"})
"""Passes look at a plan before they set these."""


def _timed(plan: Plan, rng: random.Random) -> Plan:
    """The plan with what it says of the whole step drawn at random."""
    plan = msgspec.structs.replace(plan, **{name: draw(rng) for name, draw in DRAWN.items()})
    staged = any(layouts.staged for stage in plan.stages for layouts in stage.params.values())
    late = plan.delayed_update if is_any_late(plan) else None
    return msgspec.structs.replace(plan, delayed_update=late, states_ahead=staged and plan.states_ahead)


def _with_boundaries_away(plan: Plan, rng: random.Random, tiers: Sequence[str], share: float) -> Plan:
    """The plan with some of the values that segments hand on, and that lie dense, on a tier for the backward."""
    (stage,), program = plan.stages, plan.program
    extended, (part,) = (plan.num_shares, *stage.mesh.shape), PlanBlocks(plan).routes[0].parts
    choices: list[KindChoice] = []
    for index, chosen in enumerate(stage.segment_choice):
        kind, outputs = program.kinds[program.segments[index].kind], part.forwards[index].outputs
        lies = dict(zip(kind.outputs, outputs, strict=True))
        found = {
            name: rng.choice(tiers)
            for name in boundary_values(kind)
            if rng.random() < share and _is_dense(lies[name], kind.graph.values[name].shape, extended)
        }
        choice = stage.choices[chosen]
        choices.append(msgspec.structs.replace(choice, activations={**choice.activations, **found}))
    distinct = [each for index, each in enumerate(choices) if each not in choices[:index]]
    where = tuple(distinct.index(each) for each in choices)
    stage = msgspec.structs.replace(stage, choices=tuple(distinct), segment_choice=where)
    return msgspec.structs.replace(plan, stages=(stage,))


def _is_dense(lies: Given, shape: tuple[int, ...], extended: tuple[int, ...]) -> bool:
    local = local_shape(shape, lies.layout, extended)
    return is_dense(local, lies.strides or contiguous_strides(local))


def _with_states_away(plan: Plan, rng: random.Random) -> Plan:
    """The plan with states and parameters in places drawn at random."""
    share, (stage,) = rng.choice((0.0, 0.4, 1.0)), plan.stages
    devices = stage.mesh.devices
    there = [place for place in PLACEMENTS.values() if not place.states or plan.cluster.has_room(place.states, devices)]
    trained = set(trained_params(plan.program))
    params = dict(stage.params)
    for name, layouts in stage.params.items():
        legal = [place for place in there if layouts.stored == layouts.state or not place.params]
        if name not in trained:
            legal = list(dict.fromkeys(place.frozen for place in there))
        place = rng.choice(legal) if rng.random() < share else HERE
        params[name] = layouts.placed(place, layouts.ahead and not place.states)
    stages = (msgspec.structs.replace(stage, params=params),)
    return msgspec.structs.replace(plan, stages=stages, bundle_bytes=rng.choice((0, 4096, plan.bundle_bytes)))


def _splits(
    rng: random.Random, program: Program, decisions: Decisions, micro: ProgramMicro
) -> tuple[Split | None, ...]:
    """Of some kinds, a run of ops in chunks: any op, any dim of it."""
    if rng.random() < 0.5:
        return ()
    shape, m = decisions.mesh.shape, program.shares(decisions.num_microbatches)
    found: list[Split | None] = []
    for index, kind in enumerate(program.kinds):
        first = next(i for i, segment in enumerate(program.segments) if segment.kind == index)
        choice = KindChoice(kind=index, ops=decisions.ops[index], input_grads=decisions.input_grads[index])
        strategies = chosen_strategies(kind, choice, micro.segments[first], shape, m)
        op, chunks = rng.randrange(len(kind.graph.ops)), rng.choice((2, 2, 4))
        forward = kind.graph.ops[op].phase is Phase.FORWARD and rng.random() < 0.7
        dims = chunkable_dims(kind, op, chunks, strategies, (m, *shape)) if forward else ()
        known = all(gradients_known(program, i) for i, segment in enumerate(program.segments) if segment.kind == index)
        at_once = known and rng.random() < 0.5
        found.append(Split(op=op, dim=rng.choice(dims), chunks=chunks, at_once=at_once) if dims else None)
    return tuple(found[segment.kind] for segment in program.segments)


def _draw(rng: random.Random, keys: list[str], calm: float) -> str:
    """Any strategy; calmer plans shun the odd ones (partial inputs) so that they resemble real plans."""
    tame = [key for key in keys if "+" not in key]
    return rng.choice(tame if tame and rng.random() < calm else keys)


def _mesh_shapes(n: int) -> list[tuple[int, ...]]:
    return [(n,)] + [(a, n // a) for a in range(2, n) if n % a == 0]


def _random_layout(
    rng: random.Random, shape: tuple[int, ...], mesh_shape: tuple[int, ...], first: Placement, m: int, partial: bool
) -> Layout:
    options: list[Placement] = [R, *(S(dim) for dim in range(len(shape)))] + ([P] if partial else [])
    while True:
        layout = tuple(rng.choice(options) for _ in mesh_shape)
        if is_shardable(shape, (first, *layout), (m, *mesh_shape), frozen=1):
            return layout


def _params(rng: random.Random, program: Program, shape: tuple[int, ...]) -> tuple[ParamLayouts, ...]:
    found = []
    for cls in param_classes(program):
        stored, state = (layout_text(_random_layout(rng, cls.spec.shape, shape, R, 1, partial=False)) for _ in range(2))
        grad = layout_text(_random_layout(rng, cls.spec.shape, shape, R, 1, partial=True))
        able = cls.trained and only_gathers(cls.spec.shape, parse_layout(state), parse_layout(stored), shape)
        ahead = able and random.Random(f"{cls.params[0]} {grad}").random() < 0.5
        found.append(ParamLayouts(stored=stored, grad=grad, state=state, ahead=ahead))
    return tuple(found)


def _input_grads(
    rng: random.Random, program: Program, shape: tuple[int, ...], m: int, places: dict[str, Placement]
) -> tuple[tuple[str | None, ...], ...]:
    found: list[list[str | None]] = [[None] * len(kind.inputs) for kind in program.kinds]
    outer = {(s.kind, i): name for s in program.segments for i, name in enumerate(s.inputs)}
    for cls in grad_classes(program):
        first = places[outer[cls.readers[0]]]
        layout = layout_text(
            _random_layout(
                rng, cls.spec.shape, shape, first if isinstance(first, S(0).__class__) else R, m, partial=True
            )
        )
        for kind, index in cls.readers:
            found[kind][index] = layout
    return tuple(map(tuple, found))
