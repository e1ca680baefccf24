"""What was made lately, by what it was made of: plans that a search compares share most of their blocks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Same:
    """An object as part of a key: equal to itself alone, whatever it holds, and alive as long as the key is."""

    def __init__(self, of: object) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.of is self.of


class Lately(Generic[T]):
    """Things by their keys; those not asked for longest go when all weigh too much.

    Args:
        most: what all may weigh; a thing that weighs more is not kept.
        weigh: what one weighs.
    """

    def __init__(self, most: int, weigh: Callable[[T], int]) -> None:
        self.most, self.weigh = most, weigh
        self._made: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What has this key, made if it is not there."""
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key][0]
        made = make()
        weight = self.weigh(made)
        if weight > self.most:
            return made
        with self._lock:
            self._weight += weight - self._made.pop(key, (None, 0))[1]
            self._made[key] = made, weight
            while self._weight > self.most:
                self._weight -= self._made.popitem(last=False)[1][1]
        return made

    def __len__(self) -> int:
        return len(self._made)
