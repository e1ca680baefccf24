"""How many microbatches wait for their backward in a pipeline, whatever its cuts.

After some action a position of a schedule has the most forwards behind it whose backwards are to come: its count per
stage is then (`fullest`). Gradients that are added up are there beside them if backwards of its stages have begun; if
not, the most forwards once they have are known as well.
Which stage a segment is in is free, but not wholly so: where no position may take longer than a limit, segments from
its first on fill positions from the front, or from the back, no faster than that limit, so that each has an earliest
and a latest position, and waits at least as often as the least of the stages between (`waiting`). Where a position has
several stages they are taken to be cut evenly, but for so many stages more or less (`spread`): each segment is that
near to the stage its middle is in where stages take equal shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.planner.schedules.schedule_problem import BACKWARD, Orders


class Fullest(NamedTuple):
    """Where positions have most microbatches in flight, the last time that they do.

    Attributes:
        counts: per stage, the microbatches whose backward is to come; where two positions hold a stage, of both.
        have_grads: gradients of all stages are there then, wherever microbatches' add up.
    """

    counts: tuple[int, ...]
    have_grads: bool


def fullest(orders: Orders) -> tuple[Fullest, ...]:
    """Where the positions of a schedule have most microbatches in flight; and, where gradients are not there then, of
    when they are."""
    ever, late = Counter[int](), Counter[int]()
    have_grads = True
    for order in orders:
        stages = len({action.stage for action in order})
        flying = most = since = ever_at = late_at = 0
        begun: set[int] = set()
        then = False
        for at, action in enumerate(order, 1):
            is_forward = action.kind is ActionKind.F
            flying += is_forward - (action.kind in BACKWARD)
            if action.kind in (ActionKind.B, ActionKind.W):
                begun.add(action.stage)
            have_begun = len(begun) == stages
            if is_forward and flying >= most:
                most, ever_at, then = flying, at, have_begun
            if have_begun and flying >= since:
                since, late_at = flying, at
        _fly(ever, order[:ever_at])
        _fly(late, order[:late_at])
        have_grads = have_grads and then
    count = 1 + max(action.stage for order in orders for action in order)
    first, second = (tuple(found[stage] for stage in range(count)) for found in (ever, late))
    return (Fullest(first, True),) if have_grads else (Fullest(first, False), Fullest(second, True))


def _fly(counts: Counter[int], actions: Sequence[Action]) -> None:
    """Add, per stage, the forwards of some actions whose backwards are to come."""
    for action in actions:
        counts[action.stage] += (action.kind is ActionKind.F) - (action.kind in BACKWARD)


def most_at_once(orders: Orders) -> int:
    """The most microbatches of the first stage whose backward is to come, at one position."""
    most = 0
    for order in orders:
        flying = 0
        for action in order:
            if action.stage == 0:
                flying += (action.kind is ActionKind.F) - (action.kind in BACKWARD)
                most = max(most, flying)
    return most


def waiting(
    counts: Sequence[int], seconds: Sequence[float], limit_s: float | None, spread: int = 1
) -> list[int] | None:
    """Per segment, in how many microbatches it waits at least.

    Args:
        counts: per stage (see `fullest`).
        seconds: per segment, what a microbatch takes at least; where stages are cut evenly, what they are even by.
        limit_s: what a position, of one stage, may take of a microbatch; None where stages are cut evenly.
        spread: stages that a segment may be off an even cut.
    Returns:
        None where no cut keeps the limit.
    """
    if limit_s is None:
        stages = even_stages(seconds, len(counts))
        near = [range(max(stage - spread, 0), min(stage + spread + 1, len(counts))) for stage in stages]
    else:
        earliest = _filled(seconds, limit_s)
        latest = [len(counts) - 1 - back for back in reversed(_filled(seconds[::-1], limit_s))]
        if earliest[-1] >= len(counts):
            return None
        near = [range(first, last + 1) for first, last in zip(earliest, latest, strict=True)]
    return [min(counts[stage] for stage in each) for each in near]


def spread_of(cut: Sequence[tuple[int, int]], seconds: Sequence[float]) -> int:
    """How many stages a segment is off an even cut, at most.

    Args:
        cut: per stage, its segments [first, stop).
        seconds: per segment, what stages are even by.
    """
    even = even_stages(seconds, len(cut))
    return max(abs(stage - even[at]) for stage, (first, stop) in enumerate(cut) for at in range(first, stop))


def _filled(seconds: Sequence[float], limit_s: float) -> list[int]:
    """Per segment, its position where each is filled before the next."""
    found, held_s, position = [], 0.0, 0
    for each_s in seconds:
        if held_s and held_s + each_s > limit_s * (1 + 1e-9):
            position, held_s = position + 1, 0.0
        held_s += each_s
        found.append(position)
    return found


def even_stages(seconds: Sequence[float], count: int) -> list[int]:
    """Per segment, the stage its middle is in where stages take equal shares."""
    whole, before, found = sum(seconds) or 1.0, 0.0, []
    for each_s in seconds:
        found.append(min(int((before + each_s / 2) / whole * count), count - 1))
        before += each_s
    return found
