"""What the process keeps to work faster: plans that a search compares share most of their blocks.

Every cache of the package is held by `SESSION`, which can empty them all. Emptying changes no result.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Cache(Protocol):
    """What a session can own."""

    def __len__(self) -> int: ...

    def clear(self) -> None: ...


C = TypeVar("C", bound=Cache)


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

    def __contains__(self, key: Hashable) -> bool:
        return key in self._made

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            self._made.clear()
            self._weight = 0

    def __len__(self) -> int:
        return len(self._made)


class Session:
    """The caches of a process; each is declared where it is used, and is empty at the start."""

    def __init__(self) -> None:
        self._caches: dict[str, tuple[Callable[[], int], Callable[[], object]]] = {}

    def cached(self, most: int | None = None) -> Callable[[F], F]:
        """Decorate a function: its results are kept by its arguments.

        Args:
            most: results kept, those of the arguments used last; None for all.
        """

        def declare(function: F) -> F:
            kept = lru_cache(most)(function)
            self._add(
                f"{function.__module__}.{function.__qualname__}", lambda: kept.cache_info().currsize, kept.cache_clear
            )
            return kept  # type: ignore[return-value]

        return declare

    def lately(self, name: str, most: int, weigh: Callable[[T], int] = lambda _: 1) -> Lately[T]:
        """Values by their keys, at most so heavy together (see `Lately`).

        Args:
            name: of the module and what is kept.
            most, weigh: see `Lately`.
        """
        return self.owned(name, Lately(most, weigh))

    def owned(self, name: str, cache: C) -> C:
        """A cache that somebody made: anything with a length that can be cleared."""
        self._add(name, cache.__len__, cache.clear)
        return cache

    def _add(self, name: str, size: Callable[[], int], clear: Callable[[], object]) -> None:
        self._caches[name] = size, clear

    def sizes(self) -> dict[str, int]:
        """How much each cache holds, by its name."""
        return {name: size() for name, (size, _) in self._caches.items()}

    def release(self) -> None:
        """Empty every cache."""
        for _, clear in self._caches.values():
            clear()


SESSION = Session()
"""Of this process."""


def release_caches() -> None:
    """Give back the memory of everything kept to plan faster: a notebook's way to begin anew. No result changes."""
    SESSION.release()
