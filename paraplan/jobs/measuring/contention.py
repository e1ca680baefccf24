"""Other processes that do what is measured, for as long as it is measured.

Processes of one machine share its memory's bandwidth and its last cache: an op that is bound by them takes up to twice
as long when two run it. Ranks of a step run the same ops at about the same time, so that is how they are measured.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import torch

from paraplan.ir.errors import RuntimeFailure
from paraplan.runtime.transport.launch import prepare_ranks

FAULTS = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError)
"""What kernels raise on inputs they do not take."""


class Beside:
    """Companions of the measuring process, each on a process of its own."""

    def __init__(self, ends: list[Connection]) -> None:
        self._ends = ends

    @contextmanager
    def running(self, make: Callable[[], Callable[[], object]]) -> Iterator[None]:
        """They call what `make` makes over and over; one where it cannot be made stands still.

        Raises:
            RuntimeFailure: one died.
        """
        self._tell(make)
        try:
            yield
        finally:
            self._tell(None)

    def _tell(self, what: object) -> None:
        try:
            for end in self._ends:
                end.send(what)
            for end in self._ends:
                end.recv()
        except (EOFError, OSError):
            self._ends.clear()
            raise RuntimeFailure(
                "a process that ran what is measured beside this one died (its message, if any, is above); what was "
                "measured is kept: start again, or with --processes 1"
            ) from None


@contextmanager
def companions(count: int, threads: int) -> Iterator[Beside]:
    """So many processes that wait to be given ops; gone at the end.

    Args:
        count: beside this one.
        threads: of each.
    """
    context = multiprocessing.get_context(prepare_ranks()) if count else None
    with ExitStack() as stack:
        ends = []
        for _ in range(count):
            assert context is not None
            mine, theirs = context.Pipe()
            process = context.Process(target=_follow, args=(theirs, threads), daemon=True)  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(mine.close)
            ends.append(mine)
        yield Beside(ends)


def crowding(processes: int) -> float:
    """How many processes share a core: what their wall clock is stretched by."""
    return max(1.0, processes / len(os.sched_getaffinity(0)))


def _follow(end: Connection, threads: int) -> None:
    """Run what one is given until told otherwise; the end of the pipe is the end."""
    torch.set_num_threads(threads)
    try:
        while True:
            make = end.recv()
            with torch.no_grad():
                try:
                    call = make()
                    call()
                except FAULTS:
                    call = None
                end.send(None)
                while not end.poll(None if call is None else 0):
                    if call is not None:
                        call()
            end.recv()
            end.send(None)
    except EOFError:
        return
