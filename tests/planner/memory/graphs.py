"""Small steps to plan the memory of."""

from __future__ import annotations

import random

from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor


def chain(layers: int, nbytes: int = 1, time_s: float = 1.0) -> MemoryProblem:
    """A forward of equal layers and its backward: B_i reads what F_i read and made, and the gradient so far."""
    ops: list[MemOp] = []
    tensors = [MemTensor(nbytes, -1)]
    for index in range(layers):
        ops.append(MemOp(f"F{index}", time_s, (index,), (index + 1,)))
        tensors.append(MemTensor(nbytes, index))
    gradient = layers
    for index in reversed(range(layers)):
        made = len(tensors)
        reads = tuple(dict.fromkeys((index, index + 1, gradient)))
        ops.append(MemOp(f"B{index}", 2 * time_s, reads, (made,), backward=True))
        tensors.append(MemTensor(nbytes, len(ops) - 1, kept=index == 0))
        gradient = made
    return MemoryProblem(tuple(ops), tuple(tensors))


def trained_chain(layers: int, seed: int | None = None) -> MemoryProblem:
    """`chain` with a gradient of each layer's parameter, which an update that runs once reads; sizes of a seed."""
    draw = random.Random(seed)

    def size() -> int:
        return 1 if seed is None else draw.randint(1, 4)

    ops: list[MemOp] = []
    tensors = [MemTensor(size(), -1)]
    for index in range(layers):
        ops.append(MemOp(f"F{index}", 1.0, (index,), (index + 1,)))
        tensors.append(MemTensor(size(), index))
    gradient, updates = layers, []
    for index in reversed(range(layers)):
        made = len(tensors)
        tensors += [MemTensor(size(), len(ops)), MemTensor(size(), len(ops) + 1)]
        ops.append(MemOp(f"B{index}", 1.0, tuple(dict.fromkeys((index + 1, gradient))), (made,), backward=True))
        ops.append(MemOp(f"W{index}", 1.0, (index, made), (made + 1,), backward=True))
        gradient = made
        updates.append(made + 1)
    ops += [MemOp(f"U{tensor}", 1.0, (tensor,), (), repeatable=False) for tensor in updates]
    return MemoryProblem(tuple(ops), tuple(tensors))


def random_step(seed: int, num_ops: int) -> MemoryProblem:
    """Random ops, some with several results and workspaces; the last results are kept."""
    draw = random.Random(seed)
    tensors = [MemTensor(draw.randint(1, 4), -1)]
    ops = []
    for index in range(num_ops):
        reads = draw.sample(range(len(tensors)), min(len(tensors), draw.randint(1, 3)))
        count = draw.choice((1, 1, 1, 2))
        makes = tuple(range(len(tensors), len(tensors) + count))
        tensors += [MemTensor(draw.randint(1, 5), index, kept=index == num_ops - 1) for _ in makes]
        ops.append(
            MemOp(f"op{index}", float(draw.randint(1, 6)), tuple(sorted(reads)), makes, draw.choice((0, 0, 1, 2)))
        )
    return MemoryProblem(tuple(ops), tuple(tensors))
