"""Which segments of a pipeline recompute what: each stage as little as its own memory needs.

The stages of a pipeline are short of memory to different degrees, the first most, as it has most microbatches in
flight. Every position's peak is its own affair: lowering and simulating the pipeline says by how much it is over its
budget, and divided by the microbatches in flight there that is what its segments must save less. A small integer
program per position (`recompute.stage.choose`) says how; the pipeline is simulated again until all positions fit.
Positions that hold the same stages (bidirectional schedules) decide as one, by the one that is over by most.

Limits: activations are recomputed, not offloaded; a heuristic as to which microbatches are in flight at the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from paraplan.ir.execution.schedule import ActionKind, Schedule, parse_action
from paraplan.ir.machine.rank_groups import group_of_class, holdings
from paraplan.ir.plan import Plan
from paraplan.planner.recompute.kind_options import RematOption
from paraplan.planner.recompute.stage_recompute import choose

ROUNDS = 8
"""Pipelines simulated before giving up."""

Activations = tuple[dict[str, str], ...]
Make = Callable[[Activations], Plan]
Cell = tuple[int, ...]
"""The stages of a position."""


def recomputing(kept: Plan, make: Make, options: Sequence[tuple[RematOption, ...]], budget_bytes: float) -> Plan:
    """The pipeline with as little recomputed as fits, or the one that comes closest.

    Args:
        kept: a priced pipeline that keeps everything.
        make: prices the same pipeline with other activations, per segment.
        options: per kind, what an instance may do, most bytes saved first.
        budget_bytes: of a device.
    """
    program = kept.program
    segments = {
        cell: [i for s in cell for i in range(kept.stages[s].first, kept.stages[s].stop)] for cell in _cells(kept)
    }
    taken = dict.fromkeys(range(len(program.segments)), 0)
    plan = least = kept
    for _ in range(ROUNDS):
        over = _over(plan, budget_bytes)
        if max(over.values()) <= 0:
            return plan
        before = dict(taken)
        for cell, excess in over.items():
            if excess > 0:
                here = segments[cell]
                saved = sum(options[program.segments[i].kind][taken[i]].saved_bytes for i in here)
                allowed = saved - excess / in_flight(plan.schedule, cell)
                part = msgspec.structs.replace(program, segments=tuple(program.segments[i] for i in here))
                chosen = choose(part, options, allowed)
                leanest = [len(options[program.segments[i].kind]) - 1 for i in here]
                taken |= dict(zip(here, leanest if chosen is None else chosen, strict=True))
        if taken == before:
            break
        plan = make(tuple(options[program.segments[i].kind][taken[i]].activations for i in sorted(taken)))
        least = min(least, plan, key=_peak_bytes)
    return plan if _peak_bytes(plan) <= budget_bytes else least


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


def _over(plan: Plan, budget_bytes: float) -> dict[Cell, float]:
    """Per position, the bytes its fullest ranks are over the budget; of positions with the same stages, the most."""
    assert plan.prediction is not None
    held, found = holdings(plan), dict.fromkeys(_cells(plan), -budget_bytes)
    for actions, peak in zip(plan.schedule.classes, plan.prediction.peak_bytes, strict=True):
        cell = held[group_of_class(plan, held, actions)].stages
        found[cell] = max(found[cell], peak - budget_bytes)
    return found


def _peak_bytes(plan: Plan) -> int:
    assert plan.prediction is not None
    return max(plan.prediction.peak_bytes)
