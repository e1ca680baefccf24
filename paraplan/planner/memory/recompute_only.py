"""Recomputation alone: a schedule and a bound, from a loop of relaxations and repairs.

First what is cheap is squeezed: everything kept, nothing kept, every sqrt(n)-th result kept (Chen et al. 2016). Then
the relaxation at a few critical instants is solved; its answer is realised just in time, squeezed where it overflows,
polished, merged with the best and searched around; where the realised plan overflows becomes an instant. At deep
budgets relaxations take long: a share of the time is local search's and merging's, and a second thread proves, with the
bytes at every op, from instants that tell apart what the best plan runs more than once. It ends when the gap is closed
or time is up, or some rounds after nothing new was learnt.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np

from paraplan.planner.memory.improvement.greedy_eviction import polish, squeeze
from paraplan.planner.memory.improvement.improve import improve
from paraplan.planner.memory.improvement.merge import improve_merging, merge
from paraplan.planner.memory.just_in_time import overflowing, realise, separating
from paraplan.planner.memory.relaxations.relaxation import Relaxation, build_relaxation
from paraplan.planner.memory.reruns import Arrays, Ints, Residency, profile_of
from paraplan.planner.solvers.milp import DEFAULT_BACKEND, Solution, Status, solve

_WIDE, _DEEP = 0.01, 0.03
"""Gaps from which on local search has time of its own; and proofs a thread of their own."""
_WIDE_SHARE, _DEEP_SHARE = 0.4, 0.75
"""Of the time: kept for local search at such gaps."""
_PASSES = 10
"""Of local search, between which it takes up what the other thread's relaxations say."""
_OTHERS = 12
"""Schedules that are merged with the best: the best ones seen; and as many of what relaxations said last."""
_SHORT = 15
"""Local search between relaxations has the time left over this: on thousands of ops its rounds are the slower ones."""
_MERGE_S = 3.0
"""For what a relaxation said, once."""
_SEPARATING = 5
"""Instants the last relaxations begin with."""
_BACKENDS = (DEFAULT_BACKEND, "mathopt-cpsat")
"""Branching, and learning from conflicts. Where the gap is small so is that of the LP, and branching is up to twenty
times as fast, while learning may settle what it does not; where it is wide nearly all rows are clauses that bind, and
learning proves more of them."""
_FEW = 2
"""New instants after a relaxation that was settled: the fewer, the longer relaxations are; twice as many after others,
whose bounds come to little, for the plan's sake."""


@dataclass(frozen=True)
class MemoryLimits:
    """When to stop.

    Attributes:
        time_s: of the whole search.
        gap: (step - bound) / step that is good enough.
        rounds: of local search after each relaxation.
        instants: the most of them.
    """

    time_s: float = 60.0
    gap: float = 1e-4
    rounds: int = 20
    instants: int = 40


