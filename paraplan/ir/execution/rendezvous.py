"""Messages as meetings: who waits for whom when sender and receiver block until both are there.

A meeting is a set of ranks, each with the action it comes with: a SEND on the ranks that run one stage and the RECV
on those that run its neighbour, or the REDUCE_GRAD of all ranks that hold a stage. Ranks go through their actions in
order; a meeting takes place once all its ranks have got to it. If every rank gets to its end, so does any run in which
messages block less. Otherwise ranks wait for each other in a circle, which the error spells out.
"""

from __future__ import annotations

from typing import NamedTuple

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.schedule import Action, ActionKind


class MessageEnd(NamedTuple):
    """What one end of a message is to the other.

    Attributes:
        step: from its stage to that of the other end.
        other: what the other end does.
    """

    step: int
    other: ActionKind


MESSAGES = {
    ActionKind.SEND_F: MessageEnd(1, ActionKind.RECV_F),
    ActionKind.RECV_F: MessageEnd(-1, ActionKind.SEND_F),
    ActionKind.SEND_B: MessageEnd(-1, ActionKind.RECV_B),
    ActionKind.RECV_B: MessageEnd(1, ActionKind.SEND_B),
}

Meeting = dict[int, Action]
"""Per class that takes part, the action it comes with."""


def meetings(
    actions: dict[int, tuple[Action, ...]], runners: dict[tuple[int, int], list[int]]
) -> dict[tuple[int, Action], Meeting]:
    """Of every message and reduction of every class, who takes part.

    Args:
        actions: per class.
        runners: per (stage, microbatch), the classes that run it.
    """
    holders: dict[int, list[int]] = {}
    for index, own in actions.items():
        for action in own:
            if index not in holders.setdefault(action.stage, []):
                holders[action.stage].append(index)
    found: dict[tuple[int, Action], Meeting] = {}
    for index, own in actions.items():
        for action in own:
            if action.kind is ActionKind.REDUCE_GRAD:
                found[index, action] = dict.fromkeys(holders[action.stage], action)
            elif action.kind in MESSAGES:
                step, kind = MESSAGES[action.kind]
                here, there = (action.stage, action.microbatch), (action.stage + step, action.microbatch)
                other = Action(stage=there[0], kind=kind, microbatch=there[1])
                found[index, action] = {
                    **dict.fromkeys(runners.get(here, []), action),
                    **dict.fromkeys(runners.get(there, []), other),
                }
    return found


def run_to_end(
    name: str, ranks: dict[int, tuple[int, tuple[Action, ...]]], meeting: dict[tuple[int, Action], Meeting]
) -> None:
    """Let every class go through its actions.

    Args:
        name: of the schedule.
        ranks: per class, its first rank and its actions.
        meeting: see `meetings`.
    Raises:
        InvalidPlanError: some never get to their end.
    """
    at = dict.fromkeys(ranks, 0)
    heads = {index: own[0] if own else None for index, (_, own) in ranks.items()}
    waiting = list(reversed(ranks))
    while waiting:
        index = waiting.pop()
        head = heads[index]
        if head is None:
            continue
        together = meeting.get((index, head), {index: head})
        if any(heads[other] != action for other, action in together.items()):
            continue
        for other in together:
            at[other] += 1
            heads[other] = ranks[other][1][at[other]] if at[other] < len(ranks[other][1]) else None
        waiting.extend(together)
    stuck = {index: head for index, head in heads.items() if head is not None}
    if stuck:
        _explain(name, ranks, stuck, meeting)


def _explain(
    name: str,
    ranks: dict[int, tuple[int, tuple[Action, ...]]],
    stuck: dict[int, Action],
    meeting: dict[tuple[int, Action], Meeting],
) -> None:
    """Follow who waits for whom from the first rank that is stuck, until somebody never comes or a circle closes."""
    index = next(iter(stuck))
    path: list[int] = []
    while index not in path:
        path.append(index)
        head = stuck[index]
        together = meeting[index, head]
        where = f"schedule {name} deadlocks: rank {ranks[index][0]} waits at {head}"
        if len(together) == 1 and head.kind in MESSAGES:
            raise InvalidPlanError(f"{where} and no rank runs stage {head.stage + MESSAGES[head.kind].step} of it")
        late = next(other for other, action in together.items() if stuck.get(other) != action)
        if together[late] not in ranks[late][1]:
            raise InvalidPlanError(f"{where} for a {together[late]} that never comes on rank {ranks[late][0]}; add it")
        index = late
    circle = path[path.index(index) :]
    first = min(circle, key=lambda each: ranks[each][0])
    circle = circle[circle.index(first) :] + circle[: circle.index(first)]
    links = []
    for each in circle:
        late, action = next((i, action) for i, action in meeting[each, stuck[each]].items() if stuck.get(i) != action)
        links.append(f"rank {ranks[each][0]} waits at {stuck[each]} for {action} of rank {ranks[late][0]}")
    raise InvalidPlanError(
        f"schedule {name} deadlocks: {', '.join(links)}; move one of these before what its rank waits at"
    )
