"""Sublinear memory by segments: √n equal ones, segments under a byte threshold, and recursive halving.

chen-sqrt: the chain of L blocks is divided into ⌈√L⌉ segments. The forward keeps only what crosses between them; the
backward, segment by segment from the last, executes a segment's forward again, keeping all, then its backward. Memory
O(√L), one extra forward at most (the last segment needs none). It has one plan, whatever the budget.

chen-greedy: a new segment begins once the bytes made since the last cut pass a threshold b; b is searched over a
geometric grid between the largest block and the whole forward, and the shortest plan within the budget is taken.

divide-conquer: T(s, t) executes blocks s … m − 1, m the middle, keeping what crosses into m, then T(m, t), then T(s, m
− 1): O(log L) checkpoints, at most log₂ L executions of each forward. Halving stops at spans of `leaf` blocks, which
keep all; the largest leaf (L, L/2, … 1) within the budget is taken.

Source: Chen, Xu, Zhang & Guestrin 2016 (arXiv 1604.06174), section 4;
Siskind & Pearlmutter 2018 for halving. Limits: chains of blocks (`blocks.py`); nothing is proved about time.
"""

from __future__ import annotations

import math

from paraplan.baselines.chains.chain_blocks import BlockRun, Chain, chain_of, forwards
from paraplan.baselines.common import Limits, answer_ops, best_within, check_budget, fits, keep_all
from paraplan.planner.memory.answer import MemoryAnswer
from paraplan.planner.memory.problem import MemoryProblem

GRID = 40
"""Thresholds that chen-greedy tries."""


def segmented(chain: Chain, starts: list[int]) -> tuple[int, ...]:
    """The ops of a step whose forward keeps only what crosses into the segments beginning at `starts`."""
    ends = [*starts[1:], len(chain)]
    steps = forwards(0, len(chain))
    for number, (first, end) in reversed(list(enumerate(zip(starts, ends, strict=True)))):
        if number < len(starts) - 1:
            steps += forwards(first, end)
        steps += [BlockRun(block, backward=True) for block in reversed(range(first, end))]
    return chain.ops(steps)


def chen_sqrt(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """⌈√L⌉ equal segments; `budget_bytes` is not looked at beyond what nothing can meet."""
    check_budget(problem, budget_bytes)
    chain = chain_of(problem, "chen-sqrt")
    count = math.ceil(math.sqrt(len(chain)))
    starts = [number * len(chain) // count for number in range(count)]
    return answer_ops(problem, segmented(chain, starts), (f"{len(chain)} blocks in {count} segments",))


def chen_greedy(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """Segments under a threshold of bytes, searched.

    Raises:
        SolverLimitError: no threshold's plan is within the budget.
    """
    check_budget(problem, budget_bytes)
    chain = chain_of(problem, "chen-greedy")
    made = [max(1, chain.nbytes(chain.made(block))) for block in range(len(chain))]
    low, high = max(made), sum(made)
    tried = [keep_all(problem)]
    seen: set[tuple[int, ...]] = set()
    for number in range(GRID + 1):
        threshold = low * (high / low) ** (number / GRID)
        starts = _greedy_starts(made, threshold)
        if tuple(starts) not in seen and len(starts) > 1:
            seen.add(tuple(starts))
            notes = (f"{len(starts)} segments of at most {int(threshold)} bytes of {len(chain)} blocks",)
            tried.append(answer_ops(problem, segmented(chain, starts), notes))
    return best_within("chen-greedy", tried, budget_bytes, f"{len(tried)} thresholds")


def _greedy_starts(made: list[int], threshold: float) -> list[int]:
    starts, held = [0], 0
    for block, nbytes in enumerate(made):
        if held + nbytes > threshold and held:
            starts.append(block)
            held = 0
        held += nbytes
    return starts


def divide_conquer(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """Recursive halving down to the largest leaf that fits.

    Raises:
        SolverLimitError: not even leaves of one block are within the budget.
    """
    check_budget(problem, budget_bytes)
    chain = chain_of(problem, "divide-conquer")
    leaf = len(chain)
    tried = []
    while True:
        steps = halved(0, len(chain), leaf)
        tried.append(answer_ops(problem, chain.ops(steps), (f"{len(chain)} blocks halved down to {leaf}",)))
        if fits(tried[-1], budget_bytes) or leaf == 1:
            return best_within("divide-conquer", tried, budget_bytes, f"halving {len(chain)} blocks down to one")
        leaf = (leaf + 1) // 2


def halved(first: int, end: int, leaf: int) -> list[BlockRun]:
    """The steps of blocks first … end − 1, whose first boundary is there.

    Args:
        first, end: blocks.
        leaf: of how many the smallest parts are.
    """
    if end - first <= leaf:
        return forwards(first, end) + [BlockRun(block, backward=True) for block in reversed(range(first, end))]
    middle = (first + end) // 2
    return forwards(first, middle) + halved(middle, end, leaf) + halved(first, middle, leaf)
