"""Copies to a slower tier written into a sequence of executions, beside the ops.

A swap takes a tensor away between two of its accesses. Positions are those of the sequence: `out_at` p means right
before the op at p. Which tensors go, and between which accesses, is a strategy's; when their copies begin is its too
(vDNN), or as here (`timed`): out right after the last access, held until the copy has ended by a clock that counts the
ops only or memory is needed (then the step waits); back so late that the copy ends when the reader begins, as far as
the bytes free in between allow, copies one after the other each way.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from paraplan.ir.execution.memory_actions import Act, Actions, MemAction, free, run
from paraplan.planner.memory.problem import GIVEN, MemoryProblem, Tier


@dataclass(frozen=True)
class Gap:
    """A tensor is not needed after the op at `after` until the op at `before` reads it."""

    tensor: int
    after: int
    before: int


@dataclass(frozen=True)
class Swap:
    """A gap with when its copies begin and when the tensor is freed, each right before the op at a position."""

    gap: Gap
    out_at: int
    free_at: int
    back_at: int


class Spans:
    """When each tensor is there while a sequence runs: its versions from made to last read, freed after that."""

    def __init__(self, problem: MemoryProblem, ops: tuple[int, ...]) -> None:
        self.problem, self.ops = problem, ops
        self.accesses: list[list[list[int]]] = [[[-1]] if tensor.maker == GIVEN else [] for tensor in problem.tensors]
        for position, index in enumerate(ops):
            for tensor in problem.ops[index].reads:
                self.accesses[tensor][-1].append(position)
            for tensor in problem.ops[index].makes:
                self.accesses[tensor].append([position])
        for tensor, versions in enumerate(self.accesses):
            if problem.tensors[tensor].kept:
                versions[-1].append(len(ops))

    def gaps(self, tensor: int) -> list[Gap]:
        """Between accesses that follow each other with an op in between."""
        pairs = (pair for version in self.accesses[tensor] for pair in itertools.pairwise(version))
        return [Gap(tensor, a, b) for a, b in pairs if b - a > 1 and b < len(self.ops)]

    def profile(self, gaps: list[Gap]) -> list[int]:
        """Bytes while each op runs, tensors away in their gaps."""
        problem, change = self.problem, [0] * (len(self.ops) + 2)
        for tensor, versions in enumerate(self.accesses):
            for version in versions:
                change[max(0, version[0])] += problem.tensors[tensor].nbytes
                change[version[-1] + 1] -= problem.tensors[tensor].nbytes
        for gap in gaps:
            change[gap.after + 1] -= problem.tensors[gap.tensor].nbytes
            change[gap.before] += problem.tensors[gap.tensor].nbytes
        found, now = [], problem.base_bytes
        for position, index in enumerate(self.ops):
            now += change[position]
            found.append(now + problem.ops[index].workspace_bytes)
        return found

    def clock_s(self) -> list[float]:
        """When each op begins if nothing is waited for; one entry more for the end."""
        found = [0.0]
        for index in self.ops:
            found.append(found[-1] + self.problem.ops[index].time_s)
        return found


def within_capacity(problem: MemoryProblem, gaps: list[Gap], tier: Tier) -> list[Gap]:
    """The gaps whose tensors the tier can hold, first come first served (it keeps copies until the step ends).

    Args:
        problem: ops and tensors.
        gaps: between accesses, in order.
        tier: that copies go to.
    """
    held: set[int] = set()
    room, found = tier.capacity_bytes, []
    for gap in gaps:
        nbytes = problem.tensors[gap.tensor].nbytes
        if gap.tensor not in held and nbytes > room:
            continue
        room -= 0 if gap.tensor in held else nbytes
        held.add(gap.tensor)
        found.append(gap)
    return found


def timed(spans: Spans, gaps: list[Gap], budget_bytes: int, tier: Tier) -> list[Swap]:
    """The gaps as swaps; one whose copy would not have ended before the tensor is read again is left out.

    Args:
        spans: accesses of the sequence.
        gaps: to be swapped.
        budget_bytes: that may be held.
        tier: that copies go to.
    """
    problem, clock, profile = spans.problem, spans.clock_s(), spans.profile(gaps)
    freed: dict[Gap, int] = {}
    stream_s = 0.0
    for gap in sorted(gaps, key=lambda g: (g.after, g.before, g.tensor)):
        nbytes = problem.tensors[gap.tensor].nbytes
        end_s = max(clock[gap.after + 1], stream_s) + tier.out_s(nbytes)
        position = gap.after + 1
        while position < gap.before and clock[position] < end_s and profile[position] + nbytes <= budget_bytes:
            profile[position] += nbytes
            position += 1
        if position < gap.before:
            freed[gap] = position
            stream_s = end_s
    found: list[Swap] = []
    next_s = float("inf")
    for gap in sorted(freed, key=lambda g: (-g.before, -g.after, g.tensor)):
        nbytes = problem.tensors[gap.tensor].nbytes
        next_s = min(clock[gap.before], next_s) - tier.back_s(nbytes)
        position = gap.before
        while position > freed[gap] and clock[position] > next_s and profile[position - 1] + nbytes <= budget_bytes:
            position -= 1
            profile[position] += nbytes
        found.append(Swap(gap, gap.after + 1, freed[gap], position))
    return found


def written(problem: MemoryProblem, ops: tuple[int, ...], swaps: list[Swap], tier: Tier) -> Actions:
    """The schedule: ops in order, swaps where they say, every version freed after its last access.

    Args:
        problem: ops and tensors.
        ops: the sequence.
        swaps: with their times.
        tier: that copies go to.
    """
    spans = Spans(problem, ops)
    ends: list[list[int]] = [[] for _ in range(len(ops) + 1)]
    for tensor, versions in enumerate(spans.accesses):
        for version in versions:
            if version[-1] < len(ops):
                ends[version[-1] + 1].append(tensor)
    outs: list[list[Swap]] = [[] for _ in range(len(ops) + 1)]
    backs: list[list[Swap]] = [[] for _ in range(len(ops) + 1)]
    frees: list[list[Swap]] = [[] for _ in range(len(ops) + 1)]
    stored: set[int] = set()
    for swap in sorted(swaps, key=lambda s: (s.out_at, s.gap.before, s.gap.tensor)):
        if swap.gap.tensor not in stored:  # a copy on the tier stays good: what is made again is equal
            outs[swap.out_at].append(swap)
            stored.add(swap.gap.tensor)
        frees[swap.free_at].append(swap)
        backs[swap.back_at].append(swap)
    actions: list[MemAction] = []
    for position in range(len(ops) + 1):
        actions += [free(tensor) for tensor in sorted(ends[position])]
        begun = [swap for swap in frees[position] if swap.out_at < position]
        actions += [free(swap.gap.tensor) for swap in begun]
        actions += [MemAction(Act.OUT, swap.gap.tensor, tier.name) for swap in outs[position]]
        actions += [free(swap.gap.tensor) for swap in frees[position] if swap not in begun]
        for swap in sorted(backs[position], key=lambda s: (s.gap.before, s.gap.tensor)):
            actions.append(MemAction(Act.BACK, swap.gap.tensor, tier.name))
        if position < len(ops):
            actions.append(run(ops[position]))
    return tuple(actions)
