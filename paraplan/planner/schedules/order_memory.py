"""What one position holds of microbatches in some order of its computations.

What is held after an action is a sum over stages of counts and bytes, so an order is read once, into its distinct
counts (`instants_of`), and where it is fullest is found for any bytes (`at_fullest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.planner.schedules.schedule_problem import StageCosts

Instants = npt.NDArray[np.int64]
"""[instants, 5, stages]: how many microbatches wait for their backward, and between its halves; whether gradients are
there, whether they are reduced, and whether copies of parameters are there."""
CHANGES = {ActionKind.F: (1, 0), ActionKind.B: (-1, 0), ActionKind.I: (-1, 1), ActionKind.W: (0, -1)}
"""How many more microbatches wait for their backward, and between its halves, after an action."""


class Waiting(NamedTuple):
    """What a position holds of microbatches at once: bytes; how many wait for a stage's backward, and between its
    halves, of all its stages together."""

    nbytes: int
    flying: int
    between: int

    @property
    def share(self) -> float:
        """Of those held, which are between the halves."""
        return self.between / max(self.flying + self.between, 1)


def instants_of(order: Sequence[Action], held: Sequence[int]) -> Instants:
    """The counts after a position's actions, those alike once.

    Args:
        order: its actions; those of other kinds and stages change nothing.
        held: its stages, ascending.
    """
    place = {stage: number for number, stage in enumerate(held)}
    mine = [(each.kind, place[each.stage]) for each in order if each.kind in CHANGES and each.stage in place]
    each = np.zeros((len(mine) + 1, 5, len(held)), dtype=np.int64)
    begun, made, over, read = (dict[int, int]() for _ in range(4))
    for number, (kind, stage) in enumerate(mine, 1):
        each[number, :2, stage] = CHANGES[kind]
        begun.setdefault(stage, number)
        if kind in (ActionKind.B, ActionKind.W):
            made.setdefault(stage, number)
            over[stage] = number
        if kind in (ActionKind.B, ActionKind.I):
            read[stage] = number
    for row, change, at in ((2, 1, made), (3, 1, over), (4, 1, begun), (4, -1, read)):
        each[list(at.values()), row, list(at)] = change
    counts = each.cumsum(0)
    mixed = np.random.default_rng(0).integers(1, 2**40, 5 * len(held))  # under which small counts have different sums
    return counts[np.unique(counts.reshape(len(counts), -1) @ mixed, return_index=True)[1]]


def most_held(instants: Instants) -> list[tuple[int, int]]:
    """Of all stages together, how many microbatches wait for their backward and between its halves, where no more of
    one do with as many of the other, most of the first first."""
    found: list[tuple[int, int]] = []
    for flying, between in sorted({(int(f), int(d)) for f, d in instants[:, :2].sum(2)}, reverse=True):
        if not found or between > found[-1][1]:
            found.append((flying, between))
    return found


def at_fullest(
    instants: Instants, saved: Sequence[float], deferred: Sequence[float], stages: Sequence[StageCosts] = ()
) -> Waiting:
    """What is held where most is, less the gradients and copies of parameters that are not there then.

    Args:
        instants: of an order.
        saved: per stage of the position, bytes a microbatch holds from its forward to its backward.
        deferred: per stage, bytes it holds between the halves of its backward.
        stages: per stage, of which gradients and copies are known; () where they are always there.
    """
    known = [(each.grad_bytes, -each.reduced_bytes, each.gathered_bytes) for each in stages]
    each = np.array([saved, deferred, *zip(*known, strict=True)], dtype=np.int64)
    nbytes = (instants[:, : len(each)] * each).sum((1, 2))
    at = int(nbytes.argmax())
    flying, between = instants[at, :2].sum(1)
    absent = sum(grads + gathered for grads, _, gathered in known)
    return Waiting(int(nbytes[at]) - absent, int(flying), int(between))
