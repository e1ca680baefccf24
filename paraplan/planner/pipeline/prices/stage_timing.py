"""What a step of one position takes, simulated: of few microbatches, whole, cut into stages, or in split backwards."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.rank_trace import RankTrace
from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.execution.schedule import Action, ActionKind, parse_action
from paraplan.ir.execution.streams import COMPUTE
from paraplan.ir.machine.collectives import COLLECTIVES, Collective
from paraplan.ir.plan import Plan
from paraplan.lowering import lower
from paraplan.planner.pipeline.cuts.stage_cuts import cut_evenly
from paraplan.planner.pipeline.pipeline import pipelined
from paraplan.planner.pipeline.prices.shorten import Shortened
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.schedule_problem import at
from paraplan.rules.time_axis import program_micro

FEW = 3
"""Microbatches simulated: the middle one is as all others are."""
KINDS = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W
"""Of computations."""


@dataclass(frozen=True)
class StepTimes:
    """Of a simulated step.

    Attributes:
        forward_s, backward_s: per segment, of a middle microbatch.
        halves_s: likewise, of backwards that are split.
        once_s: what is reduced, updated and gathered once.
        call_bytes: the most that a call holds for a moment, per segment, -1 for those of none.
    """

    forward_s: list[float]
    backward_s: list[float]
    halves_s: tuple[list[float], list[float]]
    once_s: tuple[float, float, float]
    call_bytes: dict[int, int]


def timed(plan: Plan) -> StepTimes:
    """Simulate a step of one position. A microbatch's forward lasts from its begin to that of the next computation,
    waits of every kind included.

    Args:
        plan: on one position's devices.
    Raises:
        InvalidPlanError: it cannot be lowered.
    """
    programs = lower(plan)
    (trace, *_) = simulate_plan(plan, programs).traces
    begins: dict[tuple[ActionKind, int], float] = {}
    own = {kind: [0.0] * len(plan.program.segments) for kind in KINDS}
    seen = _microbatches(trace)
    shown = seen[len(seen) // 2] if seen else 0
    for span in trace.spans:
        action = parse_action(span.action)
        if span.stream != COMPUTE or action.kind not in own:
            continue
        key = action.kind, action.microbatch
        begins[key] = min(begins.get(key, span.start_s), span.start_s)
        if span.segment >= 0 and span.microbatch in (shown, -1):
            own[action.kind][span.segment] += span.end_s - span.start_s
    last_s = max((s.end_s for s in trace.spans if s.stream == COMPUTE and s.segment >= 0), default=trace.step_s)
    order = sorted(begins, key=lambda key: begins[key])
    thens = [*(begins[key] for key in order[1:]), last_s]
    lasts = {key: then_s - begins[key] for key, then_s in zip(order, thens, strict=True)}
    for kind, each in own.items():
        whole = sum(each)
        if whole and (kind, shown) in lasts:
            own[kind] = [s * max(lasts[kind, shown], 0.0) / whole for s in each]
    once_s = _reduced_s(trace, seen[-1] if seen else 0), _once_s(trace, seen, shown), _gathered_s(trace)
    forward_s, backward_s, *halves_s = own.values()
    return StepTimes(forward_s, backward_s, (halves_s[0], halves_s[1]), once_s, _above(trace, programs[0]))


def microbatch_s(short: Shortened) -> float:
    """What a middle microbatch takes of the plan that a shorter one stands for.

    Args:
        short: of one stage.
    Raises:
        InvalidPlanError: it cannot be lowered.
    """
    found = timed(few_microbatches(short.plan))
    return sum(found.forward_s[index] + found.backward_s[index] for index in short.stands_for)


def _reduced_s(trace: RankTrace, last: int) -> float:
    """What the busiest link takes for reductions of gradients, of the last microbatch and after it."""
    return _busiest_s(
        trace,
        lambda action: action.kind not in (ActionKind.F, ActionKind.UPDATE) and action.microbatch in (last, -1),
        lambda collective: bool(collective.reductions),
    )


def _once_s(trace: RankTrace, seen: list[int], shown: int) -> float:
    """What is computed outside segments, in the first microbatch's forward and from the last one's backward on, beyond
    what it is in others."""
    busy: Counter[tuple[ActionKind, int]] = Counter()
    for span in trace.spans:
        if span.stream == COMPUTE and span.segment < 0:
            action = parse_action(span.action)
            busy[action.kind, action.microbatch] += span.busy_s  # type: ignore[assignment]
    every = [(kind, m) for kind in (ActionKind.F, ActionKind.B) for m in seen]
    return max(sum(busy.values()) - sum(busy[kind, shown] for kind, _ in every), 0.0)


def _gathered_s(trace: RankTrace) -> float:
    """What the busiest link takes for gathers of the step's begin."""
    first = min(_microbatches(trace), default=0)
    return _busiest_s(
        trace,
        lambda action: action.kind is ActionKind.F and action.microbatch == first,
        lambda collective: collective.is_gather,
    )


