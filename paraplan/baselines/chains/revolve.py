"""Binomial checkpointing of a chain of equal steps with a number of slots.

A slot holds one boundary. With c slots beside the beginning's, reversing l steps takes, in forward steps executed
beyond those right before their own backward,

    T(1, c) = 0,   T(l, 0) = l (l − 1) / 2,   T(l, c) = min over j of  j + T(l − j, c − 1) + T(j, c),

which is Griewank's r·l − β(c + 2, r − 1) for β(c + 1, r − 1) < l ≤ β(c + 1, r), β(s, r) = (s + r choose s): no schedule
of equal steps and slots executes fewer. The most slots whose schedule is within the budget are taken.

Source: Griewank & Walther 2000 (algorithm 799, revolve). Limits: blocks count as equal in time and bytes, so the
schedule is optimal only where they are; a block's backward always follows its own forward (nothing inside a block is
saved over others), so with memory to spare `rotor` is never longer.
"""

from __future__ import annotations

from paraplan.baselines.chains.chain_blocks import BlockRun, chain_of, forwards
from paraplan.baselines.common import Limits, answer_ops, check_budget, fits, nothing_fits
from paraplan.ir.process.memo import SESSION
from paraplan.planner.memory.answer import MemoryAnswer
from paraplan.planner.memory.problem import MemoryProblem


@SESSION.cached()
def best_split(length: int, slots: int) -> tuple[int, int]:
    """(T(length, slots), the j that gives it, the smallest of equals)."""
    if length == 1:
        return 0, 0
    if slots == 0:
        return length * (length - 1) // 2, 0
    return min((j + best_split(length - j, slots - 1)[0] + best_split(j, slots)[0], j) for j in range(1, length))


def reversal(first: int, length: int, slots: int) -> list[BlockRun]:
    """The steps that reverse blocks first … first + length − 1, whose first boundary is there.

    Args:
        first, length: blocks.
        slots: for boundaries.
    """
    if length == 1:
        return [BlockRun(first), BlockRun(first, backward=True)]
    _, split = best_split(length, slots)
    if split == 0:
        return [
            step
            for block in reversed(range(first, first + length))
            for step in (*forwards(first, block + 1), BlockRun(block, backward=True))
        ]
    return [
        *forwards(first, first + split),
        *reversal(first + split, length - split, slots - 1),
        *reversal(first, split, slots),
    ]


def revolve(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """The schedule of the most slots that fits (found by bisection: more slots hold more).

    Raises:
        SolverLimitError: not even the one without slots is within the budget.
    """
    check_budget(problem, budget_bytes)
    chain = chain_of(problem, "revolve")
    for length in range(1, len(chain) + 1):  # fills the table from below, so that recursion stays shallow
        for slots in range(len(chain)):
            best_split(length, slots)

    def planned(slots: int) -> MemoryAnswer:
        extra = best_split(len(chain), slots)[0]
        notes = (f"{len(chain)} blocks, {slots} slots, {extra} forwards of blocks executed again",)
        return answer_ops(problem, chain.ops(reversal(0, len(chain), slots)), notes)

    low, best = 0, planned(0)
    if not fits(best, budget_bytes):
        raise nothing_fits("revolve", budget_bytes, best.evaluation.peak_bytes, f"{len(chain)} blocks, no slot")
    high = len(chain)
    while high - low > 1:
        middle = (low + high) // 2
        found = planned(middle)
        if fits(found, budget_bytes):
            low, best = middle, found
        else:
            high = middle
    return best
