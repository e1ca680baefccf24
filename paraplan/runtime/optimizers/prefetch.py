"""Batches made one ahead of the step that reads them, in a thread beside the program.

While a step runs, the next batch is loaded, cut and put into pinned memory; the copy to the device is the step's own,
for on the device the plan has counted one batch. No more than that one batch is taken from the loader before it is
asked for, and none after the loader has ended or raised until the iterator is asked again, as with `map`.

Limits: the loader runs in that thread, so what torch keeps for each thread (a default device, autocast, grad mode) is
the thread's; a batch made ahead and never asked for is lost to whoever goes on with the same iterator.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")
_NAME = "batches"


class _Loading(threading.local):
    """Whether this thread is one that loads."""

    here = False


_LOADING = _Loading()


class _End(Exception):
    """The loader has no more."""


class Ahead(Iterator[Made], Generic[Given, Made]):
    """`map(make, loader)`, one item ahead.

    Args:
        make: of each item, in the thread.
        loader: iterated in the thread.
        begin: what the thread calls first.
    """

    def __init__(
        self, make: Callable[[Given], Made], loader: Iterable[Given], begin: Callable[[], None] | None = None
    ) -> None:
        self._make, self._items = make, iter(loader)
        self._thread = ThreadPoolExecutor(1, _NAME, _begin, (begin,))
        self._coming: Future[Made] | None = None
        self._end = weakref.finalize(self, _leave, self._thread)

    def __next__(self) -> Made:
        """The next item's.

        Raises:
            Exception: as the loader or `make` raised it for this item.
        """
        coming, self._coming = self._coming or self._submit(), None
        try:
            found = coming.result()
        except _End:
            raise StopIteration from None
        self._coming = self._submit()
        return found

    def _submit(self) -> Future[Made]:
        return self._thread.submit(_next, self._make, self._items)


def _begin(begin: Callable[[], None] | None) -> None:
    _LOADING.here = True
    if begin is not None:
        begin()


def _next(make: Callable[[Given], Made], items: Iterator[Given]) -> Made:
    try:
        item = next(items)
    except StopIteration:
        raise _End from None
    return make(item)


def _leave(thread: ThreadPoolExecutor) -> None:
    """Let what is under way end, so that nobody else finds the loader in use."""
    thread.shutdown(wait=not _LOADING.here)
