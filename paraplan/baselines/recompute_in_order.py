"""A step whose ops run in their order, some tensors dropped between two accesses and made again before the second.

Making a tensor again executes its op, and before it those of whatever it reads that is not there, in order. What cannot
be made again (given, or by an op that must not be executed twice) is held for as long as that needs it.
"""

from __future__ import annotations

from paraplan.baselines.swapping.swap_writing import Gap
from paraplan.planner.memory.problem import GIVEN, MemoryProblem


def repeatable(problem: MemoryProblem, tensor: int) -> bool:
    """Whether a tensor can be made again."""
    maker = problem.tensors[tensor].maker
    return maker != GIVEN and problem.ops[maker].repeatable


def missing_ops(problem: MemoryProblem, tensor: int, there: set[int]) -> list[int]:
    """The ops to execute, in order, to make a tensor again from what is there.

    Args:
        problem: ops and tensors.
        tensor: that is wanted.
        there: tensors that are held.
    """
    needed: set[int] = set()
    stack = [tensor]
    while stack:
        current = stack.pop()
        maker = problem.tensors[current].maker
        if current in there or not repeatable(problem, current) or maker in needed:
            continue
        needed.add(maker)
        stack += problem.ops[maker].reads
    return sorted(needed)


def recomputed(problem: MemoryProblem, gaps: list[Gap], stays: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """The sequence of executions.

    Args:
        problem: the step.
        gaps: in positions of the step's own order; their tensors are made again right before `before`.
        stays: of what is made again on the way to another tensor, these stay until they are read too.
    """
    last = [max(readers, default=-1) for readers in problem.readers]
    drops: dict[int, list[int]] = {}
    for gap in gaps:
        drops.setdefault(gap.after, []).append(gap.tensor)
    there = {t for t, it in enumerate(problem.tensors) if it.maker == GIVEN}
    sequence: list[int] = []
    for index, op in enumerate(problem.ops):
        beside: set[int] = set()
        for tensor in op.reads:
            for maker in missing_ops(problem, tensor, there | beside):
                sequence.append(maker)
                beside.update(problem.ops[maker].makes)
        there.update(op.reads)
        there.update(t for t in beside & stays if last[t] > index)
        sequence.append(index)
        there.update(op.makes)
        there.difference_update(drops.get(index, ()))
        there.difference_update(t for t in (*op.reads, *op.makes) if last[t] <= index and not problem.tensors[t].kept)
    return tuple(sequence)


def moved_gaps(ops: tuple[int, ...], gaps: list[Gap], accesses: list[list[list[int]]]) -> list[Gap]:
    """Gaps of the step's own order in a sequence of it with repeats: from the same access to the one that follows.

    Args:
        ops: the sequence.
        gaps: of the step's own order.
        accesses: per tensor, per version, where it is made and read in the sequence.
    """
    at: dict[int, int] = {-1: -1}
    for position, index in enumerate(ops):
        at.setdefault(index, position)
    found = []
    for gap in gaps:
        begin = at[gap.after]
        for version in accesses[gap.tensor]:
            if begin in version[:-1]:
                following = version[version.index(begin) + 1]
                if following - begin > 1 and following < len(ops):
                    found.append(Gap(gap.tensor, begin, following))
    return found
