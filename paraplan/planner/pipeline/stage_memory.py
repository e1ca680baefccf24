"""Which segments of a pipeline recompute what: each stage as little as its own memory needs.

The stages of a pipeline are short of memory to different degrees, the first most, as it has most microbatches in
flight. Every position's peak is its own affair: lowering and simulating the pipeline says by how much it is over its
budget, and divided by the microbatches in flight there that is what its segments must save less. A small integer
program per position (`recompute.stage.choose`) says how; the pipeline is simulated again until all positions fit.
Positions that hold the same stages (bidirectional schedules) decide as one, by the one that is over by most.

Where that took less off the peak than it was to (backwards in two halves keep values between them, made again or not),
the next round goes by what the last one took off.

Limits: activations are recomputed, not offloaded; a heuristic as to which microbatches are in flight at the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from paraplan.cost_models.realised_plan import Budget, Realised
from paraplan.ir.execution.schedule import ActionKind, Schedule, parse_action
from paraplan.ir.machine.rank_groups import group_of_class, holdings
from paraplan.ir.plan import Plan
from paraplan.planner.recompute.kind_options import RematOption
from paraplan.planner.recompute.stage_recompute import choose

ROUNDS = 8
"""Pipelines simulated before giving up."""
MARGIN = 0.004
"""Of the budget, what is saved beyond what a pipeline is over, for every one before that was over."""
LEAST_FLYING = 1 / 8
"""Of the microbatches in flight, how few of them a byte less saved is thought to be worth at least."""
LOOSE = 0.01
"""Of the budget, what is left free of a position that recomputed more than it had to from the begin."""

Activations = tuple[dict[str, str], ...]
Make = Callable[[Activations], Realised]
Cell = tuple[int, ...]
"""The stages of a position."""
Options = Sequence[tuple[RematOption, ...]]
"""Per kind, what an instance may do, most bytes saved first."""


def recomputing(
    kept: Realised,
    make: Make,
    options_of: Callable[[Cell], Options],
    budget: Budget,
    begun: Sequence[int] = (),
) -> Realised:
    """The pipeline with as little recomputed as fits, or the one that comes closest.

    Args:
        kept: a pipeline that keeps everything, or recomputes what `begun` says.
        make: simulates the same pipeline with other activations, per segment.
        options_of: what a position's segments may do.
        budget: what devices may hold.
        begun: per segment, the option it takes already; () for the first of each. Where some position is over then,
            those that have room take less.
    """
    program, stages = kept.plan.program, kept.plan.stages
    segments = {cell: [i for s in cell for i in range(stages[s].first, stages[s].stop)] for cell in _cells(kept.plan)}
    taken = dict(enumerate(begun or [0] * len(program.segments)))
    options_at = {i: options_of(cell)[program.segments[i].kind] for cell, here in segments.items() for i in here}
    made = least = kept
    held_bytes = _budgets(kept, budget)
    flying = {cell: in_flight(kept.plan.schedule, cell) for cell in segments}
    worth, lessened = dict(flying), dict[Cell, tuple[float, float]]()
    for round_ in range(ROUNDS):
        over = _over(made, budget)
        for cell, (was_over, less_saved) in lessened.items():
            took = (was_over - over[cell]) / less_saved
            worth[cell] = min(max(took, LEAST_FLYING * flying[cell]), flying[cell])
        lessened.clear()
        if max(over.values()) <= 0:
            return made
        before = dict(taken)
        for cell, excess in over.items():
            here = segments[cell]
            loosened = begun and not round_ and excess < -LOOSE * held_bytes[cell] and any(taken[i] for i in here)
            if excess > 0 or loosened:
                saved = sum(options_at[i][taken[i]].saved_bytes for i in here)
                allowed = saved - (excess + (LOOSE if loosened else round_ * MARGIN) * held_bytes[cell]) / worth[cell]
                part = msgspec.structs.replace(program, segments=tuple(program.segments[i] for i in here))
                chosen = choose(part, options_of(cell), allowed)
                leanest = [len(options_at[i]) - 1 for i in here]
                taken |= dict(zip(here, leanest if chosen is None else chosen, strict=True))
                less = saved - sum(options_at[i][taken[i]].saved_bytes for i in here)
                if less > 0:
                    lessened[cell] = excess, less
        if taken == before:
            break
        made = make(tuple(options_at[i][taken[i]].activations for i in sorted(taken)))
        least = max(least, made, key=lambda each: each.left_bytes(budget))
    return made if made.left_bytes(budget) >= 0 else least


def in_flight(schedule: Schedule, stages: Sequence[int]) -> float:
    """The most microbatches whose forward has run and whose backward has not, of some stages on any one rank, per
    stage."""
    most = 1
    for texts in schedule.classes:
        flying = 0
        for action in map(parse_action, texts):
            if action.stage in stages:
                flying += action.kind is ActionKind.F
                flying -= action.kind in (ActionKind.B, ActionKind.W)
                most = max(most, flying)
    return most / len(stages)


def _cells(plan: Plan) -> list[Cell]:
    return list(dict.fromkeys(holding.stages for holding in holdings(plan)))


def _over(made: Realised, budget: Budget) -> dict[Cell, float]:
    """Per position, the bytes its fullest ranks are over the budget; of positions with the same stages, the most."""
    plan, found = made.plan, dict[Cell, float]()
    held = holdings(plan)
    for actions, over in zip(plan.schedule.classes, made.over_budget_bytes(budget), strict=True):
        cell = held[group_of_class(plan, held, actions)].stages
        found[cell] = max(found.get(cell, -math.inf), over)
    return {cell: found[cell] for cell in _cells(plan)}


def _budgets(made: Realised, budget: Budget) -> dict[Cell, float]:
    """Per position, what each of its devices may hold."""
    plan = made.plan
    if isinstance(budget, int):
        return dict.fromkeys(_cells(plan), budget)
    found: dict[Cell, float] = {}
    for holding in holdings(plan):
        least = min(budget[device] for device in holding.mesh.devices)
        found[holding.stages] = min(found.get(holding.stages, least), least)
    return found
