"""A step executed by an online policy: ops come one after the other, memory runs out, something is evicted.

What is evicted and read again is made again by executing its op, and first what that op reads, while everything an op
in progress reads is locked. A tensor is let go when no op still to come reads it (its owner drops it). Never evicted:
what is given, kept, or made by an op that must not be executed twice.

The policy decides what is executed; in the schedule handed back each result is held only as long as those executions
need it, so its peak can be below what the policy saw.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from paraplan.baselines.common import Clock, Limits, nothing_fits
from paraplan.planner.memory.problem import GIVEN, MemoryProblem

MOST_RUNS = 100
"""Executions per op, on average, at which a policy is said to thrash."""


class Online(ABC):
    """The machine; a policy says how room is made.

    Attributes:
        resident: tensors that are there.
        locked: how many ops in progress read a tensor.
        last_access_s: when a tensor was last made or read, by the machine's clock.
        now_s: seconds of executions so far.
        ran: ops executed at least once.
        sequence: ops executed.
    """

    strategy: str

    def __init__(self, problem: MemoryProblem, budget_bytes: int, limits: Limits) -> None:
        self.problem, self.budget_bytes, self.clock = problem, budget_bytes, Clock(limits)
        self.resident = {t for t, it in enumerate(problem.tensors) if it.maker == GIVEN}
        self.locked = [0] * len(problem.tensors)
        self.last_access_s = [0.0] * len(problem.tensors)
        self.readers_left = list(map(len, problem.readers))
        self.now_s = 0.0
        self.ran: set[int] = set()
        self.sequence: list[int] = []

    @abstractmethod
    def make_room(self, op: int) -> None:
        """Evicts until what an op makes and its workspace fit, and places it."""

    @abstractmethod
    def let_go(self, tensor: int) -> None:
        """A tensor is no longer there."""

    def run_all(self) -> tuple[int, ...]:
        """Executes the step.

        Returns:
            The ops in the order executed.
        Raises:
            SolverLimitError: nothing is left to evict, time passed, or the policy thrashes.
        """
        for index, op in enumerate(self.problem.ops):
            self._bring(index)
            for tensor in op.reads:
                self.readers_left[tensor] -= 1
            for tensor in (*op.reads, *op.makes):
                it = self.problem.tensors[tensor]
                if not self.readers_left[tensor] and not it.kept and tensor in self.resident and it.maker != GIVEN:
                    self.let_go(tensor)
        return tuple(self.sequence)

    def evictable(self, tensor: int) -> bool:
        """Whether a resident tensor may be evicted now."""
        it = self.problem.tensors[tensor]
        return (
            it.nbytes > 0
            and it.maker != GIVEN
            and not it.kept
            and not self.locked[tensor]
            and self.problem.ops[it.maker].repeatable
        )

    def evicted(self, op: int) -> bool:
        """Whether an op has run and none of its results is there."""
        return op in self.ran and self.resident.isdisjoint(self.problem.ops[op].makes)

    def neighbourhood_s(self, tensor: int, descendants: bool = True) -> float:
        """Seconds of the evicted ops that making a tensor again would execute, and that would need it."""
        problem = self.problem
        first = problem.tensors[tensor].maker
        total, found, stack = 0.0, {first}, [first]
        while stack:
            for maker in (problem.tensors[t].maker for t in problem.ops[stack.pop()].reads):
                if maker not in found and maker != GIVEN and self.evicted(maker):
                    found.add(maker)
                    stack.append(maker)
                    total += problem.ops[maker].time_s
        stack = [first] if descendants else []
        while stack:
            for reader in (r for t in problem.ops[stack.pop()].makes for r in problem.readers[t]):
                if reader not in found and self.evicted(reader):
                    found.add(reader)
                    stack.append(reader)
                    total += problem.ops[reader].time_s
        return total

    def stale_s(self, tensor: int) -> float:
        """Seconds since a tensor was last made or read; never zero."""
        return max(self.now_s - self.last_access_s[tensor], 1e-12 + 1e-9 * self.problem.compute_s)

    def give_up(self, why: str) -> Exception:
        """What is raised when the policy cannot go on."""
        place = f"after {len(self.sequence)} executions of {len(self.problem.ops)} ops"
        return nothing_fits(self.strategy, self.budget_bytes, None, f"{why} {place}")

    def _bring(self, op: int) -> None:
        """Executes an op, first what is missing."""
        stack: list[tuple[int, set[int]]] = [(op, set())]
        while stack:
            index, holding = stack[-1]
            missing = None
            for tensor in self.problem.ops[index].reads:
                if tensor not in self.resident:
                    missing = tensor
                elif tensor not in holding:
                    holding.add(tensor)
                    self.locked[tensor] += 1
            if missing is not None:
                stack.append((self.problem.tensors[missing].maker, set()))
                continue
            self._run(index)
            for tensor in holding:
                self.locked[tensor] -= 1
            stack.pop()

    def _run(self, index: int) -> None:
        if self.clock.over:
            raise self.give_up("time passed")
        if len(self.sequence) >= MOST_RUNS * len(self.problem.ops):
            raise self.give_up("it thrashes")
        self.make_room(index)
        op = self.problem.ops[index]
        self.now_s += op.time_s
        self.ran.add(index)
        self.sequence.append(index)
        self.resident.update(op.makes)
        for tensor in (*op.reads, *op.makes):
            self.last_access_s[tensor] = self.now_s
