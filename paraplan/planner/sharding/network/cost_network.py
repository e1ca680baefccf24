"""A cost network: variables that take one option each, factors between them, and rows that limit sums.

    minimise    sum_v  prices_v[x_v]  +  sum_f  moved_f(x)
    subject to  sum_v  held_{r,v}[x_v]  +  sum_f  held_f(x)  <=  limit_r          for each row r

A factor is a value made in one of several layouts and read in others: its price depends on the layout (`have`) the
source's option makes and on the distinct layouts (`want`) its readers' options ask for, each paid once:

    moved_f(x) = sum over distinct m in {want_k[x_k] : readers k}  of  cost_f[have[x_source], m]

Prices are vectors over streams; scalar problems are made by weighing them. Any weighted constraint problem with
pairwise costs is such a network, other systems' published instances among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Factor:
    """A value moved from where it is made to where it is read.

    Attributes:
        source: variable that makes it.
        readers: variables that read it, each once.
        have: [option of the source] number of the layout it makes.
        wants: per reader, [option] number of the layout it asks for; all readers share one numbering.
        prices: [have, want, stream]; infinite where one cannot become the other.
        what: for people.
    """

    source: int
    readers: tuple[int, ...]
    have: Ints
    wants: tuple[Ints, ...]
    prices: Floats
    what: str = ""

    @property
    def variables(self) -> tuple[int, ...]:
        """Source first, then the readers."""
        return (self.source, *self.readers)

    @property
    def reachable(self) -> NDArray[np.bool_]:
        """[have, want] whether one layout can become the other."""
        return np.isfinite(self.prices[..., 0])

    def asked(self, choices: Sequence[int]) -> tuple[int, list[int]]:
        """The layout made, and the distinct layouts asked for."""
        wants = dict.fromkeys(int(want[choices[reader]]) for reader, want in zip(self.readers, self.wants, strict=True))
        return int(self.have[choices[self.source]]), list(wants)


@dataclass(frozen=True, eq=False)
class Row:
    """A limit on what options hold.

    Attributes:
        name: for people.
        limit: the sum may not exceed it; in the units of `held`.
        held: variable -> [option] amount.
        moved: factor -> [have, want] amount.
    """

    name: str
    limit: float
    held: dict[int, Floats]
    moved: dict[int, Floats] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Network:
    """The problem; see the module's head.

    Attributes:
        prices: per variable, [option, stream].
        factors, rows: see there.
    """

    prices: tuple[Floats, ...]
    factors: tuple[Factor, ...]
    rows: tuple[Row, ...] = ()

    @property
    def num_streams(self) -> int:
        """Entries of a price vector."""
        return int(self.prices[0].shape[1])

    def work(self, choices: Sequence[int]) -> Floats:
        """[stream] total price of some choices."""
        total = np.zeros(self.num_streams)
        for price, choice in zip(self.prices, choices, strict=True):
            total += price[choice]
        for factor in self.factors:
            have, wants = factor.asked(choices)
            for want in wants:
                total += factor.prices[have, want]
        return total

    def activity(self, choices: Sequence[int]) -> Floats:
        """[row] what some choices hold."""
        found = np.zeros(len(self.rows))
        for index, row in enumerate(self.rows):
            found[index] = sum(held[choices[variable]] for variable, held in row.held.items())
            for number, moved in row.moved.items():
                have, wants = self.factors[number].asked(choices)
                found[index] += sum(moved[have, want] for want in wants)
        return found

    def limits(self) -> Floats:
        """[row] what may be held."""
        return np.array([row.limit for row in self.rows])

    def fits(self, choices: Sequence[int]) -> bool:
        """Whether every row holds (within rounding)."""
        return bool((self.activity(choices) <= self.limits() * (1 + 1e-9) + 1e-9).all())

    def restricted(self, kept: Sequence[Ints]) -> Network:
        """The network with only some options of every variable, in their order."""
        prices = tuple(price[keep] for price, keep in zip(self.prices, kept, strict=True))
        factors = tuple(
            Factor(
                factor.source,
                factor.readers,
                factor.have[kept[factor.source]],
                tuple(want[kept[reader]] for reader, want in zip(factor.readers, factor.wants, strict=True)),
                factor.prices,
                factor.what,
            )
            for factor in self.factors
        )
        rows = tuple(
            Row(row.name, row.limit, {v: held[kept[v]] for v, held in row.held.items()}, row.moved) for row in self.rows
        )
        return Network(prices, factors, rows)
