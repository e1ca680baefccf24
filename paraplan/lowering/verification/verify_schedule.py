"""A schedule is complete, ordered and free of deadlock.

Complete: every microbatch runs F and its backward (B, or I and W) once on every rank of one group that holds the
stage, messages have both ends, and every rank does the per-step actions of its stages once. Ordered: on a rank a
microbatch's backward follows its forward, W follows I, a reduction follows every backward, an update the reduction;
what another stage makes is there before it is used, and sent after it is made. Free of deadlock: a simulated run ends
in which every message and every reduction waits until all its ranks have got to it (`rendezvous.py`). The number of
microbatches in flight is returned, for memory.

Ranks of a class are equal, so a class is verified once; a message names its first rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.rendezvous import MESSAGES, meetings, run_to_end
from paraplan.ir.execution.schedule import Action, ActionKind, Schedule, parse_action

_BACKWARD = {ActionKind.B: ActionKind.I, ActionKind.I: ActionKind.B}
_BEFORE_SENDING = {ActionKind.SEND_F: (ActionKind.F,), ActionKind.SEND_B: (ActionKind.B, ActionKind.I)}


@dataclass
class _Rank:
    """A class on its way through its actions.

    Attributes:
        rank: its first rank.
        stages: what it holds.
        actions: what it does.
        seen: what it has done.
        in_flight: (stage, microbatch) whose forward has run and whose backward has not.
        most: the most of these at once.
    """

    rank: int
    stages: tuple[int, ...]
    actions: tuple[Action, ...]
    seen: Counter[tuple[int, ActionKind, int]] = field(default_factory=Counter)
    in_flight: set[tuple[int, int]] = field(default_factory=set)
    most: int = 0

    def has(self, stage: int, kinds: tuple[ActionKind, ...], microbatch: int) -> bool:
        """Whether one of some actions is done."""
        return any(self.seen[stage, kind, microbatch] for kind in kinds)


def verify_schedule(
    schedule: Schedule,
    num_stages: int,
    num_microbatches: int,
    stages_of_rank: tuple[tuple[int, ...], ...],
    max_in_flight: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """Check a schedule.

    Args:
        schedule: what is checked.
        num_stages, num_microbatches: what it must cover.
        stages_of_rank: per rank, the stages it holds.
        max_in_flight: per rank, the most microbatches it has memory for, over its stages.
    Returns:
        Per rank, the most microbatches whose forward has run and whose backward has not, over its stages.
    Raises:
        InvalidPlanError: naming rank, action and place.
    """
    classes = _ranks(schedule, stages_of_rank)
    runners: dict[tuple[int, int], list[int]] = {}
    for index, each in classes.items():
        for action in each.actions:
            if action.kind is ActionKind.F and index not in runners.setdefault((action.stage, action.microbatch), []):
                runners[action.stage, action.microbatch].append(index)
    for index, each in classes.items():
        _verify_rank(index, each, (num_stages, num_microbatches, schedule.num_replicas), runners)
    _verify_complete(schedule, classes, num_stages, num_microbatches)
    meeting = meetings({index: each.actions for index, each in classes.items()}, runners)
    run_to_end(schedule.name, {i: (each.rank, each.actions) for i, each in classes.items()}, meeting)
    flights = tuple(classes[index].most for index in schedule.rank_class)
    for rank, (most, limit) in enumerate(zip(flights, max_in_flight or flights, strict=True)):
        if most > limit:
            _name_overflow(schedule, classes[schedule.rank_class[rank]], rank, limit)
    return flights


def _ranks(schedule: Schedule, stages_of_rank: tuple[tuple[int, ...], ...]) -> dict[int, _Rank]:
    """What every class does and holds, by its number, in the order of first ranks."""
    if len(schedule.rank_class) != len(stages_of_rank):
        raise InvalidPlanError(
            f"schedule {schedule.name} has {len(schedule.rank_class)} ranks, the cluster {len(stages_of_rank)}"
        )
    classes: dict[int, _Rank] = {}
    for rank, (index, stages) in enumerate(zip(schedule.rank_class, stages_of_rank, strict=True)):
        if not 0 <= index < len(schedule.classes):
            raise InvalidPlanError(f"rank {rank}: no schedule class {index}")
        if index not in classes:
            classes[index] = _Rank(rank, stages, tuple(map(parse_action, schedule.classes[index])))
        elif classes[index].stages != stages:
            first = classes[index]
            raise InvalidPlanError(
                f"schedule class {index}: rank {first.rank} holds stages {first.stages} and rank {rank} {stages}; give "
                "ranks that hold different stages a class of their own"
            )
    return classes


def _verify_rank(
    index: int, each: _Rank, sizes: tuple[int, int, int], runners: dict[tuple[int, int], list[int]]
) -> None:
    num_stages, m, num_replicas = sizes
    own = Counter(action.stage for action in each.actions if action.kind is ActionKind.F)
    for position, action in enumerate(each.actions):
        at = f"rank {each.rank}, action {position} ({action})"
        key = (action.stage, action.kind, action.microbatch)
        if action.stage not in each.stages:
            raise InvalidPlanError(f"{at}: the rank holds stages {each.stages}")
        if action.microbatch >= m:
            raise InvalidPlanError(f"{at}: there are {m} microbatches")
        if each.seen[key]:
            raise InvalidPlanError(f"{at}: done twice")
        _verify_order(action, each, m if num_replicas == 1 else own[action.stage], at)
        _verify_hand_over(action, index, each, num_stages, runners, at)
        each.seen[key] += 1
        if action.kind is ActionKind.F:
            each.in_flight.add((action.stage, action.microbatch))
        elif action.kind in (ActionKind.B, ActionKind.W):
            each.in_flight.discard((action.stage, action.microbatch))
        each.most = max(each.most, len(each.in_flight))


def _verify_order(action: Action, each: _Rank, own: int, at: str) -> None:
    """Among the actions of one stage on one rank."""
    stage, micro, kind = action.stage, action.microbatch, action.kind
    if kind in _BACKWARD and not each.has(stage, (ActionKind.F,), micro):
        raise InvalidPlanError(f"{at}: backward before forward")
    if kind is ActionKind.W and not each.has(stage, (ActionKind.I,), micro):
        raise InvalidPlanError(f"{at}: weight gradient before input gradient")
    if kind in _BACKWARD and each.has(stage, (_BACKWARD[kind],), micro):
        other = _BACKWARD[kind].value
        raise InvalidPlanError(f"{at}: {kind.value} after {other}; the backward is either whole or split")
    if kind is ActionKind.REDUCE_GRAD:
        done = sum(n for (s, k, _), n in each.seen.items() if s == stage and k in (ActionKind.B, ActionKind.W))
        if done < own:
            raise InvalidPlanError(f"{at}: only {done} of {own} backwards are done")
    if kind is ActionKind.UPDATE and not each.has(stage, (ActionKind.REDUCE_GRAD,), -1):
        raise InvalidPlanError(f"{at}: update before the gradients are reduced")


def _verify_hand_over(
    action: Action, index: int, each: _Rank, num_stages: int, runners: dict[tuple[int, int], list[int]], at: str
) -> None:
    """What another stage makes is there before it is used, what is sent is made, and messages cross ranks."""
    stage, micro, kind = action.stage, action.microbatch, action.kind
    if kind in MESSAGES:
        other = stage + MESSAGES[kind].step
        if not 0 <= other < num_stages:
            raise InvalidPlanError(f"{at}: there is no stage {other}")
        if index in runners.get((other, micro), []):
            raise InvalidPlanError(f"{at}: the rank runs stage {other} itself, so there is no message; leave it out")
        if kind in _BEFORE_SENDING and not each.has(stage, _BEFORE_SENDING[kind], micro):
            raise InvalidPlanError(
                f"{at}: no {' or '.join(k.value for k in _BEFORE_SENDING[kind])} of microbatch {micro} comes before it"
            )
    if kind is ActionKind.F:
        source, received = stage - 1, ActionKind.RECV_F
    elif kind in _BACKWARD:
        source, received = stage + 1, ActionKind.RECV_B
    else:
        return
    if not 0 <= source < num_stages:
        return
    if (source, micro) not in runners:
        raise InvalidPlanError(f"{at}: no rank runs stage {source} of microbatch {micro}; add its F and backward")
    if index not in runners.get((source, micro), []):
        if not each.has(stage, (received,), micro):
            raise InvalidPlanError(f"{at}: no {received.value} of microbatch {micro} comes before it")
    elif not each.has(source, (ActionKind.F,) if kind is ActionKind.F else tuple(_BACKWARD), micro):
        raise InvalidPlanError(f"{at}: stage {source}, on the same rank, has not run microbatch {micro}; put it before")


def _verify_complete(schedule: Schedule, classes: dict[int, _Rank], num_stages: int, m: int) -> None:
    for stage in range(num_stages):
        groups: dict[frozenset[int], int] = {}
        for each in classes.values():
            if stage in each.stages:
                mine = frozenset(k for (s, kind, k) in each.seen if s == stage and kind is ActionKind.F)
                groups.setdefault(mine, each.rank)
                _verify_backwards(schedule, each, stage, mine, m)
        missing = sorted(set(range(m)) - frozenset().union(*groups))
        if missing:
            raise InvalidPlanError(f"stage {stage}: no rank runs microbatch {missing[0]}")
        if sum(map(len, groups)) > m or len(groups) > schedule.num_replicas:
            listed = "; ".join(f"rank {rank} runs {sorted(micros)}" for micros, rank in groups.items())
            raise InvalidPlanError(
                f"stage {stage}: at most {schedule.num_replicas} groups of ranks should share {m} microbatches out, "
                f"each run by one group, and {listed}"
            )


def _verify_backwards(schedule: Schedule, each: _Rank, stage: int, mine: frozenset[int], m: int) -> None:
    """One rank's share of a stage: every backward of its forwards, all microbatches where there is one group."""
    for micro in range(m) if schedule.num_replicas == 1 else sorted(mine):
        if micro not in mine or not each.has(stage, (ActionKind.B, ActionKind.W), micro):
            raise InvalidPlanError(
                f"rank {each.rank}: stage {stage} misses the forward or backward of microbatch {micro}"
            )
    if not each.has(stage, (ActionKind.UPDATE,), -1) or not each.has(stage, (ActionKind.REDUCE_GRAD,), -1):
        raise InvalidPlanError(f"rank {each.rank}: stage {stage} misses its REDUCE_GRAD or UPDATE")


def _name_overflow(schedule: Schedule, each: _Rank, rank: int, limit: int) -> None:
    """Raise at the first forward that is one too many."""
    flying: set[tuple[int, int]] = set()
    for position, action in enumerate(each.actions):
        if action.kind is ActionKind.F:
            flying.add((action.stage, action.microbatch))
        elif action.kind in (ActionKind.B, ActionKind.W):
            flying.discard((action.stage, action.microbatch))
        if len(flying) > limit:
            raise InvalidPlanError(
                f"schedule {schedule.name}, rank {rank}, action {position} ({action}): {len(flying)} microbatches "
                f"are in flight and there is memory for {limit}; run a backward before it"
            )
