"""Bounds and solutions of a cost network by passing messages: dual ascent on its linear relaxation.

Every factor f keeps a message delta_{f,v}[layout] to each of its variables, moved from the factor's cost to the
variable's, so that the sum stays what it was for all choices:

    cost_v[o]  +  sum_f delta_{f,v}[layout_f(o)]                and               cost_f  -  sum_v delta_{f,v}

The sum of all minima is a lower bound for any messages. A sweep visits the variables in order; each collects all its
factors know (the factor's min-marginal), then hands an equal share of what it has back to the factors that variables
still to come will see. Sweeps alternate in direction; the bound never falls, and where it meets the cost of choices
read off the messages, these are proved optimal. On sharding problems that takes a dozen sweeps.

Min-marginals of a factor with several readers, who share what is moved, are minima over the ways to group the readers:
each group asks for one layout, and a split into groups that choose the same layout only costs more than joining them.
Of many readers, whose groupings are too many, they are minima over the sets of layouts that are asked for; of many
readers and many layouts they are those of a factor that costs no more: readers in parts of a few, each part paying for
itself an equal share of what it moves (as much as all at once where all parts ask for the same).

Source: sequential reweighted message passing, Kolmogorov 2015 (TRW-S for pairs: Kolmogorov 2006).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy

import numpy as np

from paraplan.planner.sharding.network.cost_network import Floats, Ints, Network
from paraplan.planner.sharding.network.groupings import over_groupings

MANY, SETS = 5, 12
"""So many readers are looked at by the sets of layouts they may ask for, where there are at most so many layouts: five
readers have 52 groupings, nine 21147."""

MOST, PART = 7, 4
"""More readers than these are looked at in parts of so many, where their layouts are too many for sets."""


def sums_of_sets(columns: Sequence[Floats]) -> Floats:
    """[set, ...] the sum of a set's columns; bit i of the set's number says whether column i is in it."""
    found = np.zeros((1, *columns[0].shape))
    for column in columns:
        found = np.concatenate([found, found + column])
    return found


def maxima_of_sets(values: Floats) -> Floats:
    """[set] the largest of a set's values; of the empty set -inf."""
    found = np.full(1, -np.inf)
    for value in values:
        found = np.concatenate([found, np.maximum(found, value)])
    return found


