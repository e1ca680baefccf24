"""What the fullest position takes at least, of all cuts of a chain of segments.

With one stage a position, position q works m times on its own segments after the first microbatch has passed those
before it: step >= before(q) + m . own(q). Whether a cut keeps a limit T is seen by filling positions from the first on:
each takes what fits into (T - before) / m, and whoever has covered more by then covers no less with the next, so the
filling covers most. The least T is found by bisection.

With several stages a position, segments are shared out in any way: of the j . P + 1 longest, j + 1 are in one position,
so that it takes the j + 1 shortest of them at least.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

NEAR = 1e-3
"""Of a step, how near the bisection comes."""


def filled_s(own: Sequence[float], before: Sequence[float], positions: int, microbatches: int) -> float:
    """No cut into one stage a position has a shorter step.

    Args:
        own: per segment, seconds of one microbatch.
        before: per segment, what a first microbatch takes of it, and a last, before it passes on.
        positions, microbatches: sizes.
    """
    owns, befores = [0.0, *itertools.accumulate(own)], [0.0, *itertools.accumulate(before)]

    def keeps(limit: float) -> bool:
        at = 0
        for _ in range(positions):
            room = owns[at] + max(limit - befores[at], 0.0) / microbatches
            after = bisect_right(owns, room * (1 + 1e-12)) - 1
            if after >= len(own):
                return True
            if after == at:
                return False
            at = after
        return False

    low = microbatches * owns[-1] / positions
    if keeps(low):
        return low
    high = microbatches * owns[-1] + befores[-1]
    while high - low > NEAR * low:
        middle = (low + high) / 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return low


def shared_s(own: Sequence[float], positions: int) -> float:
    """No way to share segments out among positions leaves the fullest with less of a microbatch.

    Args:
        own: per segment, seconds of one microbatch.
        positions: how many.
    """
    longest = sorted(own, reverse=True)
    sums = [0.0, *itertools.accumulate(longest)]
    found = sums[-1] / positions
    for j in range((len(longest) - 1) // positions + 1):
        last = j * positions + 1
        found = max(found, sums[last] - sums[last - j - 1])
    return found
