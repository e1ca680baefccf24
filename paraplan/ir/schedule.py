"""Schedules: the ordered actions of every rank, as data.

An action prints as `2F0`: stage, kind, microbatch (`2SEND_F0`; `2UPDATE` has none). A schedule is one
list of actions per class of equal ranks.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from enum import Enum

from paraplan.ir.errors import InvalidPlanError
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
    """

    name: str
    classes: tuple[tuple[str, ...], ...]
    rank_class: tuple[int, ...]

    def actions(self, rank: int) -> tuple[Action, ...]:
        """The actions of one rank."""
        return tuple(parse_action(text) for text in self.classes[self.rank_class[rank]])


def accumulate(num_microbatches: int, num_ranks: int) -> Schedule:
    """One stage: forward and backward of each microbatch in turn, one reduction, one update."""
    texts = [f"0{kind}{m}" for m in range(num_microbatches) for kind in "FB"]
    return Schedule(
        name="accumulate", classes=((*texts, "0REDUCE_GRAD", "0UPDATE"),), rank_class=(0,) * num_ranks
    )  # fmt: skip


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
    return Schedule(name=schedule.name, classes=tuple(actions for actions, _ in found), rank_class=rank_class)
