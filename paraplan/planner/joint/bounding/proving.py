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
from paraplan.planner.joint.prices.pricing import Pricing

Cut = Sequence[tuple[int, int]]
Task = tuple[Sequence[Combination], Cut, float]
"""A space, and a plan's cut and step."""
ROUND_S = 1.0
"""Seconds of a round, after which whoever waits is answered."""
SHARE, LEAST_S = 0.1, 1.0
"""Of the time limit, what it may take at most where nothing else is to be done; seconds that is at least."""


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
            self._rounds = self._begun(self.workers, (self.listed, cut, step_s), 0.0)
        elif self._rounds is not None:  # what is relaxed for one cut is as good for another
            self._rounds.asked.clear()

    def pause(self) -> None:
        """Go on no more once the round that is under way ends."""
        if self._rounds is not None:
            self._rounds.asked.set()

    def begin(self, cut: Cut, best_s: float, at_once: bool = False) -> None:
        """Prove it for a plan.

        Args:
            cut, best_s: as of `bound_of`; a process beside goes on until `answer`, and after that for as long as it has
                had less than its time for this plan.
            at_once: whether this process says what is known at once, when it is asked.
        """
        self.pause()
        if self._rounds is not None:
            self._rounds.answer()
        within_s = 0.0 if at_once else max(SHARE * self.pricing.deadline.limit_s, LEAST_S)
        task = self.listed, cut, best_s
        self.cut, self._within_s, self._task = cut, within_s, task
        is_beside = self.workers is not None and self.workers.has_idle and not at_once
        self._rounds = self._begun(self.workers, task, within_s) if self.workers and is_beside else None

    def answer(self) -> Bounded:
        """What is proved for the plan it was begun for, by the end of the time limit and what it may take beyond: a
        round is longer where a kind is."""
        if self._rounds is None:
            return bound_of(self.pricing, *self._task, self._within_s)
        self._rounds.asked.set()
        deadline = self.pricing.deadline
        found = self._rounds.answer.within(max(deadline.limit_s - deadline.passed_s, 0.0) + self._within_s)
        return bound_of(self.pricing, *self._task, 0.0) if found is None else found

    def _begun(self, workers: Workers, task: Task, within_s: float) -> BoundRounds:
        """Rounds of a task, which what the last ones took for it counts for."""
        before_s = self._rounds.took_s if self._rounds is not None and self._rounds.task == task else 0.0
        return BoundRounds(workers, self.pricing, task, within_s, before_s)


class BoundRounds:
    """Rounds of refining by a process that has nothing else to do.

    Args:
        workers, pricing: as of `SpaceProof`.
        task: the space, a plan's cut and step.
        within_s: seconds after which no other round begins once an answer is asked for.
        before_s: of these, what is over.
    Attributes:
        asked: set once an answer is waited for.
        answer: waits for it.
    """

    def __init__(self, workers: Workers, pricing: Pricing, task: Task, within_s: float, before_s: float) -> None:
        self.task, self.asked, self._within_s = task, Event(), within_s
        self._began_s = self._ended_s = time.perf_counter() - before_s
        self.answer = workers.begin(one_round, task, pricing, self._goes_on)

    @property
    def took_s(self) -> float:
        """Seconds until the end of the last round."""
        return self._ended_s - self._began_s

    def _goes_on(self, found: Bounded) -> bool:
        self._ended_s = time.perf_counter()
        left_s = self._within_s - self.took_s
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
