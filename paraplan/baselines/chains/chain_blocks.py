"""A training step as a chain of blocks, for strategies that are about chains.

The forward (ops before the first backward one) is cut where few tensors are live: made before and read after it by the
forward. Cuts may be crossed by one tensor, or by the fewest (up to four) for which no block holds more than a quarter
of the forward's ops. What crosses cut i is the boundary of block i: the whole checkpoint from which block i + 1 can be
executed, tensors given with the step aside. The backward, in its order, is divided into phases, block by block from
the last: an op belongs to the first phase that has come to all it reads, a boundary being there in the phase after it.

A chain strategy's decision is a sequence of Step(block, forward or backward). Executing a block's forward again makes
its tensors again; what is held in between follows from the sequence alone (`schedule.freeing`): a boundary that a later
forward starts from is a checkpoint, and a block whose backward follows without its forward having been repeated has
kept everything its backward reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paraplan.ir.errors import ConstraintError
from paraplan.planner.memory.problem import MemoryProblem

MAX_WIDTH = 4
"""The most tensors that may cross a cut."""


@dataclass(frozen=True)
class BlockRun:
    """A block executed."""

    block: int
    backward: bool = False


@dataclass(frozen=True)
class Chain:
    """A step as blocks.

    Attributes:
        problem: the step.
        forward: per block, its forward's ops in order.
        backward: per block, the ops of its phase of the backward, in order.
        boundary: per block, the tensors made by it or before it that later blocks' forwards read.
    """

    problem: MemoryProblem
    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    boundary: tuple[frozenset[int], ...]

    def __len__(self) -> int:
        return len(self.forward)

    @cached_property
    def forward_s(self) -> tuple[float, ...]:
        """Seconds of each block's forward."""
        return tuple(sum(self.problem.ops[op].time_s for op in ops) for ops in self.forward)

    @cached_property
    def backward_s(self) -> tuple[float, ...]:
        """Seconds of each block's backward."""
        return tuple(sum(self.problem.ops[op].time_s for op in ops) for ops in self.backward)

    def made(self, block: int) -> frozenset[int]:
        """Tensors a block's forward makes."""
        return frozenset(tensor for op in self.forward[block] for tensor in self.problem.ops[op].makes)

    def nbytes(self, tensors: frozenset[int]) -> int:
        """Bytes of some tensors."""
        return sum(self.problem.tensors[tensor].nbytes for tensor in tensors)

    def ops(self, steps: list[BlockRun]) -> tuple[int, ...]:
        """The ops that some steps execute, in order."""
        return tuple(op for s in steps for op in (self.backward[s.block] if s.backward else self.forward[s.block]))


def forwards(first: int, end: int) -> list[BlockRun]:
    """The forwards of blocks first … end − 1."""
    return [BlockRun(block) for block in range(first, end)]


def split_backward(problem: MemoryProblem, strategy: str) -> int:
    """The index of the first backward op.

    Raises:
        ConstraintError: there is no backward, or nothing before it.
    """
    first = next((index for index, op in enumerate(problem.ops) if op.backward), 0)
    if first == 0:
        raise ConstraintError(
            f"{strategy} is about steps with a forward and a backward; none of these {len(problem.ops)} ops, or the "
            "first one, is marked backward: mark them, or take a strategy for any graph (checkmate-ilp, moccasin, dtr)"
        )
    return first


def chain_of(problem: MemoryProblem, strategy: str) -> Chain:
    """The chain of blocks of a step.

    Raises:
        ConstraintError: the step has no backward, or its forward has no cut.
    """
    first_backward = split_backward(problem, strategy)
    live = _crossing(problem, first_backward)
    forward = next((found for width in range(1, MAX_WIDTH + 1) if _fine(found := _blocks(live, width))), None)
    forward = forward or _blocks(live, MAX_WIDTH)
    if len(forward) < 2:
        raise ConstraintError(
            f"{strategy} works on a chain of blocks, but every cut of the forward ({first_backward} ops) is crossed by "
            f"more than {MAX_WIDTH} tensors: take a strategy for any graph (checkmate-ilp, moccasin, dtr)"
        )
    boundary = tuple(frozenset(live[block[-1]]) for block in forward)
    return Chain(problem, forward, _phases(problem, forward, boundary), boundary)


def _crossing(problem: MemoryProblem, end: int) -> list[list[int]]:
    """Per forward op, the tensors made up to it that forward ops after it read."""
    last = {t: max((r for r in problem.readers[t] if r < end), default=-1) for t in range(len(problem.tensors))}
    found: list[list[int]] = []
    live: list[int] = []
    for index in range(end):
        live = [tensor for tensor in (*live, *problem.ops[index].makes) if last[tensor] > index]
        found.append(live)
    return found


def _blocks(live: list[list[int]], width: int) -> tuple[tuple[int, ...], ...]:
    found, begun = [], 0
    for index, crossing in enumerate(live):
        if 1 <= len(crossing) <= width or index == len(live) - 1:
            found.append(tuple(range(begun, index + 1)))
            begun = index + 1
    return tuple(found)


def _fine(blocks: tuple[tuple[int, ...], ...]) -> bool:
    """Whether no block is more than a quarter of the forward (single ops are as fine as blocks get)."""
    most = max(map(len, blocks))
    return most == 1 or 4 * most <= sum(map(len, blocks))


def _phases(
    problem: MemoryProblem, forward: tuple[tuple[int, ...], ...], boundary: tuple[frozenset[int], ...]
) -> tuple[tuple[int, ...], ...]:
    block_of = {op: index for index, ops in enumerate(forward) for op in ops}
    end = sum(map(len, forward))
    last = len(forward) - 1
    phases: list[list[int]] = [[] for _ in forward]
    now = last
    for index in range(end, len(problem.ops)):
        for tensor in problem.ops[index].reads:
            maker = block_of.get(problem.tensors[tensor].maker)
            if maker is not None:
                now = min(now, maker + 1 if maker < last and tensor in boundary[maker] else maker)
        phases[now].append(index)
    return tuple(map(tuple, phases))
