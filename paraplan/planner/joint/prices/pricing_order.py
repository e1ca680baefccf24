"""In which order the kinds of a space are priced, and which are not.

Prices of more samples a microbatch follow those of fewer as long as a sample is the faster for it, and those of fewer
follow where memory or a pipeline's bubble may make up for it. What is priced first of any inner axes is that of which
products have rows enough on a rank (`ROWS`): of long sequences one sample, of short ones several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paraplan.cost_models.predict import most_rows
from paraplan.ir.model.program import Program
from paraplan.planner.pipeline.prices.stage_prices import StagePrices

Kind = tuple[tuple[int, ...], int, int, float]
"""Of prices: the inner axes of a mesh (the degree where the user pinned them), how many axes it has, the devices of its
first (`ANY` where prices are the same for all but one device), and the samples of a microbatch."""
ANY = 0
"""Devices of a first axis: more than one."""
WORTH = 0.01
"""By how much a sample has to be faster in a larger microbatch for larger ones still to be priced."""
FASTER, FASTER_FIRST = 0.03, 0.2
"""What a sample is thought to gain at most from microbatches of twice as many, or as much as it gained the last time;
where it is not known what it gains (those of short sequences gain much)."""
ROWS = 2048.0
"""Of a microbatch on a rank, from which on products are near their best."""


def usual_samples(program: Program) -> float:
    """Of how many a rank's microbatch has rows enough."""
    return ROWS / max(most_rows(program) / program.batch_size, 1.0)


def way_of(kind: Kind) -> tuple[object, ...]:
    """What kinds have in common that differ in samples alone, but for those of which a rank has less than one, its axis
    being a tensor's, or no whole number."""
    return *kind[:3], kind[3] < 1, kind[3] % 1 == 0


@dataclass(eq=False)
class Way:
    """Kinds that differ in samples alone, from those that are priced first on: more and more, or fewer and fewer.

    Attributes:
        kinds: in order.
        of, fewer: of fewer samples, the way of those of more, which are known before; of more, that of fewer. None
            where there are none.
        pays: whether a sample was the faster for the last; of fewer samples it need not be.
        gain: what a sample may gain at most from twice as many.
        samples: of the last.
        priced: its shardings.
    """

    kinds: Sequence[Kind] = ()
    of: Way | None = None
    pays: bool = True
    gain: float = FASTER_FIRST
    samples: float = 0.0
    priced: tuple[StagePrices, ...] = ()
    fewer: Way | None = None

    def add(self, samples: float, priced: tuple[StagePrices, ...]) -> None:
        """What was priced for so many samples."""
        known_s = min((sum(each.seconds) for each in self.priced), default=math.inf) / (self.samples or 1.0)
        each_s = min((sum(each.seconds) for each in priced), default=math.inf) / samples
        if self.of is None:
            self.pays = each_s <= (1 - WORTH) * known_s
        if self.samples and 0 < each_s < known_s < math.inf:
            doubled = math.log2(samples / self.samples)
            self.gain = max(FASTER, 1 - (each_s / known_s) ** (1 / doubled))
        elif priced:
            self.gain = min(FASTER_FIRST, FASTER + priced[0].sharding.job.launched_s / (each_s * samples))
        if self.fewer is not None and not self.fewer.priced:
            self.fewer.samples, self.fewer.priced = samples, priced
        self.samples, self.priced = samples, priced


def ways_of(kinds: Iterable[Kind], usual: float) -> list[Way]:
    """Kinds by what they have in common: of an inner axis that splits tensors and of one that shares the batch out as
    well, from the usual samples a rank on, upwards and downwards; the widest inner axes first, and those last of which
    no rank has as many.

    Args:
        kinds: all.
        usual: samples of a rank.
    """
    alike: dict[tuple[object, ...], list[Kind]] = {}
    for kind in sorted(kinds, key=lambda kind: (kind[2] == 1, -math.prod(kind[0]), kind[3] >= 1, kind[1], kind[3])):
        alike.setdefault((*way_of(kind), kind[3] >= _inner(kind)), []).append(kind)
    found: dict[bool, list[Way]] = {True: [], False: []}
    for here in alike.values():
        inner = _inner(here[0]) if here[0][3] >= _inner(here[0]) else 1
        enough = [kind for kind in here if kind[3] >= usual * inner / math.sqrt(2)]
        way = Way(enough or here[-1:])
        way.fewer = Way([kind for kind in reversed(here) if kind not in way.kinds], way)
        found[bool(enough)] += [way, way.fewer] if way.fewer.kinds else [way]
    return [*found[True], *found[False]]


def _inner(kind: Kind) -> int:
    """Ranks of the inner axes of a mesh that is not pinned."""
    return math.prod(kind[0]) if kind[1] else 1


def steps_of(way: Way) -> list[tuple[Kind, Way] | None]:
    """A way's kinds, those of fewer samples after the first of more."""
    return [*((None,) if way.of is not None else ()), *((kind, way) for kind in way.kinds)]


def in_turn(waiting: Iterable[tuple[Kind, Way]], promised_s: Callable[[Kind, Way], float]) -> list[tuple[Kind, Way]]:
    """Kinds of ways that were begun, those of the way first whose next one promises most, and by turns with them those
    of ways that were not, as they come.

    Args:
        waiting: kinds, of any way in its order.
        promised_s: what a kind may come to, of a way that was begun.
    """
    begun: dict[Way, list[tuple[Kind, Way]]] = {}
    new: list[tuple[Kind, Way]] = []
    for kind, way in waiting:
        (begun.setdefault(way, []) if way.priced else new).append((kind, way))
    ways = sorted(begun.values(), key=lambda kinds: promised_s(*kinds[0]))
    pairs = itertools.zip_longest(itertools.chain(*ways), new)
    return [each for pair in pairs for each in pair if each is not None]
