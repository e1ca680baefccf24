"""A schedule is complete, ordered and free of deadlock.

Complete: every stage runs F and its backward (B, or I and W) once per microbatch on every rank that holds it, and
each per-step action once. Ordered: on a rank a microbatch's backward follows its forward, W follows I, a reduction
follows every backward, an update the reduction; what another rank makes is received before it is used, and sent
after it is made. Free of deadlock: a simulated run in which a receive waits for its send always ends. The number of
microbatches in flight is returned, for memory.
"""

from __future__ import annotations

from collections import Counter

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.schedule import Action, ActionKind, Schedule

_NEIGHBOUR = {ActionKind.RECV_F: -1, ActionKind.SEND_B: -1, ActionKind.RECV_B: 1, ActionKind.SEND_F: 1}
_PARTNER = {ActionKind.RECV_F: (ActionKind.SEND_F, -1), ActionKind.RECV_B: (ActionKind.SEND_B, 1)}


def verify_schedule(
    schedule: Schedule, num_stages: int, num_microbatches: int, stages_of_rank: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    """Check a schedule.

    Args:
        schedule: what is checked.
        num_stages, num_microbatches: what it must cover.
        stages_of_rank: per rank, the stages it holds.
    Returns:
        Per rank, the most microbatches whose forward has run and whose backward has not, over its stages.
    Raises:
        InvalidPlanError: naming rank, action and place.
    """
    if len(schedule.rank_class) != len(stages_of_rank):
        raise InvalidPlanError(
            f"schedule {schedule.name} has {len(schedule.rank_class)} ranks, the cluster {len(stages_of_rank)}"
        )
    holders = _holders(stages_of_rank, num_stages)
    flights = []
    for rank, stages in enumerate(stages_of_rank):
        if not 0 <= schedule.rank_class[rank] < len(schedule.classes):
            raise InvalidPlanError(f"rank {rank}: no schedule class {schedule.rank_class[rank]}")
        flights.append(_verify_rank(schedule.actions(rank), stages, num_microbatches, rank, holders))
    _verify_progress(schedule, holders)
    return tuple(flights)


def _holders(stages_of_rank: tuple[tuple[int, ...], ...], num_stages: int) -> dict[int, list[int]]:
    """Ranks that hold each stage."""
    return {stage: [rank for rank, held in enumerate(stages_of_rank) if stage in held] for stage in range(num_stages)}


def _verify_rank(
    actions: tuple[Action, ...], stages: tuple[int, ...], m: int, rank: int, holders: dict[int, list[int]]
) -> int:
    seen: Counter[tuple[int, ActionKind, int]] = Counter()
    in_flight: set[tuple[int, int]] = set()
    most = 0
    for position, action in enumerate(actions):
        at = f"rank {rank}, action {position} ({action})"
        key = (action.stage, action.kind, action.microbatch)
        if action.stage not in stages:
            raise InvalidPlanError(f"{at}: the rank holds stages {stages}")
        if action.microbatch >= m:
            raise InvalidPlanError(f"{at}: there are {m} microbatches")
        if seen[key]:
            raise InvalidPlanError(f"{at}: done twice")
        _verify_order(action, seen, m, at)
        _verify_transfer(action, seen, at, rank, holders)
        seen[key] += 1
        if action.kind is ActionKind.F:
            in_flight.add((action.stage, action.microbatch))
        elif action.kind in (ActionKind.B, ActionKind.W):
            in_flight.discard((action.stage, action.microbatch))
        most = max(most, len(in_flight))
    for stage in stages:
        for micro in range(m):
            whole = seen[stage, ActionKind.B, micro]
            halves = seen[stage, ActionKind.I, micro] and seen[stage, ActionKind.W, micro]
            if not seen[stage, ActionKind.F, micro] or not (whole or halves):
                raise InvalidPlanError(
                    f"rank {rank}: stage {stage} misses the forward or backward of microbatch {micro}"
                )
        if not seen[stage, ActionKind.UPDATE, -1] or not seen[stage, ActionKind.REDUCE_GRAD, -1]:
            raise InvalidPlanError(f"rank {rank}: stage {stage} misses its REDUCE_GRAD or UPDATE")
    return most


def _verify_order(action: Action, seen: Counter[tuple[int, ActionKind, int]], m: int, at: str) -> None:
    stage, micro = action.stage, action.microbatch
    if action.kind in (ActionKind.B, ActionKind.I) and not seen[stage, ActionKind.F, micro]:
        raise InvalidPlanError(f"{at}: backward before forward")
    if action.kind is ActionKind.W and not seen[stage, ActionKind.I, micro]:
        raise InvalidPlanError(f"{at}: weight gradient before input gradient")
    halves = {ActionKind.B: ActionKind.I, ActionKind.I: ActionKind.B}
    if action.kind in halves and seen[stage, halves[action.kind], micro]:
        other = halves[action.kind].value
        raise InvalidPlanError(f"{at}: {action.kind.value} after {other}; the backward is either whole or split")
    if action.kind is ActionKind.REDUCE_GRAD:
        done = sum(seen[stage, kind, k] for kind in (ActionKind.B, ActionKind.W) for k in range(m))
        if done < m:
            raise InvalidPlanError(f"{at}: only {done} of {m} backwards are done")
    if action.kind is ActionKind.UPDATE and not seen[stage, ActionKind.REDUCE_GRAD, -1]:
        raise InvalidPlanError(f"{at}: update before the gradients are reduced")


def _verify_transfer(
    action: Action, seen: Counter[tuple[int, ActionKind, int]], at: str, rank: int, holders: dict[int, list[int]]
) -> None:
    """What crosses ranks: received before it is used, sent after it is made, and only between neighbours."""
    stage, micro = action.stage, action.microbatch
    if action.kind in _NEIGHBOUR and stage + _NEIGHBOUR[action.kind] not in holders:
        raise InvalidPlanError(f"{at}: there is no stage {stage + _NEIGHBOUR[action.kind]}")
    needs: dict[ActionKind, tuple[int, tuple[ActionKind, ...]]] = {
        ActionKind.F: (stage - 1, (ActionKind.RECV_F,)),
        ActionKind.B: (stage + 1, (ActionKind.RECV_B,)),
        ActionKind.I: (stage + 1, (ActionKind.RECV_B,)),
        ActionKind.SEND_F: (stage, (ActionKind.F,)),
        ActionKind.SEND_B: (stage, (ActionKind.B, ActionKind.I)),
    }
    if action.kind not in needs:
        return
    source, before = needs[action.kind]
    elsewhere = source in holders and (source == stage or rank not in holders[source])
    if elsewhere and not any(seen[stage, kind, micro] for kind in before):
        raise InvalidPlanError(
            f"{at}: no {' or '.join(kind.value for kind in before)} of microbatch {micro} comes before it"
        )


def _verify_progress(schedule: Schedule, holders: dict[int, list[int]]) -> None:
    """Run sends and receives only: a receive needs the send of the neighbouring stage, on every rank there."""
    queues = {rank: list(schedule.actions(rank)) for rank in range(len(schedule.rank_class))}
    sent: set[tuple[int, int, ActionKind, int]] = set()
    moving = True
    while moving:
        moving = False
        for rank, queue in queues.items():
            while queue and _ready(queue[0], sent, holders):
                action = queue.pop(0)
                sent.add((rank, action.stage, action.kind, action.microbatch))
                moving = True
    stuck = {rank: queue[0] for rank, queue in queues.items() if queue}
    if stuck:
        rank, action = next(iter(stuck.items()))
        raise InvalidPlanError(
            f"schedule {schedule.name} deadlocks: rank {rank} waits at {action} for a send that never comes"
        )


def _ready(action: Action, sent: set[tuple[int, int, ActionKind, int]], holders: dict[int, list[int]]) -> bool:
    if action.kind not in _PARTNER:
        return True
    kind, step = _PARTNER[action.kind]
    neighbour = action.stage + step
    return all((rank, neighbour, kind, action.microbatch) in sent for rank in holders.get(neighbour, []))