class _Factor:
    """A factor's scalar cost [have, want] and its messages, source first; absent layouts have message -inf.

    Only layouts some variable still means are kept: `numbers` says which rows and columns of the network's factor.
    `absent` says of each place whether its layouts are fewer than the factor's (another reader's are among those).
    """

    def __init__(self, variables: tuple[int, ...], layouts: tuple[Ints, ...], cost: Floats) -> None:
        rows, columns = np.unique(layouts[0]), np.unique(np.concatenate(layouts[1:]))
        self.numbers = rows, columns
        self.variables = variables
        self.layouts = (np.searchsorted(rows, layouts[0]), *(np.searchsorted(columns, wants) for wants in layouts[1:]))
        readers = len(variables) - 1
        self.by_sets = readers >= MANY and len(columns) <= SETS
        count = 1 if self.by_sets or readers <= MOST else -(-readers // PART)
        self.parts = tuple(tuple(map(int, part)) for part in np.array_split(np.arange(readers), count))
        self.messages: list[Floats] = []
        self.present: list[Ints] = []
        self.absent: list[bool] = []
        self._order: list[Ints] = []
        self._starts: list[Ints] = []
        for place, numbers in enumerate(self.layouts):
            order = np.argsort(numbers, kind="stable")
            present, starts = np.unique(numbers[order], return_index=True)
            message = np.full(len(self.numbers[min(place, 1)]), -np.inf)
            message[present] = 0.0
            self.messages.append(message)
            self.present.append(present)
            self.absent.append(len(present) < len(message))
            self._order.append(order)
            self._starts.append(starts)
        self._take(cost)

    def _take(self, cost: Floats) -> None:
        self.cost = np.ascontiguousarray(cost[np.ix_(*self.numbers)])
        self._turned = np.ascontiguousarray(self.cost.T)  # minima along the first axis are quicker
        self._asked = sums_of_sets(list(self._turned)) if self.by_sets else None
        self._share = self.cost / len(self.parts)

    def again(self, cost: Floats) -> _Factor:
        """The same factor at another cost, its messages taken over."""
        found = copy(self)
        found.messages = [message.copy() for message in self.messages]
        found._take(cost)
        return found

    def least(self, place: int, costs: Floats) -> Floats:
        """[layout] the least of a variable's option costs that mean it; 0 where none does."""
        found: Floats = np.minimum.reduceat(costs.take(self._order[place]), self._starts[place])
        if not self.absent[place]:
            return found
        full = np.zeros(len(self.messages[place]))
        full[self.present[place]] = found
        return full

    def collect(self, place: int) -> Floats:
        """[layout] the min-marginal of one variable's layouts, moved into its message; 0 where no option means one."""
        found = self.marginal(place)
        if self.absent[place]:
            full = np.zeros(len(found))
            full[self.present[place]] = found[self.present[place]]
            found = full
        self.messages[place] += found
        return found

    def beside(self, place: int, others: Sequence[int]) -> Floats:
        """[layout] the factor's cost given the options of all other variables, in their order."""
        if len(others) == 1:
            layout = int(self.layouts[1 - place][others[0]])
            return self._turned[layout] if place == 0 else self.cost[layout]
        layouts = [numbers for number, numbers in enumerate(self.layouts) if number != place]
        numbers = [int(layout[choice]) for layout, choice in zip(layouts, others, strict=True)]
        if place == 0:
            return np.asarray(self._turned[list(dict.fromkeys(numbers))].sum(0))
        have, wants = numbers[0], list(dict.fromkeys(numbers[1:]))
        found = self.cost[have].copy()
        found[wants] = 0.0  # asked for anyway
        return found + self.cost[have, wants].sum()

    def opposite(self, place: int) -> Floats:
        """[layout] of a factor of two variables, the least cost given one's layout, less the other's message."""
        table, message = (self._turned, self.messages[1]) if place == 0 else (self.cost, self.messages[0])
        found: Floats = np.minimum.reduce(table - message[:, None], axis=0)
        return found

    def marginal(self, place: int, messages: Sequence[Floats] | None = None) -> Floats:
        """[layout] the factor's least cost, messages taken away, given the layout of one variable."""
        m = self.messages if messages is None else messages
        if len(self.variables) == 2 and messages is None:
            return self.opposite(place) - m[place]
        if self._asked is not None:
            return self._marginal_over_sets(self._asked, place, m)
        if len(self.parts) == 1 and place:
            return over_groupings(self._share, m[1:], place - 1, -m[0])
        mine = next((part for part in self.parts if place - 1 in part), None)
        rest = sum(
            (over_groupings(self._share, [m[1 + r] for r in part]) for part in self.parts if part is not mine), -m[0]
        )
        if mine is None:
            return rest
        return over_groupings(self._share, [m[1 + r] for r in mine], mine.index(place - 1), rest)

    def _marginal_over_sets(self, asked: Floats, place: int, m: Sequence[Floats]) -> Floats:
        """The same, `asked` being [set, have] what it costs to move a set of layouts."""
        gains = [maxima_of_sets(each) for each in m[1:]]
        if place == 0:
            found: Floats = np.minimum.reduce(asked - np.add.reduce(gains)[:, None], axis=0) - m[0]
            return found
        least = np.minimum.reduce(asked - m[0], axis=1) - sum(gains[: place - 1] + gains[place:])
        sets = np.arange(len(least))
        return np.array([least[sets >> at & 1 == 1].min() for at in range(len(m[place]))]) - m[place]


class MessagePassing:
    """Dual ascent on a network under scalar costs.

    Args:
        network: the problem; its rows are not looked at.
        unary: per variable, [option] cost.
        pairs: per factor, [have, want] cost.
        warm: messages to start from, of a network with these options and perhaps more: any messages give a bound.
    """

    def __init__(
        self, network: Network, unary: Sequence[Floats], pairs: Sequence[Floats], warm: MessagePassing | None = None
    ) -> None:
        self.network = network
        self.unary = [np.array(costs) for costs in unary]
        self.factors: list[_Factor]
        if warm is not None and warm.network is network:
            self.factors = [factor.again(cost) for factor, cost in zip(warm.factors, pairs, strict=True)]
        else:
            self.factors = [
                _Factor(factor.variables, (factor.have, *factor.wants), cost)
                for factor, cost in zip(network.factors, pairs, strict=True)
            ]
            if warm is not None:
                self._take_over(warm)
        self.costs = [costs.copy() for costs in self.unary]
        self.touching: list[list[tuple[_Factor, int]]] = [[] for _ in unary]
        for factor in self.factors:
            for place, variable in enumerate(factor.variables):
                self.touching[variable].append((factor, place))
                if warm is not None:
                    self.costs[variable] += factor.messages[place][factor.layouts[place]]
        self._handing = {step: [self._handed(variable, step) for variable in range(len(unary))] for step in (1, -1)}
        self._forward = True

    def _handed(self, variable: int, step: int) -> tuple[list[tuple[_Factor, int]], float]:
        """The factors that variables still to come will see, in sweeps of this direction, and the share of each."""
        ahead, behind = [], 0
        for factor, place in self.touching[variable]:
            ordered = [step * other for other in factor.variables]
            if max(ordered) > step * variable:
                ahead.append((factor, place))
            behind += min(ordered) < step * variable
        return ahead, 1.0 / max(len(ahead), behind, 1)

    def _take_over(self, warm: MessagePassing) -> None:
        for factor, known in zip(self.factors, warm.factors, strict=True):
            for place, (mine, theirs) in enumerate(zip(factor.messages, known.messages, strict=True)):
                present, side = factor.present[place], min(place, 1)
                mine[present] = theirs[np.searchsorted(known.numbers[side], factor.numbers[side][present])]

    def sweep(self, stop: float = np.inf) -> bool:
        """Visit every variable once; the next sweep goes the other way.

        Args:
            stop: `time.perf_counter()` at which to visit no more; messages give a bound wherever a sweep ends.
        Returns:
            Whether all were visited.
        """
        step = 1 if self._forward else -1
        for variable in range(len(self.costs))[::step]:
            if time.perf_counter() > stop:
                return False
            self._visit(variable, step)
        self._forward = not self._forward
        return True

    def _visit(self, variable: int, step: int) -> None:
        costs = self.costs[variable]
        for factor, place in self.touching[variable]:
            costs = costs + factor.collect(place).take(factor.layouts[place])
        ahead, share = self._handing[step][variable]
        handed = [(factor, place, factor.least(place, costs) * share) for factor, place in ahead]
        for factor, place, back in handed:
            factor.messages[place] -= back
            costs = costs - back.take(factor.layouts[place])
        self.costs[variable] = costs

    def bound(self) -> float:
        """No choices cost less."""
        return float(sum(costs.min() for costs in self.costs) + sum(f.marginal(0).min() for f in self.factors))

    def option_bounds(self) -> list[Floats]:
        """Per variable, [option]: no choices that take it cost less."""
        least = {id(factor): float(factor.marginal(0).min()) for factor in self.factors}
        total = sum(float(costs.min()) for costs in self.costs) + sum(least.values())
        found = []
        for variable, touching in enumerate(self.touching):
            own = self.costs[variable]
            rest = total - float(own.min()) - sum(least[id(factor)] for factor, _ in touching)
            gathered = own + sum(factor.marginal(place)[factor.layouts[place]] for factor, place in touching)
            found.append(gathered + rest)
        return found

    def decode(self, stop: float = np.inf) -> list[int]:
        """Choices read off the messages: variable by variable, the best given those before it; polished until `stop`
        (`time.perf_counter()`)."""
        fixed: list[int | None] = [None] * len(self.unary)
        for variable in range(len(fixed)):
            costs = self.unary[variable].copy()
            for factor, place in self.touching[variable]:
                costs += self._given(factor, place, fixed)[factor.layouts[place]]
            fixed[variable] = int(np.argmin(costs))
        return self.polished([choice for choice in fixed if choice is not None], stop=stop)

    def polished(self, choices: list[int], rounds: int = 3, stop: float = np.inf) -> list[int]:
        """Choices no single change of which costs less (or that many rounds of such changes, or what there is then).

        Args:
            choices: [variable] to begin with.
            rounds: of changes.
            stop: on `time.perf_counter()`.
        """
        choices = list(choices)
        for _ in range(rounds):
            changed = False
            for variable in range(len(choices)):
                if time.perf_counter() > stop:
                    return choices
                costs = self.unary[variable].copy()
                for factor, place in self.touching[variable]:
                    costs += self._given(factor, place, choices)[factor.layouts[place]]
                best = int(np.argmin(costs))
                if costs[best] < costs[choices[variable]] * (1 - 1e-12):
                    choices[variable], changed = best, True
            if not changed:
                break
        return choices

    @staticmethod
    def _given(factor: _Factor, place: int, fixed: Sequence[int | None]) -> Floats:
        """[layout] the factor's cost to one variable: other fixed ones at their layouts, free ones at their best."""
        others = [fixed[variable] for number, variable in enumerate(factor.variables) if number != place]
        if None not in others:
            return factor.beside(place, [choice for choice in others if choice is not None])
        if len(others) == 1:
            return factor.opposite(place)
        messages: list[Floats] = []
        for other, (variable, layouts, message) in enumerate(
            zip(factor.variables, factor.layouts, factor.messages, strict=True)
        ):
            choice = fixed[variable]
            if other == place:
                messages.append(np.where(np.isfinite(message), 0.0, -np.inf))
            elif choice is None:
                messages.append(message)
            else:
                only = np.full(len(message), -np.inf)
                only[layouts[choice]] = 0.0
                messages.append(only)
        return factor.marginal(place, messages)

    def cost(self, choices: Sequence[int]) -> float:
        """What choices cost."""
        total = sum(float(costs[choice]) for costs, choice in zip(self.unary, choices, strict=True))
        for factor in self.factors:
            numbers = [int(layouts[choices[v]]) for v, layouts in zip(factor.variables, factor.layouts, strict=True)]
            total += sum(float(factor.cost[numbers[0], want]) for want in dict.fromkeys(numbers[1:]))
        return total
