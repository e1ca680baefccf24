"""The step of one position taken apart: compute, links, waiting.

Of a rank class, with `compute_s`, stalls and bubbles of its trace (`cost_models.simulator.simulate`),

    step = compute + recomputation + updates + Σ over links (stalled + taken) + bubbles + idle after its own end

`taken` is what collectives take of the device beside compute. Bubbles before a position's first backward and after its
last forward are the pipeline's fill and drain, as is what is left of the step when it has ended; bubbles between are
waiting for others. Recomputation is what is computed less in the same plan that keeps its activations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from paraplan.cost_models.costs import Costs
from paraplan.cost_models.predict import plan_costs
from paraplan.cost_models.simulator.rank_trace import RankTrace, Simulation
from paraplan.ir.execution.rank_program import InstrKind, RankProgram, StepKind
from paraplan.ir.execution.schedule import ActionKind
from paraplan.ir.execution.streams import Stream, StreamKind
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.rank_groups import holding_of, holdings
from paraplan.ir.plan import Plan
from paraplan.report.breakdown import time_breakdown
from paraplan.report.diagnosis.records import (
    COMPUTE,
    FILL_AND_DRAIN,
    ISSUING,
    OTHERS,
    RECOMPUTATION,
    TIER_UPDATE,
    UPDATE,
    Breakdown,
    StepPart,
)
from paraplan.report.units import show_ranks

_SHOWN = 4
"""Stages of a position named one by one."""


def breakdowns(
    plan: Plan, programs: Sequence[RankProgram], simulation: Simulation, keeping_s: Sequence[float] | None = None
) -> tuple[Breakdown, ...]:
    """The step of every rank class.

    Args:
        plan, programs, simulation: of a plan.
        keeping_s: per class, the compute of the same plan that recomputes nothing, collectives' share of the device
            left out (`own_compute_s`); None where it recomputes nothing.
    """
    where = _places(plan)
    return tuple(
        Breakdown(
            ranks=show_ranks(rank for rank, of in enumerate(simulation.rank_class) if of == index),
            where=where[index],
            step_s=simulation.step_s,
            parts=step_parts(
                plan.cluster,
                trace,
                taken_s(program, costs),
                simulation.step_s,
                None if keeping_s is None else keeping_s[index],
            ),
        )
        for index, (program, trace, costs) in enumerate(zip(programs, simulation.traces, plan_costs(plan), strict=True))
    )


def critical(
    plan: Plan, programs: Sequence[RankProgram], simulation: Simulation, found: Sequence[Breakdown]
) -> Breakdown:
    """The position that waits least for others, with its work: what it does is what the step takes.

    Args:
        plan, programs, simulation: of a plan.
        found: of every rank class (`breakdowns`).
    """
    index = min(range(len(found)), key=lambda at: found[at].waits_s)
    work, collectives = time_breakdown(programs[index], simulation.traces[index], plan_costs(plan)[index])
    return msgspec.structs.replace(found[index], work=work, collectives=collectives)


def own_compute_s(plan: Plan, programs: Sequence[RankProgram], simulation: Simulation) -> tuple[float, ...]:
    """Per rank class, seconds of compute, what collectives take of the device left out.

    Args:
        plan, programs, simulation: of a plan.
    """
    every = zip(programs, simulation.traces, plan_costs(plan), strict=True)
    return tuple(trace.compute_s - sum(taken_s(program, costs).values()) for program, trace, costs in every)


def taken_s(program: RankProgram, costs: Costs) -> dict[Stream, float]:
    """Per communication stream, what its collectives take of the device for themselves in a step."""
    found: dict[Stream, float] = defaultdict(float)
    calls = Counter(step.block for step in program.steps if step.kind is StepKind.CALL)
    for name, times in calls.items():
        block = program.blocks[name]
        for instr in block.instrs:
            if instr.kind is InstrKind.COLLECTIVE:
                found[costs.stream(instr)] += times * costs.instr_taken_s(block, instr)
    return found


def step_parts(
    cluster: ClusterSpec, trace: RankTrace, taken: dict[Stream, float], step_s: float, keeping_s: float | None
) -> tuple[StepPart, ...]:
    """What the step of a rank class goes into, the longest first.

    Args:
        cluster: of the plan.
        trace: of the class.
        taken: per communication stream, what its collectives take of the device (`taken_s`).
        step_s: of the whole cluster.
        keeping_s: the compute of the same plan that recomputes nothing; None where it recomputes nothing.
    """
    stalled: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    took: dict[str, float] = defaultdict(float)
    for stream, seconds in trace.stalled_s.items():
        stalled[part_of(stream, cluster)] += seconds
    for stream, seconds in taken.items():
        took[part_of(stream, cluster)] += seconds
    for stream, seconds in {**trace.comm_s, **trace.copy_s, **trace.update_s}.items():
        busy[part_of(stream, cluster)] += seconds
    computes = [span for span in trace.spans if span.stream.kind is StreamKind.COMPUTE]
    update = sum(span.busy_s for span in computes if span.label == UPDATE)
    own = trace.compute_s - sum(taken.values())
    again = max(own - keeping_s, 0.0) if keeping_s is not None else 0.0
    waits = _bubbles(trace)
    waits[FILL_AND_DRAIN] += step_s - trace.step_s
    found = {COMPUTE: own - again - update, RECOMPUTATION: again, UPDATE: update, **waits}
    found |= {key: stalled[key] + took[key] for key in dict.fromkeys((*stalled, *took, *busy))}
    parts = [
        StepPart(
            key=key, seconds=seconds, busy_s=busy.get(key, 0.0 if key in waits else seconds), taken_s=took.get(key, 0.0)
        )
        for key, seconds in found.items()
        if seconds > 0 or busy.get(key)
    ]
    return tuple(sorted(parts, key=lambda part: -part.seconds))


def part_of(stream: Stream, cluster: ClusterSpec) -> str:
    """The part of a step that a stream's time is, a key of `PART_WORDS`."""
    if stream.channel is not None:
        return cluster.span(stream.channel)
    if stream.kind is StreamKind.UPDATE:
        return TIER_UPDATE
    if stream.kind is StreamKind.HOST:
        return ISSUING
    return stream.level or stream.tier or COMPUTE


