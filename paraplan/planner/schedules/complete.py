"""Orders of computations made whole: messages, reductions and updates put in.

The orders are simulated (`evaluate.py`), and everything is written down in the order in which it happens: a message,
on both sides, when its sender has made it. That is one line of all events in which everything stands after what it
needs, and every rank's list is its part of that line, so ranks that block in every message still all get to their end:
the first event of the line not yet done can always be. A receive stands at the first place where its message may begin,
hence before whatever the receiver does meanwhile. A stage's REDUCE_GRAD follows its last backward on any rank that
holds it; updates come last.
"""

from __future__ import annotations

from paraplan.ir.execution.rendezvous import MESSAGES
from paraplan.ir.execution.schedule import Action, ActionKind, Schedule
from paraplan.planner.schedules.event_simulation import evaluate
from paraplan.planner.schedules.schedule_problem import COMPUTE, Orders, StageCosts, stages_of


def complete(
    name: str, orders: Orders, stages: tuple[StageCosts, ...] | None = None, num_replicas: int = 1
) -> Schedule:
    """A schedule from its computations.

    Args:
        name: of the schedule.
        orders: per position, its computations in order.
        stages: costs that say how messages and computations interleave; None for forward 1, backward 2.
        num_replicas: positions that hold each stage.
    Returns:
        One rank per position.
    Raises:
        InvalidPlanError: the orders wait for each other.
    """
    if stages is None:
        stages = (StageCosts(),) * (1 + max(action.stage for order in orders for action in order))
    lists: list[list[str]] = [[] for _ in orders]
    for event in evaluate(orders, stages).events:
        action = event.action
        if action.kind in MESSAGES:
            step, other = MESSAGES[action.kind]
            received = Action(stage=action.stage + step, kind=other, microbatch=action.microbatch)
            for position, end in zip(event.positions, (action, received), strict=True):
                lists[position].append(str(end))
        else:
            for position in event.positions:
                lists[position].append(str(action))
    for position, held in enumerate(stages_of(orders)):
        lists[position] += [str(Action(stage=stage, kind=ActionKind.UPDATE)) for stage in held]
    classes = tuple(dict.fromkeys(map(tuple, lists)))
    number = {actions: index for index, actions in enumerate(classes)}
    return Schedule(
        name=name, classes=classes, rank_class=tuple(number[tuple(each)] for each in lists), num_replicas=num_replicas
    )


def orders_of(schedule: Schedule) -> Orders:
    """The computations of every rank of a schedule, in order."""
    return tuple(
        tuple(action for action in schedule.actions(rank) if action.kind in COMPUTE)
        for rank in range(len(schedule.rank_class))
    )
