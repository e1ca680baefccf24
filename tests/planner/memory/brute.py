"""The least seconds of recomputation within a budget, by trying everything: shortest paths over what is resident."""

from __future__ import annotations

import heapq

from paraplan.ir.execution.memory_actions import Actions, free, run
from paraplan.planner.memory.problem import GIVEN, MemoryProblem

State = tuple[frozenset[int], frozenset[int]]


def least(problem: MemoryProblem, budget_bytes: int, in_order: bool = False) -> tuple[float, Actions] | None:
    """The least step time without tiers and a schedule that has it; None where nothing fits.

    `in_order`: ops are executed for the first time in the order given. Sizes up to a dozen ops.
    """
    size = [tensor.nbytes for tensor in problem.tensors]
    kept = {index for index, tensor in enumerate(problem.tensors) if tensor.kept}
    given = frozenset(index for index, tensor in enumerate(problem.tensors) if tensor.maker == GIVEN)
    start: State = (given, frozenset())
    if problem.base_bytes + sum(size[t] for t in given) > budget_bytes:
        return None
    best: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, object]] = {}
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    count = 0
    while queue:
        spent, _, state = heapq.heappop(queue)
        if spent > best[state]:
            continue
        resident, done = state
        if len(done) == len(problem.ops) and kept <= resident:
            return spent, _path(came, state)
        live = problem.base_bytes + sum(size[t] for t in resident)
        moves: list[tuple[object, float, State]] = [(free(t), 0.0, (resident - {t}, done)) for t in resident]
        for index, op in enumerate(problem.ops):
            again = index in done
            if not set(op.reads) <= resident or (again and not op.repeatable):
                continue
            if in_order and not again and index != len(done):
                continue
            if live + sum(size[t] for t in op.makes) + op.workspace_bytes <= budget_bytes:
                moves.append((run(index), op.time_s, (resident | set(op.makes), done | {index})))
        for action, seconds, after in moves:
            if spent + seconds < best.get(after, float("inf")):
                best[after] = spent + seconds
                came[after] = (state, action)
                count += 1
                heapq.heappush(queue, (spent + seconds, count, after))
    return None


def _path(came: dict[State, tuple[State, object]], state: State) -> Actions:
    found = []
    while state in came:
        state, action = came[state]
        found.append(action)
    return tuple(reversed(found))  # type: ignore[arg-type]
