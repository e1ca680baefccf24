"""The bound on a space of combinations as another process finds it, beside what else a search does.

It is refined round by round for as long as the search has other things to do, and for its time once it has not, where
that may raise it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Event
from typing import NamedTuple

from paraplan.ir.errors import ParaplanError
from paraplan.ir.process.workers import Workers
from paraplan.planner.joint.bounding.space_bound import SpaceBound
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.pricing import Pricing

Cut = Sequence[tuple[int, int]]
ROUND_S = 1.0
"""Seconds of a round, after which whoever waits is answered."""


class Bounded(NamedTuple):
    """What is proved.

    Attributes:
        least_s: no combination has a shorter step; 0.0 where nothing is known.
        spread: how many stages a segment may be off an even cut.
        waiting_s: how long it may take to prove more; infinite where no more can be.
    """

    least_s: float
    spread: int
    waiting_s: float


def bound_of(pricing: Pricing, listed: Sequence[Combination], cut: Cut, best_s: float, within_s: float) -> Bounded:
    """No combination has a shorter step than the seconds returned.

    Args:
        pricing: of the space's positions.
        listed: the space.
        cut, best_s: of the best plan known.
        within_s: seconds after which it comes back with what there is.
    """
    bound = _bound(pricing, cut)
    return Bounded(bound.bound_s(listed, best_s, time.perf_counter() + within_s), bound.spread, 0.0)


def _bound(pricing: Pricing, cut: Cut) -> SpaceBound:
    return SpaceBound(pricing.job, pricing.constraints, pricing.budget, pricing.position, pricing.way_of, cut)


class SpaceProof:
    """What is proved of every combination, by a process beside this one where one has nothing to do.

    Args:
        pricing: of the space's positions.
        listed: the space.
        workers: None for none.
    Attributes:
        cut: of the plan that it is begun for, per stage its segments [first, stop); None before.
    """

    def __init__(self, pricing: Pricing, listed: Sequence[Combination], workers: Workers | None) -> None:
        self.pricing, self.listed, self.workers = pricing, listed, workers
        self.cut: Cut | None = None
        self._rounds: BoundRounds | None = None

    def prepare(self, cut: Cut, step_s: float) -> None:
        """Go on with it, until something else is asked for, as for a plan that is yet to be made.

        Args:
            cut, step_s: what the plan is expected to have.
        """
        if self.workers is not None and self.workers.has_idle:
            self._rounds = BoundRounds(self.workers, self.pricing, (self.listed, cut, step_s), 0.0)

    def pause(self) -> None:
        """Go on no more once the round that is under way ends."""
        if self._rounds is not None:
            self._rounds.asked.set()

    def begin(self, cut: Cut, best_s: float, within_s: float, here: bool = False) -> None:
        """Prove it for a plan.

        Args:
            cut, best_s, within_s: as of `bound_of`; a process beside goes on after that time as well, until `answer`.
            here: whether this process does it, when it is asked for.
        """
        self.pause()
        if self._rounds is not None:
            self._rounds.answer()
        task = self.listed, cut, best_s
        is_beside = self.workers is not None and self.workers.has_idle and not here
        self.cut, self._within_s, self._task = cut, within_s, task
        self._rounds = BoundRounds(self.workers, self.pricing, task, within_s) if self.workers and is_beside else None

    def answer(self) -> Bounded:
        """What is proved for the plan it was begun for."""
        if self._rounds is None:
            return bound_of(self.pricing, *self._task, self._within_s)
        self._rounds.asked.set()
        return self._rounds.answer()


class BoundRounds:
    """Rounds of refining by a process that has nothing else to do.

    Args:
        workers, pricing: as of `SpaceProof`.
        task: the space, a plan's cut and step.
        within_s: seconds after which no other round begins once an answer is asked for.
    Attributes:
        asked: set once an answer is waited for.
        answer: waits for it.
    """

    def __init__(
        self, workers: Workers, pricing: Pricing, task: tuple[Sequence[Combination], Cut, float], within_s: float
    ) -> None:
        self.asked, self._within_s, self._began_s = Event(), within_s, time.perf_counter()
        self.answer = workers.begin(one_round, task, pricing, self._goes_on)

    def _goes_on(self, found: Bounded) -> bool:
        left_s = self._within_s - (time.perf_counter() - self._began_s)
        return found.waiting_s < (left_s if self.asked.is_set() else float("inf"))


def one_round(pricing: Pricing, listed: Sequence[Combination], cut: Cut, best_s: float) -> Bounded:
    """A round of refining what the last one left.

    Args:
        pricing: this process' own, which keeps what is under way.
        listed, cut, best_s: as of `bound_of`.
    """
    key = tuple(cut), best_s
    try:
        if key not in pricing.under_way:
            bound = next((bound for bound, _ in pricing.under_way.values()), None) or _bound(pricing, cut)
            bound.cut = cut  # all that was relaxed for another cut is as good for this one
            pricing.under_way = {key: (bound, bound.refining(listed, best_s))}
        bound, refining = pricing.under_way[key]
        refining.go_on(time.perf_counter() + ROUND_S, gives_up=False)
    except ParaplanError:  # the plan that was found is none the worse
        return Bounded(0.0, 1, float("inf"))
    return Bounded(refining.least_s, bound.spread, float("inf") if refining.is_done else refining.waiting_s)
