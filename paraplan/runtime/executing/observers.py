"""What sees a rank's steps as an executor takes them, instruction by instruction: nothing, an account of memory or a
clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from paraplan.ir.execution.entry import Entry
from paraplan.ir.execution.rank_program import Instr, InstrKind, Step
from paraplan.runtime.executing.torch_private import untracked
from paraplan.runtime.executing.tracker import Ledger, changes
from paraplan.runtime.transport.tier_copies import TierTensor


class Observer:
    """Is told of everything an executor does; this one notes nothing."""

    def begin(self, step: Step, index: int = -1) -> None:
        """A step begins, or an instruction of its block."""

    def call(self, is_plain: bool, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call an instruction's kernel.

        Args:
            is_plain: whether all it makes are its results.
            function: the kernel.
            args, kwargs: that it is called with.
        """
        return function(*args, **kwargs)

    def made(self, results: Sequence[Tensor | TierTensor]) -> None:
        """What has begun made these, and gives up inputs next."""

    def played(self, instr: Instr) -> None:
        """The instruction has ended."""

    def taken(self, target: str, message: str = "") -> None:
        """The step, which calls no block, has ended."""

    def dropped(self) -> None:
        """A call has given up some of its inputs or results."""


class Account(Observer):
    """Notes one `Entry` per thing done, with the memory it took.

    The transport's tracker books what is made to `ledger` meanwhile.

    Attributes:
        ledger: of what is alive.
        entries: what was done.
        workspaces: (block, instruction) -> the most bytes it was seen to make and drop inside.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.entries: list[Entry] = []
        self.workspaces: dict[tuple[str, int], int] = {}

    def begin(self, step: Step, index: int = -1) -> None:
        """Measure from here."""
        self._step, self._index = step, index
        self._shapes: tuple[tuple[int, ...], ...] = ()
        self._before, self._tiers = self._middle, self._most = self.ledger.open_window(), self.ledger.levels()

    def call(self, is_plain: bool, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Results of a plain one are booked without the dispatch mode having to see the call.

        Args:
            is_plain, function, args, kwargs: as of `Observer.call`.
        """
        if not is_plain:
            return function(*args, **kwargs)
        with untracked():
            result = function(*args, **kwargs)
        self.ledger.register_all(result)
        return result

    def made(self, results: Sequence[Tensor | TierTensor]) -> None:
        """What is alive now was allocated, what dies from here on is freed."""
        self._shapes = tuple(tuple(x.shape) for x in results)
        self._middle, self._most = self.ledger.live_bytes, self.ledger.levels()

    def played(self, instr: Instr) -> None:
        """Note it, and its workspace."""
        place = self._step.block, self._index
        workspace = max(0, self.ledger.window_bytes - max(self._middle, self._before))
        self.workspaces[place] = max(workspace, self.workspaces.get(place, 0))
        target = "wait" if instr.kind is InstrKind.WAIT else instr.target
        collective = f"{instr.target}@{instr.axis}" if instr.kind is InstrKind.COLLECTIVE else ""
        self._note(target, collective, f"{place[0]}[{place[1]}]")

    def taken(self, target: str, message: str = "") -> None:
        """Note it."""
        self._note(target, message)

    def dropped(self) -> None:
        """Note it, if anything died."""
        if self._middle != self.ledger.live_bytes or changes(self._most, self._most, self.ledger.levels()):
            self._note("drop", note=self._step.block)

    def _note(self, target: str, collective: str = "", note: str = "") -> None:
        step = self._step
        self.entries.append(
            Entry(
                action=step.action,
                segment=step.segment,
                microbatch=step.microbatch,
                target=target,
                shapes=self._shapes,
                allocated_bytes=self._middle - self._before,
                freed_bytes=self._middle - self.ledger.live_bytes,
                collective=collective,
                tiers=changes(self._tiers, self._most, self.ledger.levels()),
                note=note,
            )
        )


class Timer(Observer):
    """Measures this thread's processor time that each kernel takes.

    Attributes:
        seconds: (block, instruction) -> of each of its calls.
    """

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, int], list[float]] = {}

    def begin(self, step: Step, index: int = -1) -> None:
        """Of this one."""
        self._place = step.block, index

    def call(self, is_plain: bool, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call and measure.

        Args:
            is_plain, function, args, kwargs: as of `Observer.call`.
        """
        started = time.thread_time()
        result = function(*args, **kwargs)
        self.seconds.setdefault(self._place, []).append(time.thread_time() - started)
        return result
