"""Orders of computations made whole: messages, reductions and updates put in.

The orders are simulated (`event_simulation`), and everything is written down in the order in which it happens:
messages when their sender has made them, computations when they end. That is one line of all events in which
everything stands after what it needs, and every rank's list is its part of that line, so ranks that block in every
message still all get to their end: the first event of the line not yet done can always be. So a receive stands before
the computation during which its message begins, and the two are under way together (Megatron-LM's
`--overlap-p2p-communication-warmup-flush`). For ranks in step with each other that takes messages that take time: one
that took none would begin when its receiver has just ended a computation, and be waited for. A stage's REDUCE_GRAD
follows its last backward on any rank that holds it; updates come last.
"""

from __future__ import annotations

from paraplan.ir.execution.rendezvous import MESSAGES
from paraplan.ir.execution.schedule import Action, ActionKind, Schedule
from paraplan.planner.schedules.event_simulation import Event, evaluate
from paraplan.planner.schedules.schedule_problem import COMPUTE, Orders, StageCosts, stages_of

MESSAGE_S = 0.05
"""Of a message, where a forward takes 1."""


def complete(
    name: str, orders: Orders, stages: tuple[StageCosts, ...] | None = None, num_replicas: int = 1
) -> Schedule:
    """A schedule from its computations.

    Args:
        name: of the schedule.
        orders: per position, its computations in order.
        stages: costs that say how messages and computations interleave; None for forward 1, backward 2, message 0.05.
        num_replicas: positions that hold each stage.
    Returns:
        One rank per position.
    Raises:
        InvalidPlanError: the orders wait for each other.
    """
    if stages is None:
        costs = StageCosts(send_forward_s=MESSAGE_S, send_backward_s=MESSAGE_S)
        stages = (costs,) * (1 + max(action.stage for order in orders for action in order))
    lists: list[list[str]] = [[] for _ in orders]
    for event in sorted(evaluate(orders, stages).events, key=_written_s):
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


def _written_s(event: Event) -> float:
    """When an event is written down; at the same time, in the order of their beginnings."""
    return event.end_s if event.action.kind in COMPUTE else event.start_s


def orders_of(schedule: Schedule) -> Orders:
    """The computations of every rank of a schedule, in order."""
    return tuple(
        tuple(action for action in schedule.actions(rank) if action.kind in COMPUTE)
        for rank in range(len(schedule.rank_class))
    )
