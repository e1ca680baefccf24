"""Recomputing and copying to a tier together.

The relaxation with copies says what to make again and what to bring back; reruns are realised just in time, copies are
placed so that nobody waits, what overflows is squeezed by more reruns, and reruns the copies made needless are polished
away. Where nothing fits without waiting, copies get what time memory leaves and compute waits. Everything is judged by
`evaluate`. It is asked twice, with and without reruns, so that the answer is never worse than copies alone; the caller
brings the best without copies. The time that is left is local search's, around the best that nobody waits in.

Limits: one tier is used, the one with the highest rates; others only count in the bound.
Source: the joint problem is POFO's (Beaumont et al. 2021), solved there for chains.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from paraplan.ir.execution.memory_actions import Actions
from paraplan.planner.memory.copy_times import Copies, Stay, actions_of, fit
from paraplan.planner.memory.improvement.greedy_eviction import EvictionPrices, polish, squeeze
from paraplan.planner.memory.improvement.improve import improve
from paraplan.planner.memory.just_in_time import overflowing, realise
from paraplan.planner.memory.memory_schedule import evaluate
from paraplan.planner.memory.problem import MemoryProblem, Tier
from paraplan.planner.memory.relaxations.relaxation import Relaxation, build_relaxation
from paraplan.planner.memory.reruns import Arrays, Floats, Residency, profile_of, without_dead
from paraplan.planner.solvers.milp import Status, solve

_BOTH_SHARE, _COPIES_SHARE = 0.5, 0.15
"""Of the time: for relaxations with reruns and copies, and with copies alone; local search has the rest."""
_ROUNDS = 10
"""Of local search, after which copies are tried in place of reruns."""


@dataclass(frozen=True)
class ScheduleWithCopies:
    """The best schedule with copies.

    Attributes:
        actions: None where none was found.
        step_s: its time.
        bound_s: of every schedule in the given order, with copies or without.
        infeasible: proved that there is none.
    """

    actions: Actions | None
    step_s: float
    bound_s: float
    infeasible: bool = False


def plan_joint(
    problem: MemoryProblem, budget_bytes: int, instants: set[int], known: Residency | None, deadline: float, gap: float
) -> ScheduleWithCopies:
    """Copies with reruns, and copies alone, from some instants on.

    Args:
        problem: ops, tensors and tiers.
        budget_bytes: that may be held.
        instants: at which memory is looked at first; more are added as they are found to matter.
        known: the best schedule without copies; None where there is none.
        deadline: `time.perf_counter()` at which to stop.
        gap: relative, at which the solver stops.
    """
    search = _JointSearch(problem, budget_bytes, deadline, gap)
    if known is not None:
        search.best_s = problem.compute_s + known.recomputed_s
        search.swap(known)
    begun = time.perf_counter()
    infeasible = search.refine(set(instants), True, begun + _BOTH_SHARE * (deadline - begun))
    if not infeasible:
        search.refine(set(instants), False, begun + (_BOTH_SHARE + _COPIES_SHARE) * (deadline - begun))
        search.around()
    return ScheduleWithCopies(search.actions, search.best_s, search.bound_s, infeasible)


class _JointSearch:
    """The best so far."""

    def __init__(self, problem: MemoryProblem, budget_bytes: int, deadline: float, gap: float) -> None:
        self.problem, self.budget, self.deadline, self.gap = problem, budget_bytes, deadline, gap
        self.arrays = Arrays(problem)
        self.tier = max(problem.tiers, key=lambda tier: min(tier.out_bytes_per_s, tier.back_bytes_per_s))
        self.actions: Actions | None = None
        self.best_s = np.inf
        self.bound_s = problem.compute_s
        self.profile: Residency | None = None

    def refine(self, instants: set[int], rerun: bool, until: float) -> bool:
        """Relaxations with more and more instants; says whether one is infeasible."""
        for _ in range(6):
            left = until - time.perf_counter()
            if left <= 0 or (np.isfinite(self.best_s) and self.best_s - self.bound_s <= self.gap * self.best_s):
                break
            relaxation = build_relaxation(
                self.arrays, tuple(sorted(instants)), self.budget, self.problem.tiers, rerun=rerun
            )
            solution = solve(relaxation.milp, time_limit_s=max(0.1, left / 2), relative_gap=max(self.gap / 2, 1e-5))
            if solution.status is Status.INFEASIBLE:
                return rerun
            if rerun:
                self.bound_s = max(self.bound_s, solution.bound * self.problem.compute_s)
            if solution.values is None:
                break
            start = self._realised(relaxation, solution.values)
            self._consider(start, rerun)
            more = overflowing(start, self.budget, instants)
            if not more:
                break
            instants |= more
        return False

    def around(self) -> None:
        """Local search around the best schedule that nobody waits in, until time is up."""
        seed = 0
        while self.profile is not None and time.perf_counter() < self.deadline:
            if self.best_s - self.bound_s <= self.gap * self.best_s:
                break
            seed += 1
            enough_s = self.bound_s - self.problem.compute_s
            found = improve(self.profile, self.budget, _ROUNDS, self.deadline, enough_s, seed)
            self._keep(found)
            self.swap(found)

    def _realised(self, relaxation: Relaxation, values: Floats) -> Residency:
        """The reruns, and the stays: from an instant a tensor is missing at to its next reader."""
        residents, returns = relaxation.residents(values), relaxation.returns(values)
        plain = realise(self.arrays, relaxation.instants, residents, returns)
        stays: dict[Stay, None] = {}
        for k, instant in enumerate(relaxation.instants):
            at = int(np.searchsorted(plain.keys, instant * (self.arrays.num_ops + 1)))
            for tensor in np.flatnonzero(returns[k] & ~residents[k]).tolist():
                version = plain.version_at(tensor, at + 1)
                after = int(np.searchsorted(plain.use_keys, version * len(plain.keys) + at + 1))
                if after < len(plain.use_keys) and plain.use_keys[after] // len(plain.keys) == version:
                    stays[tensor, int(plain.keys[plain.use_keys[after] % len(plain.keys)])] = None
        return profile_of(self.arrays, plain.keys, Copies(self.tier, _within(self.arrays, self.tier, tuple(stays))))

    def _consider(self, start: Residency, rerun: bool) -> None:
        """Keeps the schedule if it is the best: without waiting where that can be made to fit, else waiting."""
        self._keep(start)
        if not rerun:
            return
        found = squeeze(start, self.budget, self.deadline)
        if found is not None:
            found = polish(found, self.budget)
            self._keep(found)
            found = improve(found, self.budget, 5, self.deadline)
            self._keep(found)
            self.swap(found)

    def swap(self, profile: Residency) -> None:
        """Keeps a schedule with copies in place of reruns, one by one, the most seconds per byte first."""
        away = profile.away if isinstance(profile.away, Copies) else Copies(self.tier, ())
        best = without_dead(profile_of(self.arrays, profile.keys, away))
        prices = EvictionPrices.true(self.arrays)
        reruns = np.flatnonzero(best.rerun)
        order = np.argsort(-prices.seconds[best.ops[reruns]] / prices.nbytes[best.ops[reruns]], kind="stable")
        for key in best.keys[reruns[order]].tolist():
            if time.perf_counter() > self.deadline:
                break
            at = int(np.searchsorted(best.keys, key))
            if at >= len(best.keys) or best.keys[at] != key:
                continue
            stays = _within(self.arrays, self.tier, (*away.stays, *_readers(best, at)))
            tried = Copies(self.tier, stays)
            found = without_dead(profile_of(self.arrays, np.delete(best.keys, at), tried))
            if found.peak <= self.budget:
                best, away = found, tried
        self._keep(best)

    def _keep(self, profile: Residency) -> None:
        placed = fit(profile, self.budget)
        if placed is None:
            return
        actions = actions_of(profile, placed)
        found = evaluate(self.problem, actions)
        assert found.peak_bytes <= self.budget, f"{found.peak_bytes} bytes planned for {self.budget}"
        if found.step_s < self.best_s:
            self.best_s, self.actions = found.step_s, actions
            self.profile = profile if profile.peak <= self.budget else self.profile


def _readers(profile: Residency, position: int) -> list[Stay]:
    """What would have to be brought back if a rerun were not made: its results, for their first readers after it."""
    length, found = len(profile.keys), []
    for tensor in profile.arrays.problem.ops[int(profile.ops[position])].makes:
        version = profile.version_at(tensor, position + 1)
        at = int(np.searchsorted(profile.use_keys, version * length + position + 1))
        if at < len(profile.use_keys) and profile.use_keys[at] // length == version:
            found.append((tensor, int(profile.keys[profile.use_keys[at] % length])))
    return found


def _within(arrays: Arrays, tier: Tier, stays: tuple[Stay, ...]) -> tuple[Stay, ...]:
    """As many stays as the tier has room for, the first ones, each once."""
    held, total, found = set[int](), 0, []
    for stay in dict.fromkeys(stays):
        size = 0 if stay[0] in held else int(arrays.nbytes[stay[0]])
        if total + size <= tier.capacity_bytes:
            total += size
            held.add(stay[0])
            found.append(stay)
    return tuple(found)
