"""`schedule="searched"`: the pipeline of the best named schedule, under the shortest schedule found for its stages.

What stages cost is read off simulated pipelines of the same stages: F and B from the best one, I and W from one that
splits backwards, messages from their links, activations from what is alive before and after an action.
`schedules.search` orders them; of what it finds, and of the named pipelines, the fastest that fits as simulated is
taken. So the answer is never slower than a named schedule that these stages take, and is one of them where what is
searched is no order for the model (one that reads the whole batch at its end; one whose values skip stages, if ranks
would wait for each other). Where the simulation holds more than the costs say, it is searched again with less memory,
`ROUNDS` times at most.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.rank_trace import RankTrace
from paraplan.ir.errors import ConstraintError, CostModelError
from paraplan.ir.execution.rank_program import RankProgram, StepKind
from paraplan.ir.execution.rendezvous import MESSAGES
from paraplan.ir.execution.schedule import ActionKind, parse_action
from paraplan.ir.execution.streams import StreamKind
from paraplan.ir.machine.rank_groups import group_of_class, holdings
from paraplan.ir.plan import Plan
from paraplan.lowering import lower
from paraplan.planner.pipeline.open_choices import check_turns
from paraplan.planner.pipeline.pipeline import rescheduled
from paraplan.planner.recompute.stage_memory import in_flight
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.schedule_problem import PipelineProblem, StageCosts, holders_of
from paraplan.planner.schedules.searching.schedule_search import Searched, search

SEARCHED = "searched"
ROUNDS = 3
"""Searches for a schedule that fits as simulated."""

Times = dict[tuple[int, ActionKind], float]
Bytes = dict[tuple[int, ActionKind], int]


def searched(named: Sequence[Plan], price: Callable[[Plan], Plan], budget: int, limit_s: float = math.inf) -> Plan:
    """The fastest plan, of named schedules or a searched one.

    Args:
        named: priced pipelines of as many stages and microbatches each, the fastest that fits first.
        price: prices a pipeline.
        budget: bytes of a device.
        limit_s: seconds for searches of schedules.
    """
    best, stop = named[0], time.perf_counter() + limit_s
    costs = stage_costs(best, named[1:])
    positions = len({mesh.devices for stage in best.stages for mesh in (stage.mesh, *stage.replicas)})
    limit = [budget] * positions
    for _ in range(ROUNDS):
        problem = PipelineProblem(
            stages=costs,
            num_positions=positions,
            num_microbatches=best.num_microbatches,
            memory_bytes=tuple(limit),
            split_backward=any(_splits(plan) for plan in named),
            replicas=best.program.apart == 1 or not best.program.buffer_updates,  # written in microbatches' order
        )
        found = search(problem, time_limit_s=max(stop - time.perf_counter(), 0.0))
        schedule = complete(SEARCHED, found.orders, costs, found.num_replicas)
        try:
            check_turns(best.program, best.num_microbatches, SEARCHED, schedule, len(best.stages))
        except ConstraintError as fault:
            return _kept(best, f" ({fault})")
        try:
            plan = price(rescheduled(best, schedule, holders_of(found.orders)))
        except CostModelError as fault:  # values that skip stages go in no message the search knows
            return _kept(best, f" ({fault})")
        assert plan.prediction is not None and best.prediction is not None
        over = max(plan.prediction.peak_bytes) - budget
        if over <= 0:
            return _told(plan, found, best) if plan.prediction.step_s < best.prediction.step_s else _kept(best)
        limit = [each - over for each in limit]
    return _kept(best)


def _told(plan: Plan, found: Searched, best: Plan) -> Plan:
    assert plan.prediction is not None and best.prediction is not None
    note = (
        f"the schedule was searched ({found.placement}; found by {found.found_by}): {plan.prediction.step_s:.4g} s "
        f"where {best.schedule.name}, the best named one, takes {best.prediction.step_s:.4g} s; with what stages cost "
        f"on average it is {found.evaluation.step_s:.4g} s, and no schedule in scope is under {found.bound_s:.4g} s"
    )
    return msgspec.structs.replace(plan, notes=(*plan.notes, note))


def _kept(best: Plan, why: str = "") -> Plan:
    note = f"no schedule was found that is shorter, as simulated, than {best.schedule.name}, the best named one{why}"
    return msgspec.structs.replace(best, notes=(*best.notes, note))


def stage_costs(best: Plan, others: Iterable[Plan]) -> tuple[StageCosts, ...]:
    """What one microbatch of every stage takes; what the first plan does not have is taken from the others.

    Args:
        best: a priced pipeline.
        others: of as many stages.
    """
    seconds: Times = {}
    alive: Bytes = {}
    for plan in (best, *others):
        programs = lower(plan)
        simulation = simulate_plan(plan, programs)
        times: dict[tuple[int, ActionKind], list[float]] = {}
        grown: dict[tuple[int, ActionKind], list[int]] = {}
        for program, trace in zip(programs, simulation.traces, strict=True):
            _read(program, trace, times, grown)
        seconds = {key: statistics.median(each) for key, each in times.items()} | seconds
        alive = {key: int(statistics.median(each)) for key, each in grown.items()} | alive
    kept = _fixed_bytes(best, alive)
    return tuple(_costs(stage, seconds, alive, int(kept[stage])) for stage in range(len(best.stages)))


def _fixed_bytes(plan: Plan, alive: Bytes) -> list[float]:
    """Per stage, what its ranks hold at their peak besides activations; stages of one position share it alike."""
    assert plan.prediction is not None
    held, found = holdings(plan), [0.0] * len(plan.stages)
    for actions, peak in zip(plan.schedule.classes, plan.prediction.peak_bytes, strict=True):
        stages = held[group_of_class(plan, held, actions)].stages
        flying = sum(in_flight(plan.schedule, (stage,)) * max(0, alive[stage, ActionKind.F]) for stage in stages)
        for stage in stages:
            found[stage] = max(found[stage], (peak - flying) / len(stages), 0.0)
    return found


def _costs(stage: int, seconds: Times, alive: Bytes, fixed_bytes: int) -> StageCosts:
    kinds = ActionKind
    forward, backward = seconds[stage, kinds.F], seconds.get((stage, kinds.B), 0.0)
    half = backward / 2
    input_s, weight_s = seconds.get((stage, kinds.I), half), seconds.get((stage, kinds.W), half)
    return StageCosts(
        forward_s=forward,
        backward_s=backward or input_s + weight_s,
        input_grad_s=input_s,
        weight_grad_s=weight_s,
        send_forward_s=seconds.get((stage, kinds.SEND_F), 0.0),
        send_backward_s=seconds.get((stage, kinds.SEND_B), 0.0),
        activation_bytes=max(0, alive[stage, kinds.F]),
        weight_grad_bytes=max(0, -alive.get((stage, kinds.W), 0)),
        fixed_bytes=fixed_bytes,
    )


def _read(
    program: RankProgram,
    trace: RankTrace,
    times: dict[tuple[int, ActionKind], list[float]],
    grown: dict[tuple[int, ActionKind], list[int]],
) -> None:
    """Adds how long every action of a rank takes, and by how much it changes what is alive."""
    took: dict[str, float] = {}
    more: dict[str, int] = {}
    end_s, live = 0.0, trace.start_bytes
    for point in trace.memory:
        step = program.steps[point.step]
        action, waits = step.action, step.kind in (StepKind.AWAIT, StepKind.SEND)
        took[action] = took.get(action, 0.0) + (0.0 if waits else point.end_s - end_s)
        more[action] = more.get(action, 0) + point.live_bytes - live
        end_s, live = point.end_s, point.live_bytes
    for span in trace.spans:
        if span.stream.kind is StreamKind.MESSAGE and parse_action(span.action).kind in MESSAGES:
            took[span.action] = took.get(span.action, 0.0) + span.end_s - span.start_s
    for text, seconds in took.items():
        parsed = parse_action(text)
        key = parsed.stage, parsed.kind
        times.setdefault(key, []).append(seconds)
        grown.setdefault(key, []).append(more.get(text, 0))


def _splits(plan: Plan) -> bool:
    return any(parse_action(text).kind is ActionKind.W for texts in plan.schedule.classes for text in texts)