def _busiest_s(trace: RankTrace, counts: Callable[[Action], bool], is_meant: Callable[[Collective], bool]) -> float:
    """Of the collectives outside segments that are meant, what the link with most of them takes."""
    links: dict[str, float] = {}
    for span in trace.spans:
        collective = COLLECTIVES.get(span.label)
        if span.microbatch < 0 and collective and is_meant(collective) and counts(parse_action(span.action)):
            links[span.stream] = links.get(span.stream, 0.0) + span.busy_s
    return max(links.values(), default=0.0)


def _above(trace: RankTrace, program: RankProgram) -> dict[int, int]:
    """Per segment, -1 for none, the most that its calls hold for a moment beside what stays."""
    found: dict[int, int] = {}
    for before, point in itertools.pairwise(trace.memory):
        segment = program.steps[point.step].segment
        above = point.peak_bytes - max(before.live_bytes, point.live_bytes)
        found[segment] = max(found.get(segment, 0), above)
    return found


def cut_plan(whole: Plan, count: int) -> Plan:
    """A plan of one stage cut into several on the same devices, whose schedule runs the first microbatches alone.

    Args:
        whole: the plan.
        count: of stages.
    """
    bounds = cut_evenly([1.0] * len(whole.program.segments), count, len(whole.program.segments))
    assert bounds is not None
    kinds = ((ActionKind.F, range(count)), (ActionKind.B, range(count - 1, -1, -1)))
    order = [at(stage, kind, m) for m in range(FEW) for kind, stages in kinds for stage in stages]
    return pipelined(whole, whole.cluster, bounds, complete("interleaved", (tuple(order),)), [(0,)] * count)


def split_plan(whole: Plan) -> Plan:
    """A plan of one stage whose backwards are in halves, and whose schedule runs the first microbatches alone.

    Raises:
        InvalidPlanError: all microbatches would have to be run.
    """
    if runs_all(whole):
        raise InvalidPlanError("what is read of all microbatches, or of the last, leaves out none")
    kinds = ActionKind.F, ActionKind.I, ActionKind.W
    order = [at(0, kind, m) for m in range(min(FEW, whole.num_microbatches)) for kind in kinds]
    bounds = [(0, len(whole.program.segments))]
    return pipelined(whole, whole.cluster, bounds, complete("zb-h1", (tuple(order),)), [(0,)])


def _microbatches(trace: RankTrace) -> list[int]:
    """Whose segments ran."""
    return sorted({span.microbatch for span in trace.spans if span.microbatch >= 0 and span.segment >= 0})


def few_microbatches(plan: Plan) -> Plan:
    """A plan of one stage whose schedule runs the first microbatches alone, each as large as it is.

    It can be lowered and simulated; it is no legal plan, as it leaves the others out.
    """
    if plan.num_microbatches <= FEW or runs_all(plan):
        return plan
    kept: Callable[[str], bool] = lambda action: not action[2:].isdigit() or int(action[2:]) < FEW  # noqa: E731
    classes = tuple(tuple(filter(kept, actions)) for actions in plan.schedule.classes)
    return msgspec.structs.replace(plan, schedule=msgspec.structs.replace(plan.schedule, classes=classes))


def runs_all(plan: Plan) -> bool:
    """Whether something is read of all microbatches, or of the last."""
    program = plan.program
    return bool(program.buffer_updates) or program_micro(program, plan.num_microbatches).has_tail
