"""One end of time for a whole search, which its stages share."""

from __future__ import annotations

import time

FLOOR = 0.1
"""Of a limit: what a stage that must run has at least, however late it is, lest what is easy to find not be found."""


class Deadline:
    """Counts a time limit down.

    Attributes:
        limit_s: seconds from its making on.
        asked_s: seconds that were asked for; 0 where a first plan was.
    """

    def __init__(self, limit_s: float, asked_s: float | None = None) -> None:
        self.limit_s, self._started = limit_s, time.perf_counter()
        self.asked_s = limit_s if asked_s is None else asked_s

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
