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
        samples: it has on a rank of the batch.
        whole_s: in all segments together, of what is done in each.
        each_s: per segment.
        forward_s, backward_s: per segment, what is computed.
        round_s: per segment, what is computed in the forward, and in the backward for the gradient that is handed on.
        computed: the weight of what is computed in `whole_s`.
        position: where it was relaxed, with `by` times the samples; None where it was not.
    """

    samples: float
    whole_s: float
    each_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    round_s: tuple[float, ...]
    computed: float = 1.0
    position: RelaxedPosition | None = None
    by: float = 1.0

    def scaled(self, samples: float) -> Least:
        """With fewer samples, which take no less each."""
        by = samples / self.samples

        def less(seconds: Sequence[float]) -> tuple[float, ...]:
            return tuple(each * by for each in seconds)

        return Least(
            samples=samples,
            whole_s=self.whole_s * by,
            each_s=less(self.each_s),
            forward_s=less(self.forward_s),
            backward_s=less(self.backward_s),
            round_s=less(self.round_s),
            computed=self.computed,
            position=self.position,
            by=self.by * by,
        )


@dataclass(frozen=True)
class Flying:
    """Microbatches whose backward is to come (see `in_flight`): per stage where its position has most of them, and the
    most at once of the first stage."""

    fullest: Fullest
    at_once: int


def passing_s(combination: Combination, least: Least) -> Sequence[float]:
    """Per segment, what a first microbatch takes of it before it passes on, and a last one on its way back where the
    backward is whole."""
    if NAMED[combination.schedule].splits:
        return least.forward_s
    return [f + b for f, b in zip(least.forward_s, least.backward_s, strict=True)]
