"""Schedules: the ordered actions of every rank, as data.

An action prints as `2F0`: stage, kind, microbatch (`2SEND_F0`; `2UPDATE` has none). A schedule is one
list of actions per class of equal ranks.

Messages: `sSEND_Fm` hands stage s's output of microbatch m to the ranks that run stage s + 1 of m, whose action is
`(s+1)RECV_Fm`; `sSEND_Bm` hands the gradient of its input to stage s - 1, which does `(s-1)RECV_Bm`. Where the same
rank runs both stages there is no message. Each rank's messages are in such an order that even blocking ones, where
sender and receiver wait for each other, never deadlock; a receive stands where its message may begin, so that what
stands between it and its use overlaps.

Replicas: in bidirectional schedules (GEMS, Chimera) every stage is held by `num_replicas` groups of ranks, and each
microbatch runs in one of them. Who runs a microbatch of a stage is who has its F (`runners`). The stage's parameters
are then replicated over the groups as they are over data-parallel ranks, each group's gradients are partial sums over
its own microbatches, and REDUCE_GRAD adds them over all ranks that hold the stage. As a mesh, that is one more axis
of size `num_replicas`, along which parameters are stored R and gradients accumulate P.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from enum import Enum

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.process.memo import SESSION
from paraplan.ir.struct import Value


class ActionKind(Enum):
    """What an action does; `B` is both halves of the backward, `I` and `W` one each."""

    F = "F"
    B = "B"
    I = "I"
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    GATHER = "GATHER"
    OFFLOAD = "OFFLOAD"
    PREFETCH = "PREFETCH"
    UPDATE = "UPDATE"


PER_STEP = frozenset({ActionKind.REDUCE_GRAD, ActionKind.GATHER, ActionKind.UPDATE})
_TEXT = re.compile(r"(\d+)([A-Z_]+)(\d*)$")


class Action(Value, frozen=True, kw_only=True):
    """One thing a rank does; `microbatch` is -1 for those done once a step."""

    stage: int
    kind: ActionKind
    microbatch: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch if self.microbatch >= 0 else ''}"


@SESSION.cached(1 << 18)
def parse_action(text: str) -> Action:
    """`"2F0"` to an action.

    Raises:
        InvalidPlanError: malformed text, or a microbatch missing or given where there is none.
    """
    match = _TEXT.match(text)
    if match is None or match[2] not in ActionKind.__members__:
        raise InvalidPlanError(f"no such action: {text!r} (stage, kind, microbatch, like 2F0)")
    kind = ActionKind[match[2]]
    if (kind in PER_STEP) == bool(match[3]):
        raise InvalidPlanError(f"action {text!r}: {kind.value} takes {'no' if kind in PER_STEP else 'a'} microbatch")
    return Action(stage=int(match[1]), kind=kind, microbatch=int(match[3]) if match[3] else -1)


class Schedule(Value, frozen=True, kw_only=True):
    """The actions of a step.

    Attributes:
        name: the generator's name, e.g. "accumulate", "1f1b".
        classes: per rank class, its actions in text form, in order.
        rank_class: class of every rank.
        num_replicas: groups of ranks that hold each stage and share its microbatches out among them; groups of one
            stage may be the same ranks (the middle one of an odd number).
    """

    name: str
    classes: tuple[tuple[str, ...], ...]
    rank_class: tuple[int, ...]
    num_replicas: int = 1

    def actions(self, rank: int) -> tuple[Action, ...]:
        """The actions of one rank."""
        return tuple(parse_action(text) for text in self.classes[self.rank_class[rank]])

    def backward_parts(self) -> dict[int, frozenset[ActionKind]]:
        """Per stage, which of B, I and W its actions run; a schedule may split some microbatches' backwards only."""
        found: dict[int, set[ActionKind]] = {}
        for action in map(parse_action, {text for texts in self.classes for text in texts}):
            if action.kind in (ActionKind.B, ActionKind.I, ActionKind.W):
                found.setdefault(action.stage, set()).add(action.kind)
        return {stage: frozenset(kinds) for stage, kinds in found.items()}

    def runners(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Per (stage, microbatch), the ranks that run it: those with its F, ascending."""
        forwards = [
            tuple(
                (action.stage, action.microbatch) for action in map(parse_action, texts) if action.kind is ActionKind.F
            )
            for texts in self.classes
        ]
        found: dict[tuple[int, int], list[int]] = {}
        for rank, of in enumerate(self.rank_class):
            for key in forwards[of]:
                found.setdefault(key, []).append(rank)
        return {key: tuple(found[key]) for key in sorted(found)}


def accumulate(num_microbatches: int, num_ranks: int, forwards_first: bool = False) -> Schedule:
    """One stage: forward and backward of each microbatch in turn, one reduction, one update.

    Args:
        num_microbatches: of a step.
        num_ranks: all of one class.
        forwards_first: all forwards, then all backwards.
    """
    texts = [f"0{kind}{m}" for m in range(num_microbatches) for kind in "FB"]
    if forwards_first:
        texts.sort(key=lambda text: text[1] == "B")
    name = "forwards-first" if forwards_first else "accumulate"
    return Schedule(name=name, classes=((*texts, "0REDUCE_GRAD", "0UPDATE"),), rank_class=(0,) * num_ranks)


def split_classes(schedule: Schedule, kinds: tuple[Hashable, ...]) -> Schedule:
    """The schedule with classes that also agree in the kind of their device.

    Ranks of a class are simulated once, so they must be equal in what they sit on, too.

    Args:
        schedule: any.
        kinds: per rank, what its device is; ranks of equal kinds may share a class.
    Returns:
        Classes in the order their first rank appears; those equal in actions and kind are one.
    """
    found: dict[tuple[tuple[str, ...], Hashable], int] = {}
    pairs = zip(schedule.rank_class, kinds, strict=True)
    rank_class = tuple(found.setdefault((schedule.classes[old], kind), len(found)) for old, kind in pairs)
    return Schedule(
        name=schedule.name,
        classes=tuple(actions for actions, _ in found),
        rank_class=rank_class,
        num_replicas=schedule.num_replicas,
    )


def spread(schedule: Schedule, positions: tuple[int, ...]) -> Schedule:
    """A pipeline's schedule on a cluster's ranks.

    Args:
        schedule: of one rank per position of the pipeline.
        positions: per rank of the cluster, its position; data- and tensor-parallel ranks share one.
    Returns:
        The same actions, every rank doing those of its position.
    """
    rank_class = tuple(schedule.rank_class[position] for position in positions)
    return Schedule(
        name=schedule.name, classes=schedule.classes, rank_class=rank_class, num_replicas=schedule.num_replicas
    )
