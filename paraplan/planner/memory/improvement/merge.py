"""Local search by merging: the best set of reruns among those of the best schedule and some that are offered.

What is offered: the reruns of other schedules, which may overflow (a relaxation's answer, realised), and, drawn at
random, the makers behind what some consecutive stages read, or of what some consecutive ops make wherever that is read.
Each is an integer program with the exact bytes (`merge_program`) that starts from the best schedule, so many reruns may
change places at once, far apart, which no single eviction betters. Programs that are settled are followed by larger
ones, others by smaller ones.

Source: construct, merge, solve and adapt (Blum et al. 2016); drawn neighbourhoods as in large-neighbourhood search
(Shaw 1998).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from paraplan.planner.memory.improvement.greedy_eviction import polish, squeeze
from paraplan.planner.memory.improvement.merge_program import MergeProgram
from paraplan.planner.memory.problem import GIVEN
from paraplan.planner.memory.reruns import Arrays, Ints, Residency, profile_of, without_dead
from paraplan.planner.solvers.milp import SolverError, solve

_BACKEND = "mathopt-cpsat"
_SOLVE_S = 3.0
_OFFERED = 400.0
"""Places in the first programs; later ones in proportion to what could be settled, between `_FEWEST` and `_MOST`."""
_FEWEST, _MOST = 60.0, 3000.0
_GROWN, _SHRUNK = 1.3, 0.6
_KINDS = (0.45, 0.35, 0.2)
"""How often what stages read is drawn, what ops make, and other schedules."""


def merge(best: Residency, offered: Ints, budget_bytes: int, deadline: float) -> tuple[Residency, bool]:
    """A schedule no worse, of its own reruns and the keys offered, and whether it is known to be the best of those.

    Args:
        best: the schedule so far.
        offered: keys of reruns, sorted.
        budget_bytes: that it has to fit.
        deadline: on `time.perf_counter()`.
    """
    arrays = best.arrays
    program = MergeProgram(arrays, np.append(best.keys, offered), best.keys, budget_bytes)
    left = min(deadline - time.perf_counter(), _SOLVE_S)
    if left <= 0:
        return best, False
    started = time.perf_counter()
    try:
        solution = solve(program.milp, backend=_BACKEND, time_limit_s=left, relative_gap=1e-4, warm_start=program.hint)
    except SolverError:  # it scales rows to integers, and what it then finds may break one by rounding
        return best, False
    settled = time.perf_counter() - started < left / 2
    if solution.values is None:
        return best, settled
    found: Residency | None = without_dead(profile_of(arrays, program.keys(solution.values)))
    if found is not None and found.peak > budget_bytes:  # by rounding
        found = squeeze(found, budget_bytes, deadline, most_s=best.recomputed_s)
    if found is None or found.recomputed_s >= best.recomputed_s * (1 - 1e-9):
        return best, settled
    return polish(found, budget_bytes), settled


def improve_merging(
    best: Residency, others: Sequence[Ints], budget_bytes: int, deadline: float, enough_s: float = 0.0, seed: int = 0
) -> Residency:
    """A schedule no worse, where the deadline passes or `enough_s` of reruns are reached.

    Args:
        best: where it begins.
        others: keys of schedules to draw from.
        budget_bytes: that may be held.
        deadline: `time.perf_counter()` at which to stop.
        enough_s: seconds of reruns that are good enough.
        seed: of what is drawn.
    """
    draw = np.random.default_rng(seed)
    most = [_OFFERED] * 3
    while time.perf_counter() < deadline and best.recomputed_s > enough_s * (1 + 1e-9):
        kind = int(draw.choice(3, p=_KINDS if others else (0.5, 0.5, 0.0)))
        if kind == 2:
            offered = _of_others(best, others, draw, most[2])
        else:
            offered = _drawn(best, budget_bytes, draw, most[kind], by_op=kind == 1)
        if not len(offered):
            continue
        best, settled = merge(best, offered, budget_bytes, deadline)
        most[kind] = min(_MOST, max(_FEWEST, most[kind] * (_GROWN if settled else _SHRUNK)))
    return best


def _of_others(best: Residency, others: Sequence[Ints], draw: np.random.Generator, most: float) -> Ints:
    """Of some other schedules, as many as keep to so many places; of the first some stages, where it is too large."""
    found = np.zeros(0, np.int64)
    for index in draw.permutation(len(others)).tolist():
        new = np.setdiff1d(others[index], best.keys)
        more = np.union1d(found, new)
        if len(more) > most:
            if not len(found):
                first = int(draw.integers(len(more) - int(most) + 1))
                found = more[first : first + int(most)]
            break
        found = more
    return found


def _drawn(best: Residency, budget_bytes: int, draw: np.random.Generator, most: float, by_op: bool) -> Ints:
    """The reruns of consecutive stages, or of consecutive ops, that the schedule lacks: about so many."""
    n = best.arrays.num_ops
    seconds = best.arrays.time_s[best.ops] * best.rerun
    at = int(draw.choice(len(seconds), p=seconds / seconds.sum()))
    width = max(2, int(n * draw.choice((0.02, 0.05, 0.1, 0.2))))
    first = int((best.ops if by_op else best.stages)[at] - draw.integers(width))
    behind = _Behind(best, budget_bytes)
    span = range(max(0, first), min(n, first + width))
    found = behind.made_in(span, most) if by_op else behind.read_in(span, most)
    return np.setdiff1d(np.array(found, np.int64), best.keys)


class _Behind:
    """What may be executed again for what stages read."""

    def __init__(self, best: Residency, budget_bytes: int) -> None:
        self.arrays: Arrays = best.arrays
        self.n = best.arrays.num_ops
        self.able = (best.arrays.repeatable & (best.arrays.working <= budget_bytes)).tolist()
        self.again: dict[int, list[int]] = {}
        for key in best.keys[best.rerun].tolist():
            self.again.setdefault(key // self.n, []).append(key % self.n)

    def read_in(self, stages: range, most: float) -> list[int]:
        """Keys of consecutive stages, of each those nearest to what it reads."""
        each = max(2, int(most / len(stages)))
        return [key for stage in stages for key in self._keys(stage, range(self.n), each)]

    def made_in(self, ops: range, most: float) -> list[int]:
        """Keys of consecutive ops in all stages that read what they make; of the first ops, where those are many."""
        stages = {reader for op in ops for tensor in self._makes(op) for reader in self._readers(tensor)}
        stages |= {stage for stage, again in self.again.items() if any(self._reads_of(op, ops) for op in again)}
        found: list[int] = []
        for stage in sorted(stages, reverse=True):
            found += self._keys(stage, ops, self.n)
            if len(found) > most:
                break
        return found

    def _keys(self, stage: int, ops: range, most: int) -> list[int]:
        found: list[int] = []
        level = self._roots(stage)
        seen = set(level)
        while level and len(found) < most:
            following: list[int] = []
            for tensor in level:
                op = self.arrays.makers[tensor]
                if op == GIVEN or op >= stage or op not in ops or not self.able[op]:
                    continue
                found.append(stage * self.n + op)
                new = [read for read in self.arrays.reads[op] if read not in seen]
                seen.update(new)
                following += new
            level = following
        return found

    def _roots(self, stage: int) -> list[int]:
        reads = (self.arrays.reads[op] for op in (stage, *self.again.get(stage, ())))
        return list(dict.fromkeys(tensor for each in reads for tensor in each))

    def _makes(self, op: int) -> Iterable[int]:
        return self.arrays.problem.ops[op].makes

    def _readers(self, tensor: int) -> Iterable[int]:
        return self.arrays.problem.readers[tensor]

    def _reads_of(self, op: int, ops: range) -> bool:
        return any(self.arrays.makers[tensor] in ops for tensor in self.arrays.reads[op])
