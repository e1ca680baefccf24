"""Swap what can be hidden, by free time; then recompute or swap, whichever costs less, by memory saved per second.

From the access times of a measured execution (here: the ops' own), every pair of accesses (evicted, back) around the
peak is a candidate, with

    FT   = (back access − copy back) − (evicted access + copy out)      free time: at least 0, the swap is hidden
    MSPS = bytes / seconds to make it again from what is there          memory saving per second

While the peak exceeds the budget: the largest FT is swapped if it is at least 0 and the step, its copies queueing
behind those chosen before, gets no longer (what the paper learns by feedback from execution). Otherwise the seconds
that swap exposes are held against those of the recomputation with the largest MSPS, and the cheaper is taken. Each
choice changes what is there, so times of recomputation are counted anew. Copies back begin early enough to end at the
back access where memory allows (the in-trigger), recomputation is on demand.

Source: Peng, Shi, Dai, Jin, Ma, Xiong, Yang & Qian 2020 (Capuchin, ASPLOS). Limits: nothing is
proved. Without a tier it only recomputes.
"""

from __future__ import annotations

from paraplan.baselines.common import Clock, Limits, answer, check_budget, fits, nothing_fits
from paraplan.baselines.recompute_in_order import missing_ops, moved_gaps, recomputed, repeatable
from paraplan.baselines.swapping.swap_writing import Gap, Spans, timed, within_capacity, written
from paraplan.planner.memory.answer import MemoryAnswer
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.problem import MemoryProblem


class _Policy:
    def __init__(self, problem: MemoryProblem) -> None:
        self.problem = problem
        self.tier = problem.tiers[0] if problem.tiers else None
        own = Spans(problem, tuple(range(len(problem.ops))))
        self.clock = own.clock_s()
        self.left = [gap for tensor in range(len(problem.tensors)) for gap in own.gaps(tensor)]
        self.left = [gap for gap in self.left if problem.tensors[gap.tensor].nbytes]
        self.swapped: list[Gap] = []
        self.dropped: list[Gap] = []
        self.rebuild()

    def rebuild(self) -> None:
        """The sequence and its memory under the choices so far."""
        self.ops = recomputed(self.problem, self.dropped)
        self.spans = Spans(self.problem, self.ops)
        self.away = moved_gaps(self.ops, self.swapped, self.spans.accesses)
        profile = self.spans.profile(self.away)
        self.peak = max(profile)
        self.peak_op = self.ops[profile.index(self.peak)]

    def free_time_s(self, gap: Gap) -> float:
        """FT of a candidate."""
        assert self.tier is not None
        nbytes = self.problem.tensors[gap.tensor].nbytes
        back = self.clock[gap.before] - self.tier.back_s(nbytes)
        return back - (self.clock[gap.after + 1] + self.tier.out_s(nbytes))

    def making_s(self, gap: Gap) -> float:
        """Seconds to make a candidate again before its back access."""
        problem, last = self.problem, gap.before
        gone = {g.tensor for g in self.dropped if g.after < last <= g.before} | {gap.tensor}
        there = {t for t, readers in enumerate(problem.readers) if t not in gone and max(readers, default=-1) >= last}
        there = {t for t in there if problem.tensors[t].maker < last}
        return sum(problem.ops[op].time_s for op in missing_ops(problem, gap.tensor, there))

    def step_s(self, swapped: list[Gap]) -> float:
        """Seconds of the step with some swaps, copies queueing, memory as it is now: the paper's feedback."""
        assert self.tier is not None
        away = moved_gaps(self.ops, swapped, self.spans.accesses)
        swaps = timed(self.spans, away, self.peak, self.tier)
        return evaluate(self.problem, written(self.problem, self.ops, swaps, self.tier)).step_s

    def choose(self) -> bool:
        """Takes one candidate away at the peak; False where there is none."""
        at_peak = [g for g in self.left if g.after < self.peak_op < g.before]
        swaps = [
            g
            for g in at_peak
            if self.tier and len(within_capacity(self.problem, [*self.swapped, g], self.tier)) > len(self.swapped)
        ]
        options: list[tuple[float, int, Gap, list[Gap]]] = []
        if swaps:
            swap = max(swaps, key=lambda g: (self.free_time_s(g), -g.tensor))
            exposed = self.step_s([*self.swapped, swap]) - self.step_s(self.swapped)
            if self.free_time_s(swap) >= 0 and exposed <= 1e-9 * self.problem.compute_s:
                self._take(swap, self.swapped)
                return True
            options.append((max(exposed, -self.free_time_s(swap)), 0, swap, self.swapped))
        again = [(g, self.making_s(g)) for g in at_peak if repeatable(self.problem, g.tensor)]
        if again:
            drop, seconds = max(
                again,
                key=lambda each: (self.problem.tensors[each[0].tensor].nbytes / (each[1] + 1e-300), -each[0].tensor),
            )
            options.append((seconds, 1, drop, self.dropped))
        if not options:
            return False
        _, _, gap, where = min(options, key=lambda each: each[:2])
        self._take(gap, where)
        return True

    def _take(self, gap: Gap, where: list[Gap]) -> None:
        where.append(gap)
        self.left.remove(gap)


def capuchin(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """The schedule of the choices that bring the peak under the budget.

    Raises:
        SolverLimitError: no candidate is left at a peak above the budget, or time passed.
    """
    check_budget(problem, budget_bytes)
    clock = Clock(limits)
    policy = _Policy(problem)
    while policy.peak > budget_bytes:
        if clock.over:
            raise nothing_fits("capuchin", budget_bytes, policy.peak, "time passed")
        if not policy.choose():
            raise nothing_fits("capuchin", budget_bytes, policy.peak, "no tensor is left to take away at the peak")
        policy.rebuild()
    notes = (f"{len(policy.swapped)} swapped, {len(policy.dropped)} made again",)
    if policy.tier is None:
        found = answer(problem, freeing(problem, policy.ops), notes=notes)
    else:
        swaps = timed(policy.spans, policy.away, budget_bytes, policy.tier)
        found = answer(problem, written(problem, policy.ops, swaps, policy.tier), notes=notes)
    if not fits(found, budget_bytes):
        why = "copies do not end before their tensors are read again"
        raise nothing_fits("capuchin", budget_bytes, found.evaluation.peak_bytes, why)
    return found