class Recomputation:
    """The best schedule and bound so far.

    Attributes:
        best: None until one was found.
        bound_s: no schedule in the given order without copies takes less.
        instants: ops memory was looked at.
        refuted: those of a relaxation without any solution; empty where there was none.
    """

    def __init__(self, arrays: Arrays, budget_bytes: int, limits: MemoryLimits) -> None:
        self.arrays, self.budget, self.limits = arrays, budget_bytes, limits
        self.compute_s = arrays.problem.compute_s
        self.deadline = time.perf_counter() + limits.time_s
        self.everything = profile_of(arrays, arrays.diagonal())
        self.best: Residency | None = None
        self.bound_s = self.compute_s
        self.instants: set[int] = set()
        self.refuted: tuple[int, ...] = ()
        self._searches = 0
        self._bounding = Lock()
        self._proving: Future[None] | None = None
        self._starts: list[Residency] = []
        self._seen: list[Residency] = []
        self._drafts: list[Ints] = []
        self._highest = int(self.everything.live.argmax()) if arrays.num_ops else 0

    def run(self) -> None:
        """Searches."""
        if self.everything.peak <= self.budget:
            self.best = self.everything
            return
        self.instants = {self._highest}
        self._consider(self.everything)
        for stride in (0, math.isqrt(self.arrays.num_ops)):
            if self.gap > self.limits.gap:
                self._consider(_keeping(self.arrays, self._highest, stride))
        if self.best is not None:
            self._improve(self.limits.rounds, self.left_s / _SHORT)
        with ThreadPoolExecutor(1) as threads:
            while self.gap > self.limits.gap and self._relaxing_s > 0:
                if len(self.instants) > 1:
                    self._prove_beside(threads)
                if not self._refine():
                    break
            self._prove_beside(threads)
            self._search()
            if self._proving is not None:
                self._proving.result()

    def _search(self) -> None:
        """Local search and merging, until time is up; where the gap is not wide, while they find something."""
        for _ in range(_PASSES):
            while self._starts:
                self._take(self._starts.pop())
            if self.best is None or self.gap <= self.limits.gap or self.left_s <= 0:
                break
            wide, before = self.gap > _WIDE, self.best
            self._improve(100 * self.limits.rounds // _PASSES, self.left_s / 8 if wide else self.left_s)
            self._merge(self.left_s / 3 if wide else min(self.left_s / 3, _MERGE_S))
            if not wide and self.best is before:
                break

    def _prove_beside(self, threads: ThreadPoolExecutor) -> None:
        """Starts the second thread, once, where the gap is deep."""
        if self._proving is None and self.best is not None and self.gap > _DEEP and self.left_s > 0:
            self._proving = threads.submit(self._prove, self.best)

    def _merge(self, seconds: float) -> None:
        """Merges the best with others, and with reruns drawn around it."""
        assert self.best is not None
        until = time.perf_counter() + seconds
        self._seen = sorted(self._seen, key=lambda found: found.recomputed_s)[:_OTHERS]
        others = [*(found.keys for found in self._seen), *self._drafts[-_OTHERS:]]
        self.best = improve_merging(
            self.best, others, self.budget, until, self.bound_s - self.compute_s, self._searches
        )
        self._searches += 1

    def _take(self, draft: Residency) -> None:
        """A schedule that a relaxation said: squeezed, and merged with the best."""
        self._drafts.append(draft.keys)
        self._consider(draft)
        if self.best is not None and self.gap > self.limits.gap and self.left_s > 0:
            until = time.perf_counter() + min(_MERGE_S, self.left_s / 4)
            self.best, _ = merge(self.best, draft.keys, self.budget, until)

    def _prove(self, best: Residency) -> None:
        """Relaxations with the bytes at every op, from instants that tell apart a schedule's reruns on."""
        instants = separating(best, {self._highest}, _SEPARATING)
        while self.left_s > 0 and self.gap > self.limits.gap:
            relaxation = build_relaxation(self.arrays, tuple(sorted(instants)), self.budget, integral=True, every=True)
            solution = solve(
                relaxation.milp,
                backend=_BACKENDS[1],
                time_limit_s=max(0.1, self.left_s),
                relative_gap=1e-3,
                warm_start=relaxation.encode(best),
            )
            self._raise_bound(solution.bound)
            if solution.values is None:
                return
            found = realise(self.arrays, relaxation.instants, relaxation.residents(solution.values))
            self._starts.append(found)
            more = overflowing(found, self.budget, instants, _FEW)
            if not more:
                return
            instants |= more

    def _raise_bound(self, steps: float) -> None:
        """A bound in steps of every op once; of either thread."""
        with self._bounding:
            self.bound_s = max(self.bound_s, steps * self.compute_s)

    def _improve(self, rounds: int, seconds: float) -> None:
        assert self.best is not None
        until = time.perf_counter() + seconds
        enough_s = self.bound_s - self.compute_s
        self.best = improve(self.best, self.budget, rounds, until, enough_s, self._searches, self._seen)
        self._searches += 1

    @property
    def gap(self) -> float:
        """(step - bound) / step."""
        if self.best is None:
            return math.inf
        step = self.compute_s + self.best.recomputed_s
        return (step - self.bound_s) / step if step else 0.0

    @property
    def left_s(self) -> float:
        """Seconds to the deadline."""
        return self.deadline - time.perf_counter()

    @property
    def _relaxing_s(self) -> float:
        """Seconds left to relaxations."""
        if self.best is None or self.gap <= _WIDE:
            return self.left_s
        return self.left_s - (_DEEP_SHARE if self.gap > _DEEP else _WIDE_SHARE) * self.limits.time_s

    def _consider(self, start: Residency) -> None:
        """Squeezes a schedule until it fits, polishes it and keeps the better."""
        most = math.inf if self.best is None else 1.5 * self.best.recomputed_s + 0.02 * self.compute_s
        found = squeeze(start, self.budget, self.deadline, most_s=most)
        if found is None:
            return
        found = polish(found, self.budget)
        self._seen.append(found)
        if self.best is None or found.recomputed_s < self.best.recomputed_s:
            self.best = found

    def _refine(self) -> bool:
        """One relaxation and what follows from it; says whether another can tell more."""
        instants = tuple(sorted(self.instants))
        near = self.gap <= _WIDE
        relaxation = build_relaxation(self.arrays, instants, self.budget, integral=True, near=near)
        solution = self._solved(relaxation)
        if solution.status is Status.INFEASIBLE:
            self.refuted = instants
            return False
        if solution.values is None:
            return False
        start = realise(self.arrays, instants, relaxation.residents(solution.values))
        self._take(start)
        if self.best is not None and self.gap > self.limits.gap:
            self._improve(self.limits.rounds, self.left_s / _SHORT)
        few = solution.status is Status.OPTIMAL
        more = overflowing(start, self.budget, self.instants, _FEW if few else 2 * _FEW)
        self.instants |= more
        return bool(more) and len(self.instants) <= self.limits.instants and (few or self.gap <= _DEEP)

    def _solved(self, relaxation: Relaxation) -> Solution:
        """A relaxation's best solution; where the gap is small, of both backends if the first does not settle it."""
        wide = len(relaxation.instants) > 1 and self.gap > _WIDE
        found: Solution | None = None
        for backend in _BACKENDS[1:] if wide else _BACKENDS:
            solution = solve(
                relaxation.milp,
                backend=backend,
                time_limit_s=max(0.1, self._relaxing_s / (3 if wide else 2)),
                relative_gap=min(self.limits.gap / 2, 1e-3),
                warm_start=None if self.best is None else relaxation.encode(self.best),
            )
            if solution.status is Status.INFEASIBLE:
                return solution
            self._raise_bound(solution.bound)
            if found is None or solution.objective < found.objective or solution.status is Status.OPTIMAL:
                found = solution
            if found.status is Status.OPTIMAL or self.gap <= self.limits.gap or self._relaxing_s <= 0:
                break
        assert found is not None
        return found


def _keeping(arrays: Arrays, instant: int, stride: int) -> Residency:
    """Of what was made by an instant, only every so many ops' results kept (0: none), the rest made again late."""
    made = arrays.maker <= instant
    kept = made & (arrays.maker % stride == 0) if stride else np.zeros_like(made)
    return realise(arrays, (instant,), kept[None])
