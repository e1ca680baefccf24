"""Tensor parallelism's collectives run beside its products: which ops of a plan go in pieces, and whether that pays.

A product whose rows are gathered for it, and a forward one whose sums are scattered over rows, become strategies in
pieces (`rules.expansions.overlap`). Products that read the same rows each gather them then, which pays where links have
nothing else to do. Backward, an input's gradient is left whole where it is scattered: the product for the weight's
gradient, which needs nothing of it, already runs beside that collective.

Which products go in pieces is chosen on a step of few microbatches and alike layers, group by group of those that read
the same rows (`best_pieces`); the plan is lowered and simulated again so, and kept where it is faster and fits. Plans
of several stages are begun so (`pipeline.prices.in_pieces`).

Limits: all segments of a choice go in as many pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import msgspec

from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.machine.mesh import Layout, R, Shard, parse_layout
from paraplan.ir.model.graph import Graph, Op, Phase
from paraplan.ir.plan import KindChoice, Plan, Stage
from paraplan.lowering.blocks.forward import chosen_strategies
from paraplan.planner.passes.pass_context import PassContext
from paraplan.planner.pipeline.prices.shorten import runs_of, shortened
from paraplan.planner.pipeline.prices.stage_timing import microbatch_s
from paraplan.planner.schedules.full_rounds import as_a_whole
from paraplan.rules.choices import axis_part, axis_texts
from paraplan.rules.expansions.overlap import GATHER, PRODUCTS, SCATTER, Pieces
from paraplan.rules.strategies import Strategy, dims_of, is_expanded, strategy_named
from paraplan.rules.time_axis import KindMicro, program_micro

Product = tuple[int, int]
"""Of a stage, the number of a choice and of an op of it."""
WORTH, GAIN, GROUPS = 0.01, 0.005, 8
"""The share of a step that communication is waited for, from which on pieces are tried; of a microbatch, what they have
to gain; groups of products that are told apart."""


def overlapped(made: Realised, context: PassContext) -> Realised:
    """The plan of one stage with products in the pieces that make it fastest, as many as may be."""
    simulation = made.simulation
    if len(made.plan.stages) > 1 or simulation.exposed_comm_s < WORTH * simulation.step_s:
        return made
    plan = best_pieces(made.plan, context.constraints.most_pieces)
    tried = made if plan is made.plan else as_a_whole(plan)
    return tried if tried.simulation.step_s < simulation.step_s and context.fits(tried, made) else made


def best_pieces(plan: Plan, most: int) -> Plan:
    """The plan with the products in pieces with which a microbatch is fastest; the plan itself where none is faster.

    Args:
        plan: of one stage, lowered and simulated with few of its microbatches and alike layers.
        most: pieces a product may be in.
    """
    counts, short = list(piece_counts(most)), shortened(plan, runs_of(plan))
    groups = _groups(short.plan, counts[0]) if counts else []
    best: dict[Product, int] = {}
    least_s = whole_s = microbatch_s(short) if groups else 0.0
    for group in groups:
        for tried in [best | dict.fromkeys(group, count) for count in counts]:
            tried_s = microbatch_s(replace(short, plan=in_pieces(short.plan, tried)))
            if tried_s < least_s:
                best, least_s = tried, tried_s
    return in_pieces(plan, best) if least_s < (1 - GAIN) * whole_s else plan


def _groups(plan: Plan, count: int) -> list[frozenset[Product]]:
    """Products that can go in so many pieces, those together that read the same rows in a phase; those that move most
    first, and all that move little at last."""
    (stage,), (pieced,) = plan.stages, in_pieces(plan, count).stages
    often = Counter(stage.segment_choice)
    found: dict[tuple[object, ...], list[Product]] = {}
    nbytes: dict[tuple[object, ...], int] = {}
    for number, (was, now) in enumerate(zip(stage.choices, pieced.choices, strict=True)):
        graph = plan.program.kinds[was.kind].graph
        for at, (before, after) in enumerate(zip(was.ops, now.ops, strict=True)):
            if before != after:
                op = graph.ops[at]
                rows = op.outs[0] if SCATTER in after else op.tensors[0]
                assert rows is not None
                key = number, op.phase, rows
                found.setdefault(key, []).append((number, at))
                nbytes[key] = often[number] * graph.values[rows].nbytes
    each = [frozenset(found[key]) for key in sorted(found, key=lambda key: -nbytes[key])]
    return each if len(each) <= GROUPS else [*each[: GROUPS - 1], frozenset().union(*each[GROUPS - 1 :])]


def in_pieces(plan: Plan, count: int | Mapping[Product, int]) -> Plan:
    """The plan with products in so many pieces, where they can; the plan itself where none can.

    Args:
        plan: any.
        count: of pieces, of all products or of some.
    """
    micro = program_micro(plan.program, plan.num_microbatches)
    stages = []
    boundary = boundary_layouts(plan, micro.segments)
    for stage in plan.stages:
        first = {choice: stage.first + at for at, choice in reversed([*enumerate(stage.segment_choice)])}
        choices = tuple(
            _pieced(plan, stage, choice, first[index], boundary, micro.segments, _counts(count, index))
            for index, choice in enumerate(stage.choices)
        )
        stages.append(msgspec.structs.replace(stage, choices=choices))
    return plan if tuple(stages) == plan.stages else msgspec.structs.replace(plan, stages=tuple(stages))


def _counts(count: int | Mapping[Product, int], choice: int) -> Callable[[int], int]:
    """In how many pieces an op of a choice is to go; 1: in none."""
    return lambda op: count if isinstance(count, int) else count.get((choice, op), 1)


def piece_counts(most: int) -> Iterator[int]:
    """2, 4, 8 ... up to the most."""
    count = 2
    while count <= most:
        yield count
        count *= 2


def _pieced(
    plan: Plan,
    stage: Stage,
    choice: KindChoice,
    segment: int,
    boundary: dict[str, Layout],
    micros: tuple[KindMicro, ...],
    count: Callable[[int], int],
) -> KindChoice:
    """The choice with its products in pieces, of every op as many as are asked for."""
    program, micro = plan.program, micros[segment]
    kind, of = program.kinds[choice.kind], program.segments[segment]
    graph, m = kind.graph, plan.num_shares
    strategies = chosen_strategies(kind, choice, micro, stage.mesh.shape, m)
    home = {name: boundary[outer] for name, outer in zip(kind.inputs, of.inputs, strict=True) if outer in boundary}
    home |= {
        name: boundary["d:" + outer]
        for name, outer in zip(kind.tangents, of.outputs, strict=True)
        if name is not None and "d:" + outer in boundary
    }
    for op, strategy in zip(graph.ops, strategies, strict=True):
        home |= {
            out: layout for out, layout in zip(op.outs, strategy.outputs, strict=True) if out is not None and layout
        }
    keys = list(choice.ops)
    for index, (op, strategy) in enumerate(zip(graph.ops, strategies, strict=True)):
        if op.target in PRODUCTS and strategy.ring_axis < 0 and count(index) > 1:
            wanted = [
                layout
                for reader, how in zip(graph.ops, strategies, strict=True)
                for name, layout in zip(reader.tensors, how.inputs, strict=True)
                if name == op.outs[0] and reader.phase is op.phase
            ]
            for key in _keys(op, graph, strategy, home.get(op.tensors[0]), wanted, count(index)):
                if strategy_named(op, graph.values, stage.mesh.shape, key, micro.choices[index], m) is not None:
                    keys[index] = key
                    break
    return msgspec.structs.replace(choice, ops=tuple(keys))


def _keys(
    op: Op, graph: Graph, strategy: Strategy, home: Layout | None, read: list[Layout], count: int
) -> Iterator[str]:
    """Keys of the op in pieces, along the axes where a collective of rows feeds or follows it.

    Args:
        op, graph, strategy: the op and what it does.
        home: how its rows lie.
        read: how its result is wanted.
        count: of pieces.
    """
    rows = dims_of(op, graph.values).inputs[0][:-1]
    columns, contracted = PRODUCTS[op.target]
    parts = axis_texts(strategy.key)
    for axis, part in enumerate(parts):
        wanted, found = strategy.inputs[0], home
        made, final = strategy.computed[0], strategy.outputs[0]
        assert made is not None and final is not None
        pieces = None
        if part == columns and found is not None and wanted[axis + 1] == R:
            pieces = _over_rows(GATHER, rows, found[axis + 1], found, wanted, axis + 1, count)
        elif axis_part(part).does == contracted and op.phase is Phase.FORWARD:
            scattered = read[0] if part == contracted and read and set(read) == {read[0]} else final
            pieces = _over_rows(SCATTER, rows, scattered[axis + 1], scattered, made, axis + 1, count)
        if pieces is not None and not any(map(is_expanded, parts)):
            yield "|".join((*parts[:axis], pieces.key, *parts[axis + 1 :]))


def _over_rows(
    collective: str, rows: tuple[str, ...], place: object, split: Layout, whole: Layout, axis: int, count: int
) -> Pieces | None:
    """Pieces where two layouts differ in a shard of rows along one axis alone."""
    alike = split[:axis] == whole[:axis] and split[axis + 1 :] == whole[axis + 1 :]
    if not alike or not isinstance(place, Shard) or place.dim >= len(rows):
        return None
    return Pieces(collective, rows[place.dim], count)


def boundary_layouts(plan: Plan, micros: tuple[KindMicro, ...]) -> dict[str, Layout]:
    """Layouts, on the extended mesh, that values between segments are made in; of their gradients as "d:" and name."""
    program, found = plan.program, dict[str, Layout]()
    for stage in plan.stages:
        known: dict[tuple[int, int], tuple[Strategy, ...]] = {}
        for at in range(stage.stop - stage.first):
            segment = program.segments[stage.first + at]
            choice, kind = stage.choices[stage.segment_choice[at]], program.kinds[segment.kind]
            micro = micros[stage.first + at]
            key = (stage.segment_choice[at], id(micro))
            if key not in known:
                known[key] = chosen_strategies(kind, choice, micro, stage.mesh.shape, plan.num_shares)
            made = {
                out: layout
                for op, strategy in zip(kind.graph.ops, known[key], strict=True)
                for out, layout in zip(op.outs, strategy.outputs, strict=True)
                if out is not None and layout is not None
            }
            for name, outer in zip(kind.outputs, segment.outputs, strict=True):
                if name in made:
                    found[outer] = made[name]
            for outer, text in zip(segment.inputs, choice.input_grads, strict=True):
                if text is not None and outer in found:
                    found["d:" + outer] = (found[outer][0], *parse_layout(text))
    return found
