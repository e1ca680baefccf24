"""The least budget: what is proved to be needed is never more than brute force needs, and what is found does."""

from __future__ import annotations

import pytest

from paraplan.ir.errors import InfeasibleError
from paraplan.planner.memory.plan_memory import MemoryLimits, plan_memory
from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor
from paraplan.planner.memory.relaxations.least_budget import least_need, need_bytes
from paraplan.planner.memory.reruns import Arrays, profile_of
from paraplan.planner.memory.single_device import least_budget, peak_without
from tests.planner.memory.brute import least
from tests.planner.memory.graphs import chain, random_step


@pytest.mark.parametrize("seed", range(16))
def test_no_schedule_needs_less(seed: int) -> None:
    problem = chain(3) if seed == 0 else random_step(seed, 6)
    arrays = Arrays(problem)
    everything = profile_of(arrays, arrays.diagonal())
    needs = [need_bytes(arrays, op) for op in range(arrays.num_ops)]
    assert all(
        working <= need <= live for working, need, live in zip(arrays.working, needs, everything.live, strict=True)
    )
    need = least_need(arrays)
    assert need.nbytes == max(needs) == needs[need.op]
    true = next(budget for budget in range(1, everything.peak + 1) if least(problem, budget, in_order=True))
    assert need.nbytes <= true
    bracket = least_budget(problem, 0, 5.0)
    assert bracket.need == need and true <= bracket.found_bytes <= everything.peak
    assert plan_memory(problem, bracket.found_bytes, MemoryLimits(time_s=5.0)).evaluation.recomputed_s >= 0.0


def test_what_cannot_be_made_again_is_needed_beside_an_op() -> None:
    """x may not run twice and is read at the end: while the large op runs, it is there too, or its small sum is not."""
    ops = (
        MemOp("x", 1.0, (), (0,), repeatable=False),
        MemOp("big", 1.0, (), (1,), 4),
        MemOp("small", 1.0, (1,), (2,)),
        MemOp("end", 1.0, (0, 2), (3,)),
    )
    tensors = (MemTensor(5, 0), MemTensor(6, 1), MemTensor(1, 2), MemTensor(1, 3, kept=True))
    problem = MemoryProblem(ops, tensors, in_order=True)
    need = least_need(Arrays(problem))
    assert (need.nbytes, need.op) == (15, 1) and peak_without(problem) == 15
    assert least_budget(problem, 0, 2.0).found_bytes == 15
    with pytest.raises(InfeasibleError, match=r"as op 1 \(big\) executes, 15 are needed"):
        plan_memory(problem, 14)


def test_a_cut_is_less_than_what_is_read_later() -> None:
    """Two large results come from one small one, so that at op `wide` the small one alone is needed."""
    ops = (
        MemOp("seed", 1.0, (), (0,), repeatable=False),
        MemOp("a", 1.0, (0,), (1,)),
        MemOp("b", 1.0, (0,), (2,)),
        MemOp("wide", 1.0, (), (3,)),
        MemOp("end", 1.0, (1, 2, 3), (4,)),
    )
    sizes = (2, 7, 7, 9, 1)
    problem = MemoryProblem(ops, tuple(MemTensor(size, op, kept=op == 4) for op, size in enumerate(sizes)))
    assert need_bytes(Arrays(problem), 3) == 11
    assert need_bytes(Arrays(problem), 4) == 24
