"""Clocks, streams and meetings of ranks whose kernels sleep (see `sleeping`).

A rank's clock is a deadline on the machine's monotonic clock: kernels sleep until it, so what one sleep or the
interpreter took too long the next sleeps less, and only a machine that cannot keep up at all makes a step longer. A
stream is a thread that takes flights (a collective, a message, a copy) in the order they are issued: it meets the
others there, who tell each other their deadlines, and then sleeps for as long as the flight takes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

from torch import Tensor

from paraplan.ir.execution.streams import copy_stream
from paraplan.ir.machine.rank_groups import holding_of, holdings
from paraplan.ir.plan import Plan
from paraplan.runtime.transport.tier_copies import Copier, TierTensor

PATIENCE_S = 120.0
_SHORT_S = 5e-4
"""Clocks that are ahead by less are not slept for yet: a hundred small ops are one sleep."""


class Clock:
    """When what a rank's compute stream has done so far is over."""

    def __init__(self, sleeps: bool) -> None:
        self.at, self.sleeps = 0.0, sleeps

    def busy(self, seconds: float) -> None:
        """Work for a while."""
        self.at += seconds
        self.keep(self.at, _SHORT_S)

    def until(self, end: float) -> None:
        """Stand still until then."""
        self.at = max(self.at, end)
        self.keep(self.at, _SHORT_S)

    def keep(self, at: float, short_s: float = 0.0) -> None:
        """Sleep until the machine's clock gets there."""
        ahead = at - time.monotonic() if self.sleeps else 0.0
        if ahead > short_s:
            time.sleep(ahead)


class Meeting(Protocol):
    """How streams of ranks meet; every value comes back as the largest that anybody brought."""

    def over(self, axis: int, begin: float) -> float:
        """Over a mesh axis: when the last is there."""

    def between(self, peer: int, sends: bool, begin: float, seconds: float) -> tuple[float, float]:
        """With one other rank, in one direction: when the later is there, and for how long."""


@dataclass
class Flight:
    """A collective or message under way."""

    issued: float
    seconds: float
    meet: Callable[[float, float], tuple[float, float]]
    end: float = 0.0
    fault: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Stream:
    """Takes flights one after another, on a thread of its own."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.end, self._clock = 0.0, clock
        self._queue: SimpleQueue[Flight | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def put(self, flight: Flight) -> Flight:
        """Queue it."""
        self._queue.put(flight)
        return flight

    def close(self) -> None:
        """No more."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (flight := self._queue.get()) is not None:
            try:
                begin, seconds = flight.meet(max(flight.issued, self.end), flight.seconds)
                self.end = flight.end = begin + seconds
                self._clock.keep(self.end)
            except Exception as fault:  # noqa: BLE001  (told to whoever waits)
                flight.fault = fault
            flight.done.set()


class Streams:
    """The streams of one rank, and what is under way on them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._streams: dict[str, Stream] = {}
        self._flights: dict[int, tuple[object, Flight]] = {}

    def issue(self, stream: str, flight: Flight, result: object) -> None:
        """Begin what `result` stands for."""
        if stream not in self._streams:
            self._streams[stream] = Stream(self.clock, stream)
        self._flights[id(result)] = result, self._streams[stream].put(flight)

    def wait(self, result: object) -> None:
        """Hold the clock until it is over."""
        _, flight = self._flights.pop(id(result))
        if not flight.done.wait(PATIENCE_S):
            raise TimeoutError(f"nobody came to meet within {PATIENCE_S} s")
        if flight.fault is not None:
            raise flight.fault
        self.clock.until(flight.end)

    @property
    def end(self) -> float:
        """When the last stream falls idle."""
        assert not self._flights, "everything is waited for"
        return max([self.clock.at, *(stream.end for stream in self._streams.values())])

    def close(self) -> None:
        """End the threads."""
        for stream in self._streams.values():
            stream.close()


CopySeconds = Callable[[str, int, bool, bool], float]
"""(tier, bytes, from the host's memory, both ways) -> seconds."""


class ClockedCopier(Copier):
    """Copies as it does in training, and is not done before its price on the copies' streams is paid."""

    def __init__(self, streams: Streams, seconds: CopySeconds, beside: bool, rank: int) -> None:
        super().__init__(beside=beside, rank=rank)
        self._on, self._seconds = streams, seconds

    def offload(self, x: Tensor, tier: str) -> TierTensor:
        """As `Copier`."""
        away = super().offload(x, tier)
        self._issue(away, tier, away.nbytes, "out")
        return away

    def prefetch(self, away: TierTensor, tier: str) -> Tensor:
        """As `Copier`."""
        out = super().prefetch(away, tier)
        self._issue(out, tier, away.nbytes, "in")
        return out

    def bring(self, away: TierTensor, tier: str) -> Tensor:
        """As `Copier`."""
        out = super().prefetch(away, tier)
        self._issue(out, tier, away.nbytes, "in", both_ways=True)
        return out

    def lift(self, away: TierTensor, tier: str) -> TierTensor:
        """As `Copier`."""
        made = super().lift(away, tier)
        self._issue(made, tier, away.nbytes, "in", True)
        return made

    def store(self, x: Tensor | TierTensor, tier: str, home: TierTensor) -> TierTensor:
        """As `Copier`."""
        issued = super().store(x, tier, home)
        from_host = isinstance(x, TierTensor)
        self._issue(issued, tier, home.nbytes, "out", from_host, not from_host)
        return issued

    def _issue(
        self, result: object, tier: str, nbytes: int, way: str, from_host: bool = False, both_ways: bool = False
    ) -> None:
        seconds = self._seconds(tier, nbytes, from_host, both_ways)
        flight = Flight(self._on.clock.at, seconds, lambda begin, seconds: (begin, seconds))
        self._on.issue(copy_stream(tier, way), flight, result)

    def wait(self, issued: Any) -> Any:
        """As `Copier`."""
        self._on.wait(issued)
        return super().wait(issued)


class Board:
    """Where ranks that are threads of one process meet."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._rounds: dict[tuple[object, int], list[tuple[float, ...]]] = {}

    def meet(self, where: object, number: int, size: int, values: tuple[float, ...]) -> tuple[float, ...]:
        """Everybody's largest values, once all are there.

        Args:
            where: the place.
            number: how often this one has been there before.
            size: how many meet.
            values: brought.
        """
        with self._lock:
            there = self._rounds.setdefault((where, number), [])
            there.append(values)
            self._lock.notify_all()
            if not self._lock.wait_for(lambda: len(there) == size, PATIENCE_S):
                raise TimeoutError(f"{len(there)} of {size} ranks met at {where} within {PATIENCE_S} s")
            return tuple(map(max, zip(*there, strict=True)))


class ThreadMeeting:
    """A rank's way to a board."""

    def __init__(self, board: Board, plan: Plan, rank: int) -> None:
        self._board, self._rank = board, rank
        self._mesh = holding_of(holdings(plan), rank).mesh
        self._times: Counter[object] = Counter()

    def over(self, axis: int, begin: float) -> float:
        """Over a mesh axis."""
        group = self._mesh.group(self._rank, axis)
        return self._meet((axis, group), len(group), (begin,))[0]

    def between(self, peer: int, sends: bool, begin: float, seconds: float) -> tuple[float, float]:
        """With one other rank."""
        lane = (self._rank, peer) if sends else (peer, self._rank)
        first, takes = self._meet(lane, 2, (begin, seconds))
        return first, takes

    def _meet(self, where: object, size: int, values: tuple[float, ...]) -> tuple[float, ...]:
        number = self._times[where]
        self._times[where] += 1
        return self._board.meet(where, number, size, values)
