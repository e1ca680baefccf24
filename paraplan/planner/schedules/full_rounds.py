"""A pipeline of many microbatches from its first ones: once it is full, rounds are alike.

A round is as many microbatches as there are positions. In a simulated step every clock is a maximum of sums of earlier
clocks, a recurrence linear in the max-plus algebra (Baccelli, Cohen, Olsder, Quadrat 1992, Synchronization and
Linearity). A plan is lowered and simulated for few microbatches, and for a round more, which adds T to the step. Look
at the end of the last round in which a rank's actions follow each other as a round before, at as many of them as
anything reaches back:

- Where all that ranks do there ends at most T later than the same of the round before, so it does in every further
  round, for maxima of sums are monotone: n rounds more add at most n T.
- Where something ends just T later, so does what it waited for (else it would not have waited), and so on: along that
  chain n rounds more take at least n T.

So if a rank's actions all end T later there, none of any rank's ends later than that, and the round more has added T to
every rank's step and nothing to what any holds, then more rounds are carried on: exactly, but for how floating-point
numbers are rounded, and for how a rank that still gains on the others divides what it stands still into waits and
bubbles. Else a round more is tried.

Limits: schedules by name that hold each stage on one position, and whose in-flight microbatches do not grow with their
number.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paraplan.cost_models.realised_plan import Realised, realised
from paraplan.cost_models.simulator.simulate import RankTrace, Simulation
from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.execution.schedule import PER_STEP, ActionKind, parse_action, split_classes, spread
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Plan
from paraplan.ir.process.memo import SESSION, Lately
from paraplan.lowering import lower
from paraplan.lowering.rank_classes import lowered_from
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.named import NAMED, named_orders
from paraplan.planner.schedules.order_times import OrderTimes
from paraplan.planner.schedules.schedule_problem import Orders, StageCosts, holders_of
from paraplan.rules.time_axis import program_micro

FILLED, FILLED_BY_MANY, SAVED = 2, 3, 1.5
"""Microbatches a position with which plans are tried where there are this many times more: in the second half of two
every stage has gradients while as many microbatches are in flight as ever, unless positions have several stages."""
ROUNDS, WORTH = 3, 0.8
"""Rounds more that are tried; of all microbatches, how many are not worth carrying on from."""
REACH = 2
"""Part of a round that is longer than anything in it reaches back: a rank waits for what another did a few actions ago,
or, where it has several stages, about as many as there are positions."""
EXACT = 1e-9
"""Of a step, what times may differ by that are rounded differently."""
_BACKWARD = (ActionKind.B, ActionKind.I, ActionKind.W)
_TIMES = ("step_s", "compute_s", "exposed_comm_s", "exposed_copy_s", "bubble_s", "exposed_update_s")
_STREAMS = ("comm_s", "copy_s", "update_s", "stalled_s")


class Carried(NamedTuple):
    """What is known of a plan without lowering all of it.

    Attributes:
        sample: the plan of the first microbatches, lowered and simulated: its blocks and what ranks hold are those of
            the plan.
        simulation: of all microbatches; without spans and points, which the sample's has of the first ones.
    """

    sample: Realised
    simulation: Simulation


_CARRIED: Lately[Carried | None] = SESSION.lately("full_rounds.carried", 8)


def carried(plan: Plan, few: Realised | None = None) -> Carried | None:
    """A plan of many microbatches from that of the first ones; None where it has to be lowered as a whole.

    Args:
        plan: any; of those looked at lately, what was found then.
        few: it with the first microbatches, where that was made (see `few_orders`).
    Raises:
        InvalidPlanError, CostModelError: it cannot be lowered or simulated.
    """
    return _CARRIED.get(lowered_from(plan), lambda: _carried(plan, few))


def as_a_whole(plan: Plan, few: Realised | None = None) -> Realised:
    """A plan with all its microbatches, whose programs may be those of the first ones (see `carried`).

    Args:
        plan, few: as of `carried`.
    Raises:
        InvalidPlanError, CostModelError: it cannot be lowered or simulated.
    """
    found = carried(plan, few)
    return realised(plan) if found is None else Realised(plan, found.sample.programs, found.simulation)


def programs_of(plan: Plan) -> tuple[RankProgram, ...]:
    """Per rank class a program that holds what the plan's does: its own, or that of the first microbatches.

    Raises:
        InvalidPlanError: the plan does not fit its program.
    """
    found = carried(plan)
    return lower(plan) if found is None else found.sample.programs


def few_orders(program: Program, name: str, orders: Orders, num_stages: int) -> tuple[int, Orders] | None:
    """The first microbatches of a schedule, as many as fill the pipeline, and their orders; None where that saves
    little, or more microbatches hold more.

    Args:
        program: that is run.
        name, orders: of the schedule, with all microbatches.
        num_stages: of the pipeline.
    """
    positions, micros = len(orders), 1 + max(action.microbatch for order in orders for action in order)
    few = positions * (FILLED if num_stages == positions else FILLED_BY_MANY)
    if positions == 1 or micros <= SAVED * few or program.buffer_updates:
        return None
    if program_micro(program, micros).tail < len(program.segments):
        return None
    few += micros % positions
    try:
        found = named_orders(name, positions, few, num_stages // positions)
    except ConstraintError:
        return None
    alike = (StageCosts(),) * num_stages
    same = len({OrderTimes(each, num_stages).peak_bytes(alike) for each in (found, orders)}) == 1
    return (few, found) if same else None


def _carried(plan: Plan, few: Realised | None) -> Carried | None:
    if plan.schedule.name not in NAMED or plan.schedule.num_replicas > 1 or plan.delayed_update is not None:
        return None
    positions, count = len({mesh for stage in plan.stages for mesh in stage.meshes}), plan.num_microbatches
    if positions == 1 or count <= SAVED * FILLED * positions:
        return None
    try:
        orders = named_orders(plan.schedule.name, positions, count, len(plan.stages) // positions)
    except ConstraintError:
        return None
    first = few_orders(plan.program, plan.schedule.name, orders, len(plan.stages))
    if first is None or first[0] + positions > WORTH * count or _under(plan, orders).schedule != plan.schedule:
        return None
    before = few or realised(_under(plan, first[1]))
    num_run = first[0]
    for _ in range(ROUNDS):
        num_run += positions
        if num_run > WORTH * count:
            return None
        more = named_orders(plan.schedule.name, positions, num_run, len(plan.stages) // positions)
        now = realised(_under(plan, more))
        simulation = _carried_on(before, now, positions, (count - num_run) // positions)
        if simulation is not None:
            return Carried(now, simulation)
        before = now
    return None


def _under(plan: Plan, orders: Orders) -> Plan:
    """The plan with other orders of its schedule."""
    positions = {
        device: position
        for stage, held in zip(plan.stages, holders_of(orders), strict=True)
        for position, mesh in zip(held, stage.meshes, strict=True)
        for device in mesh.devices
    }
    placed = spread(complete(plan.schedule.name, orders), tuple(positions[rank] for rank in range(len(positions))))
    schedule = split_classes(placed, plan.cluster.device_kinds())
    return msgspec.structs.replace(plan, schedule=schedule, prediction=None, certificate=None)


def _carried_on(before: Realised, now: Realised, positions: int, rounds: int) -> Simulation | None:
    """The simulation of so many rounds more than `now`, which has one more than `before`; None where its rounds are not
    yet alike."""
    first, last = before.simulation, now.simulation
    added_s, off_s = last.step_s - first.step_s, EXACT * last.step_s
    if first.rank_class != last.rank_class or first.tier_peak_bytes != last.tier_peak_bytes:
        return None
    traces, some_rank_keeps_pace = list[RankTrace](), False
    for program, old, new in zip(now.programs, first.traces, last.traces, strict=True):
        later_s = _later_s(program, new, positions)
        if later_s is None or old.peak_bytes != new.peak_bytes or old.tier_peak_bytes != new.tier_peak_bytes:
            return None
        if later_s[1] > added_s + off_s or abs(new.step_s - old.step_s - added_s) > off_s:
            return None
        some_rank_keeps_pace |= later_s[0] >= added_s - off_s
        traces.append(_with_more(old, new, rounds))
    return msgspec.structs.replace(last, traces=tuple(traces)) if some_rank_keeps_pace else None


def _later_s(program: RankProgram, trace: RankTrace, positions: int) -> tuple[float, float] | None:
    """By how much later what ends a rank's last full round ends than the same of the round before: the least and the
    most; None where no round is full."""
    ends = {program.steps[point.step].action: point.end_s for point in trace.memory}
    every = ((parse_action(text), end_s) for text, end_s in ends.items())
    actions = [(action, end_s) for action, end_s in every if action.kind not in PER_STEP]
    place = {action: at for at, (action, _) in enumerate(actions)}
    length = positions * len({(action.stage, action.kind) for action, _ in actions})
    alike = [
        place.get(msgspec.structs.replace(action, microbatch=action.microbatch + positions), -1) - at == length
        for at, (action, _) in enumerate(actions)
    ]
    stop = _longest(alike, length)
    if stop is None:
        return None
    last = max(action.microbatch for action, _ in actions)
    forwards = [at for at, (action, _) in enumerate(actions) if action.kind is ActionKind.F]
    ends_step = [at for at, (action, _) in enumerate(actions) if action.kind in _BACKWARD and action.microbatch == last]
    stop = min(stop, forwards[-1] - length, ends_step[0] - length)  # from there on it does what ends a step as well
    if stop < length // REACH:
        return None
    apart = [actions[at + length][1] - actions[at][1] for at in range(stop - length // REACH, stop)]
    return min(apart), max(apart)


def _longest(alike: Sequence[bool], least: int) -> int | None:
    """Where the longest stretch of what is true ends; None where it is shorter than so many."""
    found, stop = least - 1, None
    for is_alike, stretch in itertools.groupby(enumerate(alike), key=lambda each: each[1]):
        places = [at for at, _ in stretch]
        if is_alike and len(places) > found:
            found, stop = len(places), places[-1] + 1
    return stop


def _with_more(old: RankTrace, new: RankTrace, rounds: int) -> RankTrace:
    """A trace with so many rounds more, each of which adds what the last one has."""

    def more(before: float, after: float) -> float:
        return after + rounds * (after - before)

    times = {name: more(getattr(old, name), getattr(new, name)) for name in _TIMES}
    streams = {
        name: {stream: more(getattr(old, name).get(stream, 0.0), s) for stream, s in getattr(new, name).items()}
        for name in _STREAMS
    }
    unknown = {"spans": (), "memory": (), "bubbles": (), "peak_step": -1, "peak_instr": -1}
    return msgspec.structs.replace(new, **unknown, **times, **streams)
