"""Rematerialisation with addresses: evict neighbours, so that what is freed is one piece.

Memory is an arena. A result takes the first free piece that holds it, ops of low cost density (seconds per byte) from
the left and costly ones from the right (cheap tensor partitioning). Where no piece does, the cheapest window of
adjacent blocks is evicted: over all runs of free and evictable blocks, by two pointers, the least Σ h(t) with enough
bytes,

    h(t) = (time of t's op + those of its evicted neighbourhood) / staleness(t).

An op is costly where its density is above the median of the ops that make something.

Source: Zhang, Ma, Liu & Yuan 2023 (Coop, arXiv 2311.00591). Its third part, recomputable in-place
updates, concerns parameters, which are no part of a step here. Limits: the arena is the budget less what is always
there, so a schedule can fail by fragmentation where `dtr` does not; nothing is proved.
"""

from __future__ import annotations

import statistics

from paraplan.baselines.common import Limits, answer_ops, check_budget, fits, nothing_fits
from paraplan.baselines.policies.online import Online
from paraplan.planner.memory.answer import MemoryAnswer
from paraplan.planner.memory.problem import MemoryProblem

FREE = -1
HELD = -2
"""What is in a block that holds no tensor: nothing, or a workspace."""


class _Coop(Online):
    strategy = "coop"

    def __init__(self, problem: MemoryProblem, budget_bytes: int, limits: Limits) -> None:
        super().__init__(problem, budget_bytes, limits)
        self.blocks: list[tuple[int, int]] = [(budget_bytes - problem.base_bytes, FREE)]  # (bytes, tensor), by address
        densities = [self._density(op) for op in range(len(problem.ops)) if problem.ops[op].makes]
        self.costly_above = statistics.median(densities) if densities else 0.0
        for tensor in sorted(self.resident):
            self._place(problem.tensors[tensor].nbytes, tensor, costly=True)

    def _density(self, op: int) -> float:
        it = self.problem.ops[op]
        return it.time_s / max(1, sum(self.problem.tensors[t].nbytes for t in it.makes))

    def make_room(self, op: int) -> None:
        it = self.problem.ops[op]
        costly = self._density(op) > self.costly_above
        scratch = it.workspace_bytes
        for tensor in it.makes:
            self.locked[tensor] += 1
            if tensor in self.resident:  # made beside the one that is there
                scratch += self.problem.tensors[tensor].nbytes
        placed = [t for t in it.makes if t not in self.resident]
        for tensor in placed:
            self._place(self.problem.tensors[tensor].nbytes, tensor, costly)
        self._place(scratch, HELD, costly)
        self._release(HELD)
        for tensor in it.makes:
            self.locked[tensor] -= 1

    def let_go(self, tensor: int) -> None:
        self.resident.remove(tensor)
        self._release(tensor)

    def _release(self, what: int) -> None:
        merged: list[tuple[int, int]] = []
        for nbytes, tensor in self.blocks:
            tensor = FREE if tensor == what else tensor
            if tensor == FREE and merged and merged[-1][1] == FREE:
                merged[-1] = (merged[-1][0] + nbytes, FREE)
            else:
                merged.append((nbytes, tensor))
        self.blocks = merged

    def _place(self, nbytes: int, what: int, costly: bool) -> None:
        if nbytes == 0:
            return
        place = self._piece(nbytes, costly)
        if place is None:
            for tensor in self._window(nbytes):
                self.let_go(tensor)
            place = self._piece(nbytes, costly)
            assert place is not None
        size, _ = self.blocks[place]
        rest = [(size - nbytes, FREE)] if size > nbytes else []
        self.blocks[place : place + 1] = [*rest, (nbytes, what)] if costly else [(nbytes, what), *rest]

    def _piece(self, nbytes: int, costly: bool) -> int | None:
        places = range(len(self.blocks))
        for place in reversed(places) if costly else places:
            if self.blocks[place][1] == FREE and self.blocks[place][0] >= nbytes:
                return place
        return None

    def _window(self, nbytes: int) -> list[int]:
        """Tensors of the cheapest window that holds some bytes."""
        costs: list[float | None] = []
        for _, tensor in self.blocks:
            if tensor == FREE:
                costs.append(0.0)
            elif tensor in self.resident and self.evictable(tensor):
                own = self.problem.ops[self.problem.tensors[tensor].maker].time_s
                costs.append((own + self.neighbourhood_s(tensor)) / self.stale_s(tensor))
            else:
                costs.append(None)
        best: tuple[float, int, int] | None = None
        first = held = 0
        for last, cost in enumerate(costs):
            if cost is None:
                first, held = last + 1, 0
                continue
            held += self.blocks[last][0]
            while held - self.blocks[first][0] >= nbytes:
                held -= self.blocks[first][0]
                first += 1
            if held >= nbytes:
                spent = sum(c for c in costs[first : last + 1] if c is not None)
                if best is None or (spent, first) < best[:2]:
                    best = (spent, first, last)
        if best is None:
            raise self.give_up("no window of adjacent tensors is large enough")
        return [tensor for _, tensor in self.blocks[best[1] : best[2] + 1] if tensor != FREE]


def coop(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """The executions of the policy with an arena.

    Raises:
        SolverLimitError: no window could be evicted, the policy thrashed, or time passed.
    """
    check_budget(problem, budget_bytes)
    ops = _Coop(problem, budget_bytes, limits).run_all()
    found = answer_ops(problem, ops, (f"{len(ops) - len(problem.ops)} executions more, in an arena of addresses",))
    if not fits(found, budget_bytes):
        raise nothing_fits("coop", budget_bytes, found.evaluation.peak_bytes, "by the evaluation")
    return found
