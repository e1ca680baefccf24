"""Small training steps, and the least seconds of schedules of some classes by trying everything."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

from paraplan.planner.memory.problem import GIVEN, MemOp, MemoryProblem, MemTensor, Tier


def training(seed: int, layers: int) -> MemoryProblem:
    """A forward with random skips and a backward whose ops read inputs, output and the gradients that come in."""
    draw = random.Random(seed)
    ops: list[MemOp] = []
    tensors: list[MemTensor] = []
    inputs: list[tuple[int, ...]] = []
    for index in range(layers):
        reads = {index - 1} | ({draw.randrange(index)} if index > 1 and draw.random() < 0.5 else set())
        inputs.append(tuple(sorted(t for t in reads if t >= 0)))
        word = draw.choice(("conv", "relu"))
        ops.append(MemOp(f"{word}{index}", float(draw.randint(1, 6)), inputs[-1], (index,), draw.choice((0, 0, 1))))
        tensors.append(MemTensor(draw.randint(1, 5), index))
    gradient: dict[int, int] = {}
    for index in reversed(range(layers)):
        incoming = {gradient[reader] for reader in range(layers) if index in inputs[reader]}
        made = len(tensors)
        gradient[index] = made
        reads = tuple(sorted({*inputs[index], index, *incoming}))
        ops.append(MemOp(f"{ops[index].name}_backward", float(draw.randint(1, 6)), reads, (made,), backward=True))
        tensors.append(MemTensor(tensors[index].nbytes, len(ops) - 1, kept=index == 0))
    return MemoryProblem(tuple(ops), tuple(tensors))


def two_results(seed: int | None, layers: int) -> MemoryProblem:
    """Rotor's chain: a block makes its boundary and what its backward needs beside it; sizes of one without a seed."""
    draw = random.Random(seed)
    size = (lambda most: draw.randint(1, most)) if seed is not None else (lambda most: 1)
    ops: list[MemOp] = []
    tensors = [MemTensor(size(3), GIVEN)]
    boundary, inner = [0], []
    for index in range(layers):
        made = (len(tensors), len(tensors) + 1)
        ops.append(MemOp(f"F{index}", float(size(6)), (boundary[-1],), made, workspace_bytes=size(3) - 1))
        tensors += [MemTensor(size(4), index), MemTensor(size(4), index)]
        boundary.append(made[0])
        inner.append(made[1])
    gradient = boundary[-1]
    for index in reversed(range(layers)):
        reads = tuple(sorted({boundary[index], inner[index], boundary[index + 1], gradient}))
        ops.append(MemOp(f"B{index}", float(size(6)), reads, (len(tensors),), backward=True))
        gradient = len(tensors)
        tensors.append(MemTensor(tensors[boundary[index]].nbytes, len(ops) - 1, kept=index == 0))
    return MemoryProblem(tuple(ops), tuple(tensors))


def with_tier(problem: MemoryProblem, ratio: float) -> MemoryProblem:
    """The step with a host to which copying all results once takes `ratio` of its seconds."""
    rate = sum(tensor.nbytes for tensor in problem.tensors) / (problem.compute_s * ratio)
    return replace(problem, tiers=(Tier("host", 2**40, rate, rate),))


def least_in_stages(problem: MemoryProblem, budget_bytes: int, most_runs: int | None = None) -> float | None:
    """The least step among schedules of stages: between first executions, each earlier op at most once and in order.

    `most_runs`: of each op in all.
    """
    size = [tensor.nbytes for tensor in problem.tensors]
    kept = {index for index, tensor in enumerate(problem.tensors) if tensor.kept}
    given = frozenset(index for index, tensor in enumerate(problem.tensors) if tensor.maker == GIVEN)
    start = (given, 0, 0, (0,) * len(problem.ops))
    best = {start: 0.0}
    queue = [(0.0, 0, start)]
    count = 0
    while queue:
        spent, _, state = heapq.heappop(queue)
        if spent > best[state]:
            continue
        resident, stage, after, runs = state
        if stage == len(problem.ops):
            if kept <= resident:
                return spent
            continue
        live = problem.base_bytes + sum(size[t] for t in resident)
        moves = [(0.0, (resident - {t}, stage, after, runs)) for t in resident]
        for index in range(after, stage + 1):
            op = problem.ops[index]
            more = tuple(n + (k == index and most_runs is not None) for k, n in enumerate(runs))
            if not set(op.reads) <= resident or (index < stage and not op.repeatable):
                continue
            if most_runs is not None and more[index] > most_runs:
                continue
            if live + sum(size[t] for t in op.makes) + op.workspace_bytes <= budget_bytes:
                following = (stage + 1, 0) if index == stage else (stage, index + 1)
                moves.append((op.time_s, (resident | set(op.makes), *following, more)))
        for seconds, then in moves:
            if spent + seconds < best.get(then, float("inf")):
                best[then] = spent + seconds
                count += 1
                heapq.heappush(queue, (spent + seconds, count, then))
    return None
