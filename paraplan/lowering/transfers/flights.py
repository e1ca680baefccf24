"""When flights are issued and waited for.

Each use (gradients on their way, parameters of the next segment, states of the next update) has its `Flights`:

    send              now; the oldest is waited for where more are under way than allowed
    line_up, reach    so many stops before it is needed, and waited for there
    passed            waited for once the segment after that which sent it has been passed
    end               waited for now

A flight over two axes is two collectives, the second of which reads what the first made. In a line the first sets out
one stop earlier than what goes one way, and the second once the stop before is reached; of those sent, the second some
segments later (`go_on`). So neither is waited for at once, and at the end all second ones are under way together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from paraplan.lowering.steps.step_writer import Flight, StepWriter, UnderWay

LATER = 16
"""Segments passed until the second collective of what was sent goes on: it waits for the first, which may stand behind
others on its link."""


@dataclass(frozen=True)
class Stop:
    """Something about to be done, and what has to have arrived for it."""

    at: Hashable
    flights: tuple[Flight, ...]


@dataclass(eq=False)
class _Sent:
    under_way: UnderWay
    passed: bool = False
    seen: int = 0

    @property
    def holds_bytes(self) -> int:
        return self.under_way.flight.holds_bytes


@dataclass(eq=False)
class _Coming:
    """A stop ahead: its flights yet to be issued, and those that were."""

    at: Hashable
    waiting: list[Flight]
    under_way: list[UnderWay] = field(default_factory=list)


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
    _ahead: list[_Coming] = field(default_factory=list)
    _sent: list[_Sent] = field(default_factory=list)

    def line_up(self, stops: Iterable[Stop]) -> None:
        """These come next, in this order."""
        self._line = list(stops)
        self.advance()

    def begin(self) -> None:
        """The first stop is next: what it needs goes on."""
        for coming in self._ahead[:1]:
            for each in coming.under_way:
                each.go_on()

    def reach(self, at: Hashable) -> None:
        """Something is done next: what it needs has arrived, and what the next stops need is under way."""
        if self._ahead and self._ahead[0].at == at:
            self.arrive()
            self.advance()

    def arrive(self) -> None:
        """Wait for what the next stop needs."""
        for each in self._ahead.pop(0).under_way:
            each.end()

    def advance(self) -> None:
        """Issue what stops ahead need, and of the one after them what has two ways to go."""
        while self._line and len(self._ahead) <= self.depth:
            stop = self._line.pop(0)
            self._ahead.append(_Coming(stop.at, list(stop.flights)))
        self.begin()
        for index, coming in enumerate(self._ahead):
            early = [each for each in coming.waiting if index < self.depth or len(each.blocks) > 2]
            coming.under_way += [self.writer.issue(each) for each in early]
            coming.waiting = [each for each in coming.waiting if each not in early]

    def send(self, flight: Flight) -> None:
        """Issue a flight now."""
        self._sent.append(_Sent(self.writer.issue(flight)))
        while len(held := [each for each in self._sent if each.holds_bytes]) > self.depth:
            if sum(each.holds_bytes for each in held) <= self.holding_bytes:
                break
            self._end(held[0])

    def go_on(self) -> None:
        """A segment was passed: what was sent so many before it goes on."""
        for each in self._sent:
            each.seen += 1
            if each.seen > LATER:
                each.under_way.go_on()

    def passed(self) -> None:
        """A segment was passed: what was sent before it is waited for."""
        for each in tuple(self._sent):
            if each.passed:
                self._end(each)
            each.passed = True

    def end(self) -> None:
        """Wait for all that were sent."""
        for each in self._sent:
            each.under_way.go_on()
        while self._sent:
            self._end(self._sent[0])

    def _end(self, each: _Sent) -> None:
        self._sent.remove(each)
        each.under_way.end()


def stops(at: Sequence[Hashable], flights: Sequence[Flight | None]) -> list[Stop]:
    """Stops that need a flight each, or nothing."""
    return [Stop(each, () if flight is None else (flight,)) for each, flight in zip(at, flights, strict=True)]
