"""Solving a cost network: messages and multipliers first, integers only for what they leave open.

1. Dual ascent (`message_passing.py`) with multipliers for the rows (`lagrangian.py`) gives a bound, and choices that
often
   meet it: then these are optimal and nothing else runs. Rows join once some choices break them.
2. Where a gap is left, every option whose own bound exceeds the cost of the best choices is dropped: no better choices
   take it. What remains is a small MILP (`ilp.py`), solved with the bound it proves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paraplan.planner.sharding.consistent import consistent
from paraplan.planner.sharding.network.branch import FEW, Branching, left_over
from paraplan.planner.sharding.network.cost_network import Factor, Floats, Ints, Network
from paraplan.planner.sharding.network.ilp import build_ilp
from paraplan.planner.sharding.network.lagrangian import TIGHT, Ascent, Point, evaluate
from paraplan.planner.sharding.network.message_passing import MessagePassing
from paraplan.planner.solvers.milp import Status, solve

ROUNDS = 16
"""Evaluations of the multipliers at most: each new row takes a few."""

POOL_S = 5.0
"""Seconds for mixing choices already seen: a matter of tenths."""


@dataclass(frozen=True)
class Optimum:
    """What was found.

    Attributes:
        status: as `milp.Status`; OPTIMAL where objective and bound meet.
        choices: the best found; None where nothing was.
        objective: their cost, evaluated afresh; +inf without.
        bound: no choices cost less.
        solve_s: seconds.
        multipliers: [row] the multipliers of the best bound.
        via: "messages", "branching" where options were split, or "milp" where integers were needed.
        messages: the first, from which a network at other prices may start; None where there were none.
    """

    status: Status
    choices: tuple[int, ...] | None
    objective: float
    bound: float
    solve_s: float
    multipliers: Floats
    via: str
    messages: MessagePassing | None = None


def optimise(
    network: Network,
    time_limit_s: float = 60.0,
    relative_gap: float = 1e-6,
    backend: str = "mathopt-highs",
    small: int = 20_000,
    cutoff: float = np.inf,
    warm: MessagePassing | None = None,
) -> Optimum:
    """The cheapest choices that fit, by total work over streams.

    Args:
        network: the problem.
        time_limit_s: after which the best so far is returned.
        relative_gap: (objective - bound) / objective at which to stop.
        backend: who solves what remains as a MILP.
        small: with fewer columns than this the MILP is not put off by multipliers.
        cutoff: a cost from which choices are of no use: where all cost more, none are returned, and the bound says so.
        warm: of a network that differs in prices alone, none of them infinite in one only.
    """
    started = time.perf_counter()
    kept = consistent(network)
    if kept is None:
        return Optimum(Status.INFEASIBLE, None, np.inf, np.inf, time.perf_counter() - started, np.zeros(0), "messages")
    search = _Search(network.restricted(kept), started + time_limit_s, relative_gap, backend)
    found = search.run(search.size() < small, cutoff, warm)
    choices = None if found.choices is None else tuple(int(k[c]) for k, c in zip(kept, found.choices, strict=True))
    return replace(found, choices=choices, solve_s=time.perf_counter() - started, messages=search.messages)


class _Search:
    def __init__(self, network: Network, stop: float, relative_gap: float, backend: str) -> None:
        self.network, self.stop, self.gap, self.backend = network, stop, relative_gap, backend
        self.weights = np.ones(network.num_streams)
        self.fine = max(TIGHT, 0.05 * relative_gap)  # of one evaluation
        self.best: tuple[float, tuple[int, ...]] | None = None
        self.active: list[int] = []  # rows some choices broke
        self.bound, self.multipliers = -np.inf, np.zeros(len(network.rows))
        self.messages: MessagePassing | None = None

    def size(self) -> int:
        """About how many columns the ILP has."""
        flows = sum(factor.prices[..., 0].size * len(factor.readers) for factor in self.network.factors)
        return flows + sum(map(len, self.network.prices))

    def run(self, small: bool, cutoff: float = np.inf, warm: MessagePassing | None = None) -> Optimum:
        none = np.zeros(len(self.network.rows))
        point = evaluate(self.network, self.weights, none, self.stop, warm, self.fine, cutoff)
        self.messages = point.messages
        if point.bound >= cutoff:
            self.bound = point.bound
            return self._answer("messages")
        self._see(point, self.network)
        if self._closed():
            return self._answer("messages")
        if not self.active:
            free = replace(point, multipliers=np.zeros(0), slack=np.zeros(0))
            return self._branch(Network(self.network.prices, self.network.factors), [free])
        if small:
            return self._remainder(point)
        if infeasible := self._hopeless():
            return infeasible
        ascent = self._rows(point)
        if self._closed() or time.perf_counter() > self.stop:
            return self._answer("messages")
        return self._branch(ascent.network, ascent.points)

    def _see(self, point: Point, network: Network) -> None:
        """Learn from an evaluation: its bound, its choices where they fit, the rows they break."""
        if point.bound > self.bound:
            self.bound = point.bound
            self.multipliers = np.zeros(len(self.network.rows))
            for row, multiplier in zip(network.rows, point.multipliers, strict=True):
                self.multipliers[self.network.rows.index(row)] = multiplier
        slack = self.network.activity(point.choices) - self.network.limits()
        broken = np.flatnonzero(slack > 1e-9 * np.maximum(self.network.limits(), 1.0))
        self.active += [int(row) for row in broken if row not in self.active]
        if not len(broken):
            self._offer(point.choices)

    def _offer(self, choices: Sequence[int]) -> None:
        cost = float(self.network.work(choices).sum())
        if np.isfinite(cost) and (self.best is None or cost < self.best[0]):
            self.best = cost, tuple(choices)

    def _closed(self, gap: float | None = None) -> bool:
        if self.best is None:
            return False
        return self.best[0] - self.bound <= max(self.gap if gap is None else gap, TIGHT) * abs(self.best[0])

    def _hopeless(self) -> Optimum | None:
        """Whether one broken row alone cannot hold."""
        for row in self.active:
            least = least_activity(self.network, row, self.stop)
            if least.bound > self.network.rows[row].limit * (1 + 1e-9):
                zeros = np.zeros(len(self.network.rows))
                return Optimum(Status.INFEASIBLE, None, np.inf, np.inf, 0.0, zeros, "messages")
            self._offer_fitting(least.choices)
            if self.best is not None and time.perf_counter() > self.stop:
                break
        return None

    def _offer_fitting(self, choices: Sequence[int] | None) -> float:
        if choices is not None and self.network.fits(choices):
            self._offer(choices)
        return np.inf if self.best is None else self.best[0]

    def _rows(self, point: Point) -> Ascent:
        """Maximise over the multipliers of the rows that matter."""
        known = -1
        ascent = Ascent(self.network, self.weights, self.stop, self.fine)
        for _ in range(ROUNDS):
            if known != len(self.active):
                known = len(self.active)
                rows = tuple(self.network.rows[index] for index in self.active)
                part = Network(self.network.prices, self.network.factors, rows)
                old = ascent.points
                ascent = Ascent(part, self.weights, self.stop, self.fine)
                for before in old or [point]:
                    before.slack = part.activity(before.choices) - part.limits()
                    before.multipliers = np.r_[before.multipliers, np.zeros(known)][:known] if old else np.zeros(known)
                    ascent.points.append(before)
            at, ceiling = ascent.step()
            self._see(at, part)
            reach = abs(self.bound) if self.best is None else self.best[0]
            if self._closed() or ceiling - self.bound <= 1e-4 * reach or time.perf_counter() > self.stop:
                break
        if not self._closed():
            self._combine(ascent.points)
        return ascent

    def _combine(self, points: Sequence[Point]) -> None:
        """The best mixture of the choices seen so far: each variable takes what it took in one of them."""
        taken = [np.unique(options) for options in np.array([point.choices for point in points]).T]
        self._milp(taken, POOL_S)

    def _milp(self, kept: Sequence[Ints], time_limit_s: float) -> float:
        """Solve with only some options as a MILP; its bound."""
        if self.best is not None and time.perf_counter() > self.stop:
            return -np.inf  # even to write it down takes time
        again = consistent(self.network.restricted(kept))
        if again is None:
            return np.inf
        kept = [keep[inner] for keep, inner in zip(kept, again, strict=True)]
        ilp = build_ilp(self.network.restricted(kept))
        left = max(min(self.stop - time.perf_counter(), time_limit_s), 0.05)
        found = solve(ilp.problem(self.weights), backend=self.backend, time_limit_s=left, relative_gap=self.gap)
        if found.values is not None:
            choices = ilp.choices(found.values)
            self._offer([int(keep[choice]) for keep, choice in zip(kept, choices, strict=True)])
        return np.inf if found.status is Status.INFEASIBLE else found.bound

    def _remainder(self, point: Point) -> Optimum:
        """What bounds leave open, as a MILP."""
        bound = self._milp(self._left_over(point), np.inf)
        if bound == np.inf:
            self.bound = np.inf if self.best is None else self.best[0]
        else:  # the dropped options cost at least as much as the best choices known before
            self.bound = max(self.bound, min(bound, np.inf if self.best is None else self.best[0]))
        return self._answer("milp")

    def _left_over(self, point: Point) -> list[Ints]:
        """Per variable, the options that may be part of better choices than the best known, and its own."""
        kept = None if self.best is None else left_over(point, self.best[0])
        if kept is None or self.best is None:
            return [np.arange(len(prices)) for prices in self.network.prices]
        return [np.union1d(keep, [choice]).astype(np.int64) for keep, choice in zip(kept, self.best[1], strict=True)]

    def _branch(self, network: Network, points: Sequence[Point]) -> Optimum:
        """What multipliers or messages leave open: split where many options are left, or where no row binds."""
        best = max(points, key=lambda point: point.bound)
        kept = self._left_over(best)
        if network.rows and sum(map(len, kept)) <= FEW:
            return self._remainder(best)
        search = Branching(
            network,
            self.weights,
            self.stop,
            self._offer_fitting,
            lambda some: self._milp(some, np.inf),
            self.gap,
        )
        bound = search.run(kept, points)
        self.bound = max(self.bound, min(bound, np.inf if self.best is None else self.best[0]))
        if not network.rows and not self._closed() and time.perf_counter() < self.stop:
            return self._remainder(best)
        return self._answer("branching" if bound < np.inf or self.best is not None else "milp")

    def _answer(self, via: str) -> Optimum:
        if self.best is None:
            status = Status.INFEASIBLE if self.bound == np.inf else Status.LIMIT
            return Optimum(status, None, np.inf, self.bound, 0.0, self.multipliers, via)
        objective, choices = self.best
        status = Status.OPTIMAL if self._closed() else Status.FEASIBLE
        return Optimum(status, choices, objective, min(self.bound, objective), 0.0, self.multipliers, via)


def least_activity(network: Network, row: int, stop: float) -> Optimum:
    """The choices that hold least of one row, whatever they cost: a proof where even these do not fit.

    Args:
        network: with the row.
        row: its number.
        stop: on `time.perf_counter()`.
    """
    chosen = network.rows[row]
    prices = tuple(chosen.held.get(v, np.zeros(len(p)))[:, None] for v, p in enumerate(network.prices))
    factors = tuple(
        replace(factor, prices=_only(factor, chosen.moved.get(number))) for number, factor in enumerate(network.factors)
    )
    point = evaluate(Network(prices, factors), np.ones(1), np.zeros(0), stop)
    cost = float(point.work.sum())
    status = Status.OPTIMAL if cost - point.bound <= TIGHT * max(abs(cost), 1e-300) else Status.FEASIBLE
    return Optimum(status, point.choices, cost, min(point.bound, cost), 0.0, np.zeros(0), "messages")


def _only(factor: Factor, moved: Floats | None) -> Floats:
    held = np.zeros(factor.prices.shape[:2]) if moved is None else moved.copy()
    held[~factor.reachable] = np.inf
    return held[..., None]
