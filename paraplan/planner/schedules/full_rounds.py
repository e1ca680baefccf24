"""A pipeline of many microbatches from its first ones: once it is full, rounds repeat.

A round is as many microbatches as there are positions. A plan is lowered and simulated for as few as give every
position two rounds of equal computations, and where that makes two rounds of equal steps, all microbatches are
simulated by these (`repeated_rounds`): exactly, without lowering them. What ranks hold is what they hold of the first
ones.

Of one stage a round is a microbatch. Limits: of pipelines, schedules by name that hold each stage on one position, and
whose in-flight microbatches do not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from paraplan.cost_models.predict import plan_costs
from paraplan.cost_models.realised_plan import Realised, realised
from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.cost_models.simulator.repeated_rounds import simulate_rounds
from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.execution.schedule import Action, Schedule, accumulate, parse_action, split_classes, spread
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

FULL, FULL_BY_MANY = 3, 4
"""Rounds with which named schedules have two that are alike: where positions have one stage, and several."""
LEAST, ALONE, ROUNDS, WORTH = 2, 4, 3, 0.8
"""Rounds that are looked at first, of pipelines and of one stage; how many more are; of all microbatches, how many are
not worth carrying on from."""


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
    """The first microbatches of a schedule, as many as give every position two rounds alike, and their orders; None
    where that saves little, or more microbatches hold more.

    Args:
        program: that is run.
        name, orders: of the schedule, with all microbatches.
        num_stages: of the pipeline.
    """
    positions, micros = len(orders), 1 + max(action.microbatch for order in orders for action in order)
    if positions == 1 or program.buffer_updates or program_micro(program, micros).tail < len(program.segments):
        return None
    for few in range(LEAST * positions + micros % positions, int(WORTH * micros) + 1, positions):
        try:
            found = named_orders(name, positions, few, num_stages // positions)
        except ConstraintError:
            return None
        if all(_has_rounds(order, positions) for order in found):
            alike = (StageCosts(),) * num_stages
            same = len({OrderTimes(each, num_stages).peak_bytes(alike) for each in (found, orders)}) == 1
            return (few, found) if same else None
    return None


def _has_rounds(order: Sequence[Action], microbatches: int) -> bool:
    """Whether an order has a round of so many microbatches, and then the same for the next ones."""
    alike = 0
    length = microbatches * sum(action.microbatch == 0 for action in order)
    for action, later in zip(order, order[length:], strict=False):
        is_alike = later == msgspec.structs.replace(action, microbatch=action.microbatch + microbatches)
        alike = alike + 1 if is_alike else 0
        if alike == length:
            return True
    return False


def _carried(plan: Plan, few: Realised | None) -> Carried | None:
    positions, count = len({mesh for stage in plan.stages for mesh in stage.meshes}), plan.num_microbatches
    if plan.delayed_update is not None or plan.schedule.num_replicas > 1 or num_run(plan) < count:
        return None
    for number, sample in enumerate(_alone(plan) if len(plan.stages) == 1 else _filled(plan, positions)):
        if few is not None and number == 0 and num_run(few.plan) == num_run(sample):
            sample, programs = few.plan, few.programs
        else:
            programs = lower(sample)
        more, classes = (count - num_run(sample)) // positions, sample.schedule.rank_class
        found = simulate_rounds(programs, plan_costs(sample), classes, positions, more)
        if found is not None and (few is None or found.few.peak_bytes == few.simulation.peak_bytes):
            return Carried(Realised(sample, programs, found.few), found.all)
    return None


def num_run(plan: Plan) -> int:
    """Microbatches that a plan's schedule runs."""
    return 1 + max(parse_action(text).microbatch for actions in plan.schedule.classes for text in actions)


def num_lowered(programs: Sequence[RankProgram]) -> int:
    """Microbatches that a plan's programs run: of those of the first microbatches, fewer than its schedule does."""
    return 1 + max(step.microbatch for program in programs for step in program.steps)


def _alone(plan: Plan) -> Iterator[Plan]:
    """A plan of one stage that runs the first microbatches alone, more and more of them; nothing where that saves
    little, and where something is read or done for several microbatches."""
    program, count = plan.program, plan.num_microbatches
    apart = not program.buffer_updates and program_micro(program, count).tail == len(program.segments)
    apart = apart and plan.memory_actions is None and plan.reduce_every == 1
    if not apart or plan.schedule != _accumulating(plan, count):
        return
    for few in range(ALONE, min(int(WORTH * count), ALONE + ROUNDS) + 1):
        yield msgspec.structs.replace(plan, schedule=_accumulating(plan, few), prediction=None, certificate=None)


def _accumulating(plan: Plan, count: int) -> Schedule:
    mesh, kinds = plan.stages[0].mesh, plan.cluster.device_kinds()
    return split_classes(accumulate(count, mesh.size), tuple(kinds[device] for device in mesh.devices))


def _filled(plan: Plan, positions: int) -> Iterator[Plan]:
    """A pipeline that runs as few microbatches as give its positions two rounds alike, and more rounds of them; nothing
    where that saves little, or more microbatches hold more."""
    name, count, each = plan.schedule.name, plan.num_microbatches, len(plan.stages) // positions
    if name not in NAMED or positions == 1 or WORTH * count < LEAST * positions:
        return
    try:
        orders = named_orders(name, positions, count, each)
    except ConstraintError:
        return
    first = few_orders(plan.program, name, orders, len(plan.stages))
    if first is None or _under(plan, orders).schedule != plan.schedule:
        return
    most = min(int(WORTH * count), first[0] + ROUNDS * positions)
    for few in range(first[0], most + 1, positions):
        yield _under(plan, named_orders(name, positions, few, each))


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
