"""Where a chain is cut whose positions hold several stages: so that no position has more to do than another.

With m microbatches a step takes about m times what the fullest position has of one, and a bubble in which every other
position's stage passes once: m . max load + (P - 1) . max stage. The cut whose longest stage is shortest
(`stage_cuts.cut_evenly`) says nothing of loads: stages of two or three segments sum up to loads that differ by a fifth.
From that cut on segments move, one at a time, from a stage to one at most a round of positions away, every boundary
between shifting by one, as long as the sum of a high power of loads falls; stages stay below a limit, of which a few
are tried. A heuristic without a bound of its own.

Where a position is short of memory, what it makes again counts as well (`Short`): its load is that of its segments and,
for what it holds over its room, in proportion.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from paraplan.planner.pipeline.cuts.stage_cuts import Bounds, cut_evenly

POWER = 24
"""Of loads whose sum falls: the fullest counts for most."""
WIDER = (1.0, 1.25, 1.6)
"""How much longer than need be the longest stage may get."""
MOVES = 400
"""At most so many segments move."""


@dataclass(frozen=True)
class Short:
    """What memory makes of a position's load, in seconds of its segments x: x + again_s . max(x . held - room, 0).

    Attributes:
        held: bytes a second of its segments makes it hold, nothing made again.
        room: bytes it may hold.
        again_s: seconds that a byte less takes.
    """

    held: float
    room: float
    again_s: float

    def load_s(self, own_s: float) -> float:
        """Of segments that take so long."""
        return own_s + self.again_s * max(own_s * self.held - self.room, 0.0)


def cut_balanced(
    seconds: Sequence[float],
    positions: Sequence[Sequence[int]],
    tail: int,
    microbatches: int,
    short: Sequence[Short] = (),
    begun: Bounds | None = None,
) -> Bounds | None:
    """The cut of a chain into stages that positions share out.

    Args:
        seconds: of every segment.
        positions: per position, its stages, numbered along the chain.
        tail: from this segment on all are in the last stage.
        microbatches: of a step.
        short: per position, what memory makes of its load; () for nothing.
        begun: a cut to begin with; None for an even one.
    Returns:
        [first, stop) of every stage; None where there are too few segments.
    """
    if begun is not None:
        return _Cut(seconds, positions, begun, tail, _wider(seconds, begun, WIDER[1]), short).balanced()
    even = cut_evenly(seconds, 1 + max(itertools.chain(*positions)), tail)
    if even is None or all(len(mine) == 1 for mine in positions):
        return even
    best, best_s = even, _step_s(seconds, positions, even, microbatches)
    for wider in WIDER:
        found = moved(seconds, positions, even, tail, _wider(seconds, even, wider))
        found_s = _step_s(seconds, positions, found, microbatches)
        if found_s < best_s:
            best, best_s = found, found_s
    return best


def moved(
    seconds: Sequence[float], positions: Sequence[Sequence[int]], bounds: Bounds, tail: int, limits: Sequence[float]
) -> Bounds:
    """A cut whose segments move as long as loads get evener.

    Args:
        seconds, positions, tail: as of `cut_balanced`.
        bounds: the cut.
        limits: per stage, how long it may get.
    """
    return _Cut(seconds, positions, bounds, tail, limits).balanced()


def _step_s(seconds: Sequence[float], positions: Sequence[Sequence[int]], bounds: Bounds, microbatches: int) -> float:
    stages = [sum(seconds[slice(*bound)]) for bound in bounds]
    return microbatches * max(sum(stages[s] for s in mine) for mine in positions) + (len(positions) - 1) * max(stages)


def _wider(seconds: Sequence[float], bounds: Bounds, times: float) -> list[float]:
    """Of every stage of a cut, so many times the longest."""
    return [times * max(sum(seconds[slice(*bound)]) for bound in bounds)] * len(bounds)


@dataclass(frozen=True)
class _Move:
    """Boundaries first to last shift by `step` segments: what stages gain."""

    gain: float
    step: int
    first: int
    last: int
    stages: dict[int, float]


class _Cut:
    """A cut that moves."""

    def __init__(
        self,
        seconds: Sequence[float],
        positions: Sequence[Sequence[int]],
        bounds: Bounds,
        tail: int,
        limits: Sequence[float],
        short: Sequence[Short] = (),
    ) -> None:
        self.seconds, self.rounds, self.short = seconds, len(positions), short
        self.starts = [first for first, _ in bounds] + [len(seconds)]
        self.stages = [sum(seconds[slice(*bound)]) for bound in bounds]
        self.holders: list[list[int]] = [[] for _ in bounds]
        for position, mine in enumerate(positions):
            for stage in mine:
                self.holders[stage].append(position)
        self.loads = [sum(self.stages[stage] for stage in mine) for mine in positions]
        self.mean = sum(self.loads) / len(self.loads) or 1.0
        self.limits, self.tail = [limit * (1 + 1e-9) for limit in limits], tail

    def balanced(self) -> Bounds:
        """The cut after the best moves, one by one."""
        for _ in range(MOVES):
            best = self._best_move()
            if best is None or best.gain <= 1e-9:
                break
            for boundary in range(best.first, best.last + 1):
                self.starts[boundary] += best.step
            for stage, more in best.stages.items():
                self.stages[stage] += more
                for position in self.holders[stage]:
                    self.loads[position] += more
        return tuple(itertools.pairwise(self.starts))

    def _best_move(self) -> _Move | None:
        """Of the moves that keep all stages and their limit, the first of those that gain most."""
        powers, best = [self._power(position, own_s) for position, own_s in enumerate(self.loads)], None
        for step, first in itertools.product((1, -1), range(1, len(self.stages))):
            more: dict[int, float] = {}
            touched: dict[int, dict[int, None]] = {}  # position -> its stages that gain or lose, in order
            gains: dict[int, float] = {}
            for last in range(first, min(first + self.rounds, len(self.stages))):
                at = self.starts[last] if step > 0 else self.starts[last] - 1
                given, taken = (last - 1, last) if step > 0 else (last, last - 1)
                if not 0 < self.starts[last] + step < len(self.seconds):
                    break
                more[given] = more.get(given, 0.0) + self.seconds[at]
                more[taken] = more.get(taken, 0.0) - self.seconds[at]
                if not self._may_be(last - 1, step * (last > first), step, more):
                    break  # nor does it where more boundaries shift
                for stage in (given, taken):
                    for position in self.holders[stage]:
                        touched.setdefault(position, {})[stage] = None
                for position in (*self.holders[given], *self.holders[taken]):
                    load = self.loads[position]
                    for stage in touched[position]:
                        load += more[stage]
                    gains[position] = powers[position] - self._power(position, load)
                is_last = last == len(self.stages) - 1
                if self._may_be(last, step, 0, more) and self.starts[-2] + step * is_last <= self.tail:
                    gain = sum(gains.values())
                    if best is None or gain > best.gain:
                        best = _Move(gain, step, first, last, dict(more))
        return best

    def _may_be(self, stage: int, at_start: int, at_stop: int, more: dict[int, float]) -> bool:
        """Whether a stage whose boundaries shift so keeps a segment, and the limit."""
        if self.starts[stage] + at_start >= self.starts[stage + 1] + at_stop:
            return False
        return more[stage] <= 0 or self.stages[stage] + more[stage] <= self.limits[stage]

    def _power(self, position: int, own_s: float) -> float:
        """Of a position's load, where its segments take so long."""
        load_s = self.short[position].load_s(own_s) if self.short else own_s
        return float((max(load_s, 0.0) / self.mean) ** POWER)
