"""Small steps settled: the least recomputation by A* over what is resident and what has run.

A state is (resident tensors, ops executed), both bit sets; a move executes an op, freeing before it a least set of
tensors that makes room. What is estimated of the rest is the ops not yet run, and once each what must run again for
them: the makers of what they read that is not there, of what those read that is not there, and so on. So the least
estimate of the states not yet looked at bounds every schedule, also where the search gives up. States no better than
a known schedule are dropped. It knows no stages: an op may run any number of times, anywhere.

Limits: states grow exponentially with the tensors alive at once; some 60 ops of a deep chain are settled.
Source: A* is Hart, Nilsson and Raphael 1968.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass

from paraplan.planner.memory.problem import GIVEN, MemoryProblem

State = tuple[int, int]

_MOST_REACHED = 1_000_000
"""States whose best way is held, about a kilobyte each: one may have more successors than all others together."""


@dataclass(frozen=True)
class Exhausted:
    """What an exhaustive search found.

    Attributes:
        complete: whether it ended before its limit: `ops` is then the best, or nothing exists where it is None.
        bound_s: no schedule that is better than the known one takes less.
        ops: what to execute in order, repeats among them; None where nothing is better than the known one.
        seconds: of all executions.
    """

    complete: bool
    bound_s: float
    ops: tuple[int, ...] | None = None
    seconds: float = float("inf")


def search_states(
    problem: MemoryProblem,
    budget_bytes: int,
    in_order: bool,
    most_states: int = 60_000,
    known_s: float = float("inf"),
    deadline: float = float("inf"),
) -> Exhausted:
    """The fastest schedule without copies that takes less than `known_s`.

    It gives up once `most_states` were looked at, at the deadline, or where a million are waiting.

    Args:
        problem: ops and tensors.
        budget_bytes: that may be held.
        in_order: whether ops are executed for the first time in the given order.
        most_states: looked at.
        known_s: of the best schedule known.
        deadline: `time.perf_counter()` at which to give up.
    """
    walk = _Walk(problem, budget_bytes, in_order)
    given = sum(1 << index for index, tensor in enumerate(problem.tensors) if tensor.maker == GIVEN)
    if walk.bytes_of(given) > budget_bytes:
        return Exhausted(True, float("inf"))
    start: State = (given & walk.ahead(0)[2], 0)
    least = known_s * (1 - 1e-9)
    spent = {start: 0.0}
    came: dict[State, tuple[State, int]] = {}
    queue: list[tuple[float, int, State]] = [(walk.rest_s(start), 0, start)]
    settled: set[State] = set()
    while queue:
        estimate, _, state = heapq.heappop(queue)
        if state in settled:
            continue
        if len(settled) >= most_states:
            return Exhausted(False, estimate)
        settled.add(state)
        if state[1] == walk.all_done and not walk.kept & ~state[0]:
            return Exhausted(True, spent[state], _path(came, state), spent[state])
        for op, after in walk.moves(state):
            if len(spent) >= _MOST_REACHED or time.perf_counter() > deadline:
                return Exhausted(False, estimate)
            seconds = spent[state] + walk.time_s[op]
            if seconds >= spent.get(after, float("inf")):
                continue
            through = seconds + walk.rest_s(after)
            if through < least:
                spent[after] = seconds
                came[after] = (state, op)
                heapq.heappush(queue, (through, -len(spent), after))
    return Exhausted(True, known_s)


def _path(came: dict[State, tuple[State, int]], state: State) -> tuple[int, ...]:
    found = []
    while state in came:
        state, op = came[state]
        found.append(op)
    return tuple(reversed(found))


class _Walk:
    """Moves between states."""

    def __init__(self, problem: MemoryProblem, budget: int, in_order: bool) -> None:
        self.problem, self.budget, self.in_order = problem, budget, in_order
        self.size = [tensor.nbytes for tensor in problem.tensors]
        self.reads = [sum(1 << tensor for tensor in op.reads) for op in problem.ops]
        self.makes = [sum(1 << tensor for tensor in op.makes) for op in problem.ops]
        self.adds = [op.workspace_bytes + sum(self.size[tensor] for tensor in op.makes) for op in problem.ops]
        self.time_s = [op.time_s for op in problem.ops]
        self.repeats = [op.repeatable for op in problem.ops]
        self.all_done = (1 << len(problem.ops)) - 1
        self.kept = sum(1 << index for index, tensor in enumerate(problem.tensors) if tensor.kept)
        makers = [tensor.maker for tensor in problem.tensors]
        self.lasting = sum(1 << t for t, op in enumerate(makers) if op == GIVEN or not self.repeats[op])
        self._ahead: dict[int, tuple[float, int, int]] = {}

    def bytes_of(self, tensors: int) -> int:
        """Bytes of a set of tensors and the base."""
        return self.problem.base_bytes + sum(self.size[index] for index in _bits(tensors))

    def ahead(self, done: int) -> tuple[float, int, int]:
        """Of the ops not yet run: their seconds, what they read of what was made, what reruns for them may read too."""
        found = self._ahead.get(done)
        if found is None:
            seconds, needed, made = 0.0, self.kept, 0
            for op in _bits(self.all_done & ~done):
                seconds += self.time_s[op]
                needed |= self.reads[op]
                made |= self.makes[op]
            needed &= ~made
            useful = needed
            for op in range(done.bit_length() - 1, -1, -1):
                if done >> op & 1 and self.repeats[op] and self.makes[op] & useful:
                    useful |= self.reads[op]
            found = self._ahead[done] = seconds, needed, useful
        return found

    def rest_s(self, state: State) -> float:
        """Seconds that are still needed at least; infinite where what is needed is gone for good."""
        resident, done = state
        seconds, needed, _ = self.ahead(done)
        missing, seen = needed & ~resident, 0
        if missing & self.lasting:
            return float("inf")
        while missing:
            op = self.problem.tensors[missing.bit_length() - 1].maker
            seconds += self.time_s[op]
            seen |= self.makes[op]
            missing = (missing | self.reads[op] & ~resident) & ~seen
            if missing & self.lasting:
                return float("inf")
        return seconds

    def moves(self, state: State) -> Iterator[tuple[int, State]]:
        """(op, state after) of all that can be executed next."""
        resident, done = state
        live = self.bytes_of(resident)
        useful = self.ahead(done)[2]
        upcoming = (~done & (done + 1)).bit_length() - 1
        for op, reads in enumerate(self.reads):
            again = done >> op & 1
            if reads & ~resident or (again and not (self.repeats[op] and self.makes[op] & useful & ~resident)):
                continue
            if not again and self.in_order and op != upcoming:
                continue
            after = done | 1 << op
            stays = resident & ~self.makes[op]  # what is made again replaces what is there of it
            replaced = resident & self.makes[op]
            over = live + self.adds[op] - self.budget - (self.bytes_of(replaced) - self.problem.base_bytes)
            _, needed, wanted = self.ahead(after)
            for freed in self._freed(stays & ~reads & ~(self.lasting & needed), over):
                yield op, ((stays & ~freed | self.makes[op]) & wanted, after)

    def _freed(self, able: int, over: int) -> Iterator[int]:
        """The least sets of tensors that hold so many bytes; nothing where none is over."""
        if over <= 0:
            yield 0
            return
        items = sorted((index for index in _bits(able) if self.size[index]), key=lambda index: -self.size[index])
        after = [0] * (len(items) + 1)
        for place in range(len(items) - 1, -1, -1):
            after[place] = after[place + 1] + self.size[items[place]]
        stack = [(0, over, 0)]
        while stack:
            place, left, chosen = stack.pop()
            if left <= 0:
                yield chosen  # larger ones were taken first, so that it is least: without its last it is too little
            elif after[place] >= left:
                item = items[place]
                stack.append((place + 1, left, chosen))
                stack.append((place + 1, left - self.size[item], chosen | 1 << item))


def _bits(chosen: int) -> Iterator[int]:
    while chosen:
        low = chosen & -chosen
        yield low.bit_length() - 1
        chosen ^= low
