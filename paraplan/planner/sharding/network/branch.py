"""Branch and bound over what a variable holds, each node bounded by messages and multipliers.

Where a row binds, the multipliers' bound may stay below every choice: at the best multipliers some choices break the
row and others leave room, and no choices lie between. The two differ in what single variables hold (the layout of a
large embedding, say). A node of the search leaves each variable some of its options; the variable whose holdings differ
most between the two is split at their middle, and each half is bounded afresh, starting from its parent's messages and
multipliers. Options whose own bound exceeds the best known cost are dropped in every node; a node with few options
left, or without a variable to split, goes to the MILP. The least bound over all nodes settled or open is a bound.

Where no row binds, messages alone may stay below every choice: values that are read where they were made (a residual
stream, gradients that add up) close circles, around which messages agree on no one layout. Then the variable that most
factors touch is split by the layouts it means, of which a few are enough to cut the circles open.

Source: Lagrangian branch and bound, Geoffrion 1974; Fisher 1981.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paraplan.planner.sharding.consistent import consistent
from paraplan.planner.sharding.network.cost_network import Floats, Ints, Network
from paraplan.planner.sharding.network.lagrangian import TIGHT, Ascent, Point

FEW = 1500
"""Options left with which a node that rows bind goes to the MILP: about a second."""

STEPS = 4
"""Evaluations of the multipliers in a node at most."""

NODES = 128
"""Of layouts, looked into at most: of readers that cost together only, every split leaves as much open."""


@dataclass(frozen=True, eq=False)
class Node:
    """Options left to every variable, and the best evaluation of the node it came from."""

    kept: tuple[Ints, ...]
    point: Point
    bound: float


class Branching:
    """The search.

    Args:
        network: the problem, with the rows that may bind.
        weights: of the streams.
        stop: `time.perf_counter()` at which to come back.
        offer: told of choices; returns the cost of the best that fit all rows, +inf while there are none.
        milp: solves with only some options; its bound.
        gap: relative difference from the best at which a node is given up.
    """

    def __init__(
        self,
        network: Network,
        weights: Floats,
        stop: float,
        offer: Callable[[Sequence[int] | None], float],
        milp: Callable[[Sequence[Ints]], float],
        gap: float,
    ) -> None:
        self.network, self.weights, self.stop, self.gap = network, weights, stop, gap
        self.offer, self.milp = offer, milp
        self._numbers: list[list[Ints]] = [[] for _ in network.prices]  # [variable] per factor, [option] of its layouts
        for factor in network.factors:
            for variable, numbers in zip(factor.variables, (factor.have, *factor.wants), strict=True):
                self._numbers[variable].append(numbers)

    def run(self, kept: Sequence[Ints], points: Sequence[Point]) -> float:
        """A bound on everything the options allow, as near the best choices as time and gap ask for.

        Args:
            kept: the options at the root.
            points: evaluations there, whose best says where to split.
        """
        order = itertools.count()
        best = max(points, key=lambda point: point.bound)
        root = Node(tuple(kept), best, best.bound)
        queue = [(node.bound, next(order), node) for node in self._split(root, points)]
        heapq.heapify(queue)
        closed, count = np.inf, 0
        while queue and (self.network.rows or count < NODES):
            bound, _, node = queue[0]
            if bound >= self._enough() or time.perf_counter() > self.stop:
                break
            heapq.heappop(queue)
            count += 1
            found = self._node(node)
            if isinstance(found, float):
                closed = min(closed, found)
                continue
            for child in found:
                heapq.heappush(queue, (child.bound, next(order), child))
        return float(min([closed, *(bound for bound, _, _ in queue)]))

    def _enough(self) -> float:
        """The bound from which a node cannot matter."""
        return self.offer(None) * (1 - self.gap)

    def _node(self, node: Node) -> float | list[Node]:
        """A bound that settles the node, or what it splits into."""
        inner = consistent(self.network.restricted(node.kept))
        if inner is None:
            return np.inf
        kept = tuple(keep[inside] for keep, inside in zip(node.kept, inner, strict=True))
        ascent = Ascent(self.network.restricted(kept), self.weights, self.stop, max(TIGHT, 0.05 * self.gap))
        self._offered(kept, ascent.start(self.weights, node.point.multipliers, node.point.messages, self._enough()))
        for _ in range(STEPS if self.network.rows else 0):
            if ascent.best.bound >= self._enough() or time.perf_counter() > self.stop:
                break
            point, ceiling = ascent.step(self._enough())
            self._offered(kept, point)
            if ceiling - ascent.best.bound <= 0.1 * self.gap * abs(ascent.best.bound):
                break
        bound = max(node.bound, ascent.best.bound)
        if bound >= self._enough():
            return bound
        left = left_over(ascent.best, self.offer(None))
        if left is None:  # nothing here is better than what is known
            return self.offer(None)
        better = Node(tuple(keep[inside] for keep, inside in zip(kept, left, strict=True)), ascent.best, bound)
        is_small = bool(self.network.rows) and sum(map(len, better.kept)) <= FEW
        if is_small or len(parts := self._split(better, ascent.points, kept)) < 2:
            return max(bound, min(self.milp(better.kept), self.offer(None)))
        return parts

    def _offered(self, kept: Sequence[Ints], point: Point) -> None:
        self.offer([int(keep[choice]) for keep, choice in zip(kept, point.choices, strict=True)])

    def _split(self, node: Node, points: Sequence[Point], of: Sequence[Ints] | None = None) -> list[Node]:
        """Halves of a node; the node itself where no variable tells its points apart. Without rows its layouts."""
        if not self.network.rows:
            return self._layouts(node)
        row = int(np.argmax(node.point.multipliers)) if len(node.point.multipliers) else -1
        over = [point for point in points if row >= 0 and point.slack[row] > 0.0]
        under = [point for point in points if row >= 0 and point.slack[row] <= 0.0]
        if not over or not under:
            return [node]
        high, low = (max(side, key=lambda point: point.bound).choices for side in (over, under))
        apart: dict[int, tuple[float, float]] = {}
        for variable, held in self.network.rows[row].held.items():
            options = held if of is None else held[of[variable]]
            ends = float(options[high[variable]]), float(options[low[variable]])
            left = held[node.kept[variable]]
            middle = 0.5 * sum(ends)
            if (left <= middle).any() and (left > middle).any():
                apart[variable] = abs(ends[0] - ends[1]), middle
        if not apart or max(apart.values())[0] <= 0.0:
            return [node]
        variable = max(apart, key=lambda v: apart[v][0])
        small = self.network.rows[row].held[variable][node.kept[variable]] <= apart[variable][1]
        return [
            Node((*node.kept[:variable], node.kept[variable][side], *node.kept[variable + 1 :]), node.point, node.bound)
            for side in (small, ~small)
        ]

    def _layouts(self, node: Node) -> list[Node]:
        """A node in parts of one layout each, or set of them, of the variable most factors touch; of several, that of
        the fewest; the node itself where all have one."""
        apart = {variable: self._meant(variable, options) for variable, options in enumerate(node.kept)}
        open_ = [variable for variable, meant in apart.items() if meant.max(initial=0)]
        if not open_:
            return [node]
        chosen = min(open_, key=lambda v: (-len(self._numbers[v]), apart[v].max()))
        before, options, after = node.kept[:chosen], node.kept[chosen], node.kept[chosen + 1 :]
        parts = [options[apart[chosen] == number] for number in range(int(apart[chosen].max()) + 1)]
        return [Node((*before, part, *after), node.point, node.bound) for part in parts]

    def _meant(self, variable: int, options: Ints) -> Ints:
        """[option] a number for the layouts that an option means to all factors together."""
        numbers = self._numbers[variable]
        if not numbers:
            return np.zeros(len(options), dtype=np.int64)
        found = np.unique(np.stack([each[options] for each in numbers], 1), axis=0, return_inverse=True)[1]
        return np.asarray(found.reshape(-1), dtype=np.int64)


def left_over(point: Point, cost: float) -> list[Ints] | None:
    """Per variable, the options whose own bounds do not exceed a cost; None where a variable has none.

    Whatever is dropped is part of no cheaper choices, so the optimum stays, unless it is what costs that much.
    """
    offset = point.bound - point.messages.bound()
    found = [np.flatnonzero(own + offset <= cost * (1 + 1e-9)) for own in point.messages.option_bounds()]
    return found if all(map(len, found)) else None
