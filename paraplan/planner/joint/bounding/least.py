"""What a microbatch of a combination takes at least, and how many are in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paraplan.planner.joint.bounding.in_flight import Fullest
from paraplan.planner.joint.bounding.relaxations import RelaxedPosition
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.schedules.named import NAMED


@dataclass(frozen=True)
class Least:
    """What a microbatch takes at least.

    Attributes:
        whole_s: in all segments together, of what is done in each.
        each_s: per segment.
        forward_s, backward_s: per segment, what is computed.
        round_s: per segment, what is computed in the forward, and in the backward for the gradient that is handed on.
        computed: the weight of what is computed in `whole_s`.
        position: whose options of what is saved and made again it has; None for none.
        share: of such an option's bytes and seconds, what a rank has at least.
    """

    whole_s: float
    each_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    round_s: tuple[float, ...]
    computed: float = 1.0
    position: RelaxedPosition | None = None
    share: float = 1.0


@dataclass(frozen=True)
class Flying:
    """Microbatches whose backward is to come (see `in_flight`): per stage where its position has most of them, whenever
    and once gradients are there, and the most at once of the first stage."""

    fullest: tuple[Fullest, ...]
    at_once: int


def passing_s(combination: Combination, least: Least) -> Sequence[float]:
    """Per segment, what a first microbatch takes of it before it passes on, and a last one on its way back where the
    backward is whole."""
    if NAMED[combination.schedule].splits:
        return least.forward_s
    return [f + b for f, b in zip(least.forward_s, least.backward_s, strict=True)]
