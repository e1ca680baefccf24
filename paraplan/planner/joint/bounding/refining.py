"""Combinations bounded more and more closely, the lowest first: the least of them bounds the space at any time."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paraplan.planner.joint.combinations import Combination

T = TypeVar("T")
U = TypeVar("U")

NEAR = 0.05
"""Of a step, how near the bound is near enough."""
RAISED = 1e-3
"""By how much more than the lowest is worth raising it for. Where there is no time to relax every kind of positions
with combinations lower than that, what is known at once is all there will be."""


class Timed(Generic[T]):
    """Things made once each, by their keys, and how long that took."""

    def __init__(self) -> None:
        self._made: dict[Hashable, T] = {}
        self._took_s = 0.0

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What has this key, made if it is not there."""
        if key not in self._made:
            self._made[key] = self.took(make)
        return self._made[key]

    def took(self, make: Callable[[], U]) -> U:
        """What is made, its time counted."""
        began_s = time.perf_counter()
        try:
            return make()
        finally:
            self._took_s += time.perf_counter() - began_s

    def __len__(self) -> int:
        return len(self._made)

    def waiting_s(self, keys: Iterable[Hashable]) -> float:
        """How long those that are not there will take, as long as the others each; 0.0 where there are no others."""
        return len(set(keys) - self._made.keys()) * self._took_s / max(len(self._made), 1)


@dataclass(frozen=True)
class Level:
    """A way to bound a combination, closer than those before it.

    Attributes:
        bound_s: seconds that no plan of a combination takes less than.
        key: of the kind of positions that is relaxed for it.
    """

    bound_s: Callable[[Combination], float]
    key: Callable[[Combination], Hashable]


class Refining:
    """The bounds of a space, under way.

    Args:
        listed: the space.
        first_s: what is known of a combination at once.
        levels: the closer ones last.
        relaxed: kinds of positions.
        best_s: the shortest step known.
    """

    def __init__(
        self,
        listed: Sequence[Combination],
        first_s: Callable[[Combination], float],
        levels: Sequence[Level],
        relaxed: Timed[T],
        best_s: float,
    ) -> None:
        self._listed, self._levels, self._relaxed, self._best_s = listed, levels, relaxed, best_s
        self._queue = [(first_s(each), 0, number) for number, each in enumerate(listed)]
        heapq.heapify(self._queue)

    @property
    def least_s(self) -> float:
        """No combination has a shorter step."""
        return self._queue[0][0]

    @property
    def is_done(self) -> bool:
        """Whether the least is near enough, or as close as can be."""
        return self.least_s >= (1 - NEAR) * self._best_s or self._queue[0][1] == len(self._levels)

    @property
    def waiting_s(self) -> float:
        """How long it takes to raise the least by what is worth it, as far as is known."""
        lowest = [each for each in self._queue if each[0] <= (1 + RAISED) * self.least_s]
        next_levels = ((self._levels[level], number) for _, level, number in lowest if level < len(self._levels))
        return self._relaxed.waiting_s(level.key(self._listed[number]) for level, number in next_levels)

    def go_on(self, stop: float, gives_up: bool = True) -> None:
        """Raise the least, of one combination at least.

        Args:
            stop: `time.perf_counter()` at which to come back.
            gives_up: whether to come back where it cannot be raised by then.
        """
        known = len(self._relaxed)
        while not self.is_done:
            least_s, level, number = self._queue[0]
            found_s = max(least_s, self._levels[level].bound_s(self._listed[number]))
            heapq.heapreplace(self._queue, (found_s, level + 1, number))
            if time.perf_counter() > stop:
                return
            if gives_up and len(self._relaxed) > known:
                known = len(self._relaxed)
                if time.perf_counter() + self.waiting_s > stop:
                    return