def _bubbles(trace: RankTrace) -> dict[str, float]:
    """Bubbles at the pipeline's fill and drain, and between."""
    spans = [span for span in trace.spans if span.stream.kind is StreamKind.COMPUTE]
    backwards = (ActionKind.B.value, ActionKind.I.value)
    first = min((span.start_s for span in spans if span.phase in backwards), default=0.0)
    last = max((span.end_s for span in spans if span.phase == ActionKind.F.value), default=0.0)
    found = {FILL_AND_DRAIN: 0.0, OTHERS: 0.0}
    for begin, end in trace.bubbles:
        found[FILL_AND_DRAIN if end <= first or begin >= last else OTHERS] += end - begin
    return found


def _places(plan: Plan) -> tuple[str, ...]:
    """Per rank class, the segments it holds, in words; "" where there is one stage."""
    if len(plan.stages) == 1:
        return ("",) * len(plan.schedule.classes)
    held = holdings(plan)
    rank_class = plan.schedule.rank_class
    groups = [holding_of(held, rank_class.index(index)) for index in range(len(plan.schedule.classes))]
    return tuple(_held_words(plan, group.stages) for group in groups)


def _held_words(plan: Plan, stages: tuple[int, ...]) -> str:
    """`stages 0 (0:4), 2 (8:12)`; of many, how many segments they have in all."""
    if len(stages) > _SHOWN:
        segments = sum(plan.stages[stage].stop - plan.stages[stage].first for stage in stages)
        return f"{len(stages)} stages ({stages[0]}, {stages[1]} ... {stages[-1]}), {segments} segments"
    named = ", ".join(f"{stage} ({plan.stages[stage].first}:{plan.stages[stage].stop})" for stage in stages)
    return f"stage{'s' if len(stages) > 1 else ''} {named}"
