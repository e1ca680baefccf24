"""Small steps settled: the least recomputation by shortest paths over what is resident and what has run.

A state is (resident tensors, ops executed), both bit sets; moves execute an op or free a tensor. Dijkstra's algorithm
gives up beyond a number of states. It knows no stages: an op may run any number of times, anywhere.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from paraplan.planner.memory.problem import GIVEN, MemoryProblem

State = tuple[int, int]


@dataclass(frozen=True)
class Exhausted:
    """What an exhaustive search found.

    Attributes:
        complete: whether it ended before its limit: `ops` is then the best, or nothing exists where it is None.
        ops: what to execute in order, repeats among them.
        seconds: of all executions.
    """

    complete: bool
    ops: tuple[int, ...] | None = None
    seconds: float = float("inf")


def search_states(problem: MemoryProblem, budget_bytes: int, in_order: bool, most_states: int = 60_000) -> Exhausted:
    """The fastest schedule without copies.

    `in_order`: ops are executed for the first time in the given order.
    """
    walk = _Walk(problem, budget_bytes, in_order)
    given = sum(1 << index for index, tensor in enumerate(problem.tensors) if tensor.maker == GIVEN)
    start: State = (given, 0)
    if walk.bytes_of(given) > budget_bytes:
        return Exhausted(True)
    spent = {start: 0.0}
    came: dict[State, tuple[State, int]] = {}
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    settled: set[State] = set()
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if state in settled:
            continue
        settled.add(state)
        if len(settled) > most_states:
            return Exhausted(False)
        if state[1] == walk.all_done and not walk.kept & ~state[0]:
            return Exhausted(True, _path(came, state), seconds)
        for op, cost, after in walk.moves(state):
            if seconds + cost < spent.get(after, float("inf")):
                spent[after] = seconds + cost
                came[after] = (state, op)
                heapq.heappush(queue, (seconds + cost, len(spent), after))
    return Exhausted(True)


def _path(came: dict[State, tuple[State, int]], state: State) -> tuple[int, ...]:
    found = []
    while state in came:
        state, op = came[state]
        if op >= 0:
            found.append(op)
    return tuple(reversed(found))


class _Walk:
    """Moves between states."""

    def __init__(self, problem: MemoryProblem, budget_bytes: int, in_order: bool) -> None:
        self.problem, self.budget, self.in_order = problem, budget_bytes, in_order
        self.size = [tensor.nbytes for tensor in problem.tensors]
        self.reads = [sum(1 << tensor for tensor in op.reads) for op in problem.ops]
        self.makes = [sum(1 << tensor for tensor in op.makes) for op in problem.ops]
        self.adds = [op.workspace_bytes + sum(self.size[tensor] for tensor in op.makes) for op in problem.ops]
        self.all_done = (1 << len(problem.ops)) - 1
        self.kept = sum(1 << index for index, tensor in enumerate(problem.tensors) if tensor.kept)

    def bytes_of(self, resident: int) -> int:
        """Bytes of a set of tensors and the base."""
        return self.problem.base_bytes + sum(size for index, size in enumerate(self.size) if resident >> index & 1)

    def moves(self, state: State) -> list[tuple[int, float, State]]:
        """(op or -1, seconds, state after) of all that can be done."""
        resident, done = state
        live = self.bytes_of(resident)
        found = [
            (-1, 0.0, (resident & ~(1 << tensor), done)) for tensor in range(len(self.size)) if resident >> tensor & 1
        ]
        upcoming = (~done & (done + 1)).bit_length() - 1
        for op, it in enumerate(self.problem.ops):
            again = done >> op & 1
            if self.reads[op] & ~resident or (again and not it.repeatable) or live + self.adds[op] > self.budget:
                continue
            if not again and self.in_order and op != upcoming:
                continue
            found.append((op, it.time_s, (resident | self.makes[op], done | 1 << op)))
        return found
