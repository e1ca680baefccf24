"""What several readers of a value cost together: the least over all ways to group them.

Each group asks for one layout and pays for moving it once. With c[have, want] the cost of a move and m_r[want] what is
taken away for reader r,

    least[have]  =  min over groupings  sum over groups g of  min_want ( c[have, want] - sum_{r in g} m_r[want] )

and likewise given the layout of one reader, whose group is then the one that asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paraplan.ir.process.memo import SESSION
from paraplan.planner.sharding.network.cost_network import Floats

Groups = tuple[tuple[int, ...], ...]


@SESSION.cached(32)
def groupings(count: int) -> tuple[Groups, ...]:
    """All ways to split `count` readers into groups."""
    if count == 0:
        return ((),)
    found: list[Groups] = []
    for smaller in groupings(count - 1):
        found.append((*smaller, (count - 1,)))
        for at in range(len(smaller)):
            found.append((*smaller[:at], (*smaller[at], count - 1), *smaller[at + 1 :]))
    return tuple(found)


class _Split:
    """How the groupings of some readers are evaluated, for all layouts or given that of one reader.

    A group's number has bit r set where reader r is in it.

    Attributes:
        others, own: the groups without the reader, and with it.
        beside: [position, grouping] the groups of each grouping but that of the reader, as places in `others` (one
            beyond the last where there are fewer), groupings by the reader's group in the order of `own`.
        starts: the first grouping of each of `own` (of all together, where no reader is given).
    """

    def __init__(self, count: int, mine: int) -> None:
        every = groupings(count)
        groups = sorted({group for each in every for group in each}, key=lambda group: (len(group), group))
        others = [group for group in groups if mine not in group]
        self.others = np.array([_number(group) for group in others], dtype=np.intp)
        self.own = np.array([_number(group) for group in groups if mine in group], dtype=np.intp)
        place = {group: index for index, group in enumerate(others)}
        beside: dict[int, list[list[int]]] = {number: [] for number in self.own.tolist() or [0]}
        for each in every:
            taken = next((group for group in each if mine in group), ())
            beside[_number(taken)].append([place[group] for group in each if group is not taken])
        longest = max(1, *(len(places) for some in beside.values() for places in some))
        rows = [places + [len(others)] * (longest - len(places)) for some in beside.values() for places in some]
        self.beside = np.array(rows).T
        self.starts = np.cumsum([0, *map(len, beside.values())])[:-1]


def _number(group: tuple[int, ...]) -> int:
    return sum(1 << reader for reader in group)


_split = SESSION.cached(64)(_Split)


def over_groupings(cost: Floats, messages: Sequence[Floats], mine: int = -1, rest: Floats | float = 0.0) -> Floats:
    """[have] the least that readers cost, messages taken away, or [want] the least of all given the layout of one
    reader.

    Args:
        cost: [have, want] of bringing the source's layout to a reader's.
        messages: per reader, [want] what is taken away.
        mine: the reader whose layout is given; -1 for none.
        rest: [have] what else each layout of the source costs.
    """
    count = len(messages)
    if count == 2:
        return _over_two(cost, messages, mine, rest)
    split = _split(count, mine)
    sums = np.zeros((1 << count, cost.shape[1]))
    for reader, message in enumerate(messages):
        np.add(sums[: 1 << reader], message, out=sums[1 << reader : 2 << reader])
    minima = np.zeros((len(split.others) + 1, cost.shape[0]))
    np.minimum.reduce(cost.T - sums[split.others, :, None], axis=1, out=minima[:-1])  # the quicker order
    totals = rest + minima[split.beside[0]]
    for places in split.beside[1:]:
        totals += minima[places]
    found = np.minimum.reduceat(totals, split.starts, axis=0)
    if mine < 0:
        return np.asarray(found[0])
    ways = (cost - sums[split.own, None]) + found[:, :, None]
    return np.asarray(np.minimum.reduce(ways.reshape(-1, cost.shape[1]), axis=0))


def _over_two(cost: Floats, messages: Sequence[Floats], mine: int, rest: Floats | float) -> Floats:
    """`over_groupings` of two readers, who ask for two layouts or for one: the usual case, without its tables."""
    together = messages[0] + messages[1]
    if mine < 0:
        turned = cost.T
        least = [np.minimum.reduce(turned - message[:, None], axis=0) for message in (*messages, together)]
        return np.minimum(rest + least[0] + least[1], rest + least[2])
    apart = rest + np.minimum.reduce(cost.T - messages[1 - mine][:, None], axis=0)
    ways = np.minimum((cost - messages[mine]) + apart[:, None], (cost - together) + np.asarray(rest)[:, None])
    return np.asarray(np.minimum.reduce(ways, axis=0))
