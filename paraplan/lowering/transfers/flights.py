"""When flights are issued and waited for.

Each use (gradients on their way, parameters of the next segment, states of the next update) has its `Flights`:

    send              now; the oldest is waited for where more are under way than allowed
    line_up, reach    so many stops before it is needed, and waited for there
    passed            waited for once the segment after that which sent it has been passed
    end               waited for now
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from paraplan.lowering.steps.step_writer import Flight, StepWriter


@dataclass(frozen=True)
class Stop:
    """Something about to be done, and what has to have arrived for it."""

    at: Hashable
    flights: tuple[Flight, ...]


@dataclass(eq=False)
class _UnderWay:
    end: Callable[[], None]
    holds_bytes: int
    passed: bool = False


@dataclass
class Flights:
    """Those of one use.

    Attributes:
        writer: of the rank.
        depth: stops ahead of which flights are issued; and of those sent that hold bytes, how many may be under way.
        holding_bytes: what these may hold, where that allows more.
    """

    writer: StepWriter
    depth: int = 1
    holding_bytes: int = 0
    _line: list[Stop] = field(default_factory=list)
    _ahead: list[tuple[Hashable, list[Callable[[], None]]]] = field(default_factory=list)
    _sent: list[_UnderWay] = field(default_factory=list)

    def line_up(self, stops: Iterable[Stop]) -> None:
        """These come next, in this order."""
        self._line = list(stops)
        self.advance()

    def reach(self, at: Hashable) -> None:
        """Something is done next: what it needs has arrived, and what the next stops need is under way."""
        if self._ahead and self._ahead[0][0] == at:
            self.arrive()
            self.advance()

    def arrive(self) -> None:
        """Wait for what the next stop needs."""
        for end in self._ahead.pop(0)[1]:
            end()

    def advance(self) -> None:
        """Issue what stops ahead need."""
        while self._line and len(self._ahead) < self.depth:
            stop = self._line.pop(0)
            self._ahead.append((stop.at, [self.writer.issue(flight) for flight in stop.flights]))

    def send(self, flight: Flight) -> None:
        """Issue a flight now."""
        self._sent.append(_UnderWay(self.writer.issue(flight), flight.holds_bytes))
        while len(held := [each for each in self._sent if each.holds_bytes]) > self.depth:
            if sum(each.holds_bytes for each in held) <= self.holding_bytes:
                break
            self._end(held[0])

    def passed(self) -> None:
        """A segment was passed: what was sent before it is waited for."""
        for each in tuple(self._sent):
            if each.passed:
                self._end(each)
            each.passed = True

    def end(self) -> None:
        """Wait for all that were sent."""
        while self._sent:
            self._end(self._sent[0])

    def _end(self, each: _UnderWay) -> None:
        self._sent.remove(each)
        each.end()


def stops(at: Sequence[Hashable], flights: Sequence[Flight | None]) -> list[Stop]:
    """Stops that need a flight each, or nothing."""
    return [Stop(each, () if flight is None else (flight,)) for each, flight in zip(at, flights, strict=True)]
