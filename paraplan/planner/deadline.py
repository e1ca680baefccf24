"""Ends of time: of a whole search, which its stages share, and of what they solve."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

FLOOR = 0.1
"""Of a limit: what a stage that must run has at least, however late it is, lest what is easy to find not be found."""


@dataclass(frozen=True)
class Until:
    """When a piece of a search ends, as `time.perf_counter` counts, and what is still of interest.

    Attributes:
        found: after which nothing faster is looked for.
        last: after which nothing is, though nothing was found.
        below_s: seconds of a step that no other plan is looked for above.
        known_s: the step of a plan after passes: what computes for longer is not looked for either.
    """

    found: float = math.inf
    last: float = math.inf
    below_s: float = math.inf
    known_s: float = math.inf

    def is_over(self, has_plan: bool) -> bool:
        """Whether it ends where there is a plan, or none."""
        return time.perf_counter() > (self.found if has_plan else self.last)


EVER = Until()
"""Time without end."""


FIRST = 0.7
"""Of the time: for a first search, where others for fewer bytes may follow."""
LATE = 1.5
"""Times the limit, after which no other plan is tried though none fits yet."""
QUICKENED = 1.15
"""How much slower a plan may be before passes (`planner.passes`) than one after them, and be fitted."""


@dataclass(frozen=True)
class SolveLimits:
    """Bounds on the search.

    Attributes:
        time_s: of solver time, for all tries on one mesh.
        memory_bytes: per device.
        relative_gap: of the objective, at which to stop proving.
        backend: who solves what messages leave open.
        certify: whether a bound on the step is looked for, which takes most of the time on small problems; without,
            it is 0.
        known_s: the step of a plan found elsewhere, infinite for none: after the limit no other is tried though none
            fits yet.
        found_s: likewise, of one that no pass has made faster.
    """

    time_s: float
    memory_bytes: float
    relative_gap: float = 2e-3
    backend: str = "mathopt-highs"
    certify: bool = True
    known_s: float = math.inf
    found_s: float = math.inf

    @property
    def has_plan(self) -> bool:
        """Whether one is known."""
        return min(self.known_s, self.found_s) < math.inf

    @property
    def passable_s(self) -> float:
        """The step below which a plan may be the fastest, after passes."""
        return math.inf if self.certify else QUICKENED * self.known_s

    def until(self, began: float) -> Until:
        """When what began then (`time.perf_counter`) ends, and what it has to be faster than."""
        below_s, known_s = (math.inf,) * 2 if self.certify else (min(self.passable_s, self.found_s), self.known_s)
        return Until(began + self.time_s, began + (1 if self.has_plan else LATE) * self.time_s, below_s, known_s)

    def left_s(self, taken_s: float) -> float:
        """What is left of the time once so much was taken; a tenth at least, without which a next try finds nothing."""
        return max(self.time_s - taken_s, 0.1 * self.time_s)


class Deadline:
    """Counts a time limit down.

    Attributes:
        limit_s: seconds from its making on.
        asked_s: seconds that were asked for; 0 where a first plan was.
        kept: times the limit, the time with what is kept for other searches, which may not be needed.
    """

    def __init__(self, limit_s: float, asked_s: float | None = None, kept: float = 1.0) -> None:
        self.limit_s, self.kept, self._started = limit_s, kept, time.perf_counter()
        self.asked_s = limit_s if asked_s is None else asked_s

    def prolong(self) -> None:
        """Have what was kept for others as well, which are not needed."""
        self.limit_s, self.kept = self.kept * self.limit_s, 1.0

    @property
    def of_all(self) -> Deadline:
        """That of these and the others, as of now."""
        found = Deadline(self.kept * self.limit_s, self.asked_s)
        found._started = self._started
        return found

    @property
    def passed_s(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._started

    @property
    def is_over(self) -> bool:
        """Whether the time has passed."""
        return self.passed_s >= self.limit_s

    def share_s(self, share: float = 1.0) -> float:
        """A part of what is left; a tenth of the limit at least."""
        return max(share * (self.limit_s - self.passed_s), FLOOR * self.limit_s)
