"""The bound on a space of combinations as another process finds it, beside what else a search does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paraplan.planner.joint.bounding.space_bound import SpaceBound
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.pricing import Pricing

Cut = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Bounding:
    """A bound that is being found.

    Attributes:
        cut: per stage of the plan it is found for, its segments [first, stop).
        answer: waits for it: seconds, and how many stages a segment may be off an even cut.
    """

    cut: Cut
    answer: Callable[[], tuple[float, int]]


def bound_of(
    pricing: Pricing, listed: Sequence[Combination], cut: Cut, best_s: float, within_s: float
) -> tuple[float, int]:
    """No combination has a shorter step than the seconds returned; with how many stages a segment may be off an even
    cut.

    Args:
        pricing: of the space's positions.
        listed: the space.
        cut, best_s: of the best plan known.
        within_s: seconds after which it comes back with what there is.
    """
    bound = SpaceBound(pricing.job, pricing.constraints, pricing.budget, pricing.position, pricing.way_of, cut)
    return bound.bound_s(listed, best_s, time.perf_counter() + within_s), bound.spread
