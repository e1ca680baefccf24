"""Tensor parallelism's collectives run beside its products: which ops of a plan go in pieces, and whether that pays.

A product whose rows are gathered for it alone, and a forward one whose sums are scattered over rows, become strategies
in pieces (`rules.expansions.overlap`). Backward, an input's gradient is left whole where it is scattered: the product
for the weight's gradient, which needs nothing of it, already runs beside that collective. The plan is lowered and
simulated again with 2, 4, ... pieces, up to as many as allowed, and the fastest that fits counts: allowing more is
never worse.

Limits: all segments of a choice go in as many pieces, and every product that can goes in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from paraplan.cost_models.realised_plan import Budget, Realised
from paraplan.ir.machine.mesh import Layout, R, Shard, parse_layout
from paraplan.ir.model.graph import Graph, Op, Phase
from paraplan.ir.plan import KindChoice, Plan, Stage
from paraplan.lowering.blocks.forward import chosen_strategies
from paraplan.planner.schedules.full_rounds import as_a_whole
from paraplan.rules.choices import axis_part, axis_texts
from paraplan.rules.expansions.overlap import GATHER, PRODUCTS, SCATTER, Pieces
from paraplan.rules.strategies import Strategy, dims_of, is_expanded, strategy_named
from paraplan.rules.time_axis import KindMicro, program_micro


def overlapped(made: Realised, most: int, budget: Budget) -> Realised:
    """The plan with products in the pieces, at most so many, that make it fastest.

    Args:
        made: the plan.
        most: pieces a product may be in.
        budget: of its devices.
    """
    best = made
    for count in piece_counts(most):
        tried = as_a_whole(in_pieces(made.plan, count))
        if tried.simulation.step_s < best.simulation.step_s and tried.left_bytes(budget) >= 0:
            best = tried
    return best


def in_pieces(plan: Plan, count: int) -> Plan:
    """The plan with products in so many pieces, where they can; the plan itself where none can."""
    micro = program_micro(plan.program, plan.num_microbatches)
    stages = []
    boundary = boundary_layouts(plan, micro.segments)
    for stage in plan.stages:
        first = {choice: stage.first + at for at, choice in reversed([*enumerate(stage.segment_choice)])}
        choices = tuple(
            _pieced(plan, stage, choice, first[index], boundary, micro.segments, count)
            for index, choice in enumerate(stage.choices)
        )
        stages.append(msgspec.structs.replace(stage, choices=choices))
    return plan if tuple(stages) == plan.stages else msgspec.structs.replace(plan, stages=tuple(stages))


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
    count: int,
) -> KindChoice:
    """The choice with its products in pieces."""
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
        if op.target in PRODUCTS and strategy.ring_axis < 0:
            wanted = [
                layout
                for reader, how in zip(graph.ops, strategies, strict=True)
                for name, layout in zip(reader.tensors, how.inputs, strict=True)
                if name == op.outs[0] and reader.phase is op.phase
            ]
            for key in _keys(op, graph, strategy, home.get(op.tensors[0]), wanted, count):
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
