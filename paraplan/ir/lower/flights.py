"""Flights: what one step issues and a later one waits for, with other work between.

A flight is a collective or copies between tiers. Each use (gradients on their way, parameters of the next segment,
states of the next update) has its `Flights`, which say when:

    send              now; the oldest is waited for where more are under way than allowed
    line_up, reach    so many stops before it is needed, and waited for there
    passed            waited for once the segment after that which sent it has been passed
    end               waited for now
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from paraplan.ir.names import Name, under_way
from paraplan.ir.rank_program import Block

Parted = tuple[Block | None, Block | None]
"""What issues and what waits; None where another block does, or nothing has to."""

P = ParamSpec("P")
T = TypeVar("T")


class Call(Protocol):
    """Writes a step that calls a block, for a segment in a microbatch where it belongs to one."""

    def __call__(
        self, block: Block, args: tuple[Name, ...], outs: tuple[Name | None, ...], microbatch: int = -1,
        segment: int = -1,
    ) -> None:  # fmt: skip
        """Write it."""


@dataclass
class BlockCache:
    """The blocks of a rank that several steps call, named by a stem and a number."""

    _made: dict[str, dict[Hashable, Any]] = field(default_factory=dict)

    def get(self, stem: str, make: Callable[Concatenate[str, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What was made of this stem with these arguments; else it is made, under the stem's next name."""
        made = self._made.setdefault(stem, {})
        key = (args, tuple(kwargs.items()))
        if key not in made:
            made[key] = make(f"{stem}{len(made)}", *args, **kwargs)
        found: T = made[key]
        return found


@dataclass(frozen=True, eq=False)
class Flight:
    """What is issued by one step and waited for by another.

    Attributes:
        blocks: that issue and wait.
        names: the outer name of what they read and make; what is issued and has none here is numbered.
        results: outer names of what there is in the end, in order; None where `names` has them.
        microbatch, segment: of both steps.
        holds_bytes: of its input until it is waited for.
        arrived: called then.
    """

    blocks: Parted
    names: Mapping[str, Name]
    results: tuple[Name | None, ...] | None = None
    microbatch: int = -1
    segment: int = -1
    holds_bytes: int = 0
    arrived: Callable[[], None] | None = None


@dataclass
class FlightWriter:
    """Writes the steps of flights.

    Attributes:
        call: writes one step.
        blocks: of the rank.
    """

    call: Call
    blocks: BlockCache
    _numbered: int = 0

    def issue(self, flight: Flight) -> Callable[[], None]:
        """Write the step that issues; returns what writes the step that waits."""
        issues, waits = flight.blocks
        names = dict(flight.names)
        if issues is not None:
            for local in issues.outputs:
                if local is not None and local not in names:
                    names[local] = under_way(self._numbered)
                    self._numbered += 1
            self._call(flight, issues, names, None)

        def end() -> None:
            if waits is not None:
                self._call(flight, waits, names, flight.results)
            if flight.arrived is not None:
                flight.arrived()

        return end

    def _call(
        self, flight: Flight, block: Block, names: Mapping[str, Name], results: tuple[Name | None, ...] | None
    ) -> None:
        if results is None:
            results = tuple(None if local is None else names.get(local) for local in block.outputs)
        self.call(block, tuple(names[local] for local in block.inputs), results, flight.microbatch, flight.segment)


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

    writer: FlightWriter
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
