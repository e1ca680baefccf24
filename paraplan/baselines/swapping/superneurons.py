"""Liveness, a tensor cache that offloads what was costly to make, and recomputation of everything cheap.

Checkpoints are the results of convolutions and of products (ops with a word of `COSTLY` in their name). Three parts,
each taken only if those before do not bring the peak under the budget:
  1. liveness: every tensor freed after its last reader;
  2. unified tensor pool: checkpoints are offloaded between their last forward and first backward reader, least
     recently used first, only as many as the peak needs (the cache), copied back one layer ahead;
  3. cost-aware recomputation: all else the forward makes is dropped and made again in the backward, segment by segment
     between checkpoints. A segment whose results fit beside the costliest layer (their bytes ≤ l_peak, the most any
     single op needs) is made again once and stays until read (speed-centric); a larger one is made again for every
     reader (memory-centric).

Source: Wang, Ye, Zhao, Wu, Li, Song, Xu & Kraska 2018 (SuperNeurons, PPoPP). Without a tier, part
2 does nothing. Limits: 2 before 3, as copies cost nothing where they hide; convolution workspaces are those of the
step.
"""

from __future__ import annotations

import re

from paraplan.baselines.chains.chain_blocks import split_backward
from paraplan.baselines.common import Limits, answer, best_within, check_budget, fits, keep_all
from paraplan.baselines.recompute_in_order import moved_gaps, recomputed, repeatable
from paraplan.baselines.swapping.swap_writing import Gap, Spans, timed, within_capacity, written
from paraplan.baselines.swapping.vdnn import is_conv
from paraplan.ir.errors import ConstraintError
from paraplan.planner.memory.answer import MemoryAnswer
from paraplan.planner.memory.memory_schedule import freeing
from paraplan.planner.memory.problem import MemoryProblem

COSTLY = {"conv", "linear", "matmul", "mm", "bmm", "addmm", "attention", "dense", "fc"}
"""Words of names of ops whose results are offloaded, never made again."""


def superneurons(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """The first of liveness, offloading, offloading with recomputation that fits.

    Raises:
        SolverLimitError: all three are above the budget.
        ConstraintError: no op is named as costly.
    """
    check_budget(problem, budget_bytes)
    end = split_backward(problem, "superneurons")
    tried = [keep_all(problem)]
    if fits(tried[0], budget_bytes):
        return tried[0]
    checkpoints = _checkpoints(problem, end)
    across = _across(problem, end)
    offloaded = [gap for gap in across if problem.tensors[gap.tensor].maker in checkpoints]
    dropped = [gap for gap in across if gap not in set(offloaded) and repeatable(problem, gap.tensor)]
    for gone in ([], dropped):
        ops = recomputed(problem, gone, _speed_centric(problem, end, checkpoints))
        tried.append(_cached(problem, ops, offloaded, budget_bytes, len(gone)))
        if fits(tried[-1], budget_bytes):
            break
    return best_within(
        "superneurons", tried, budget_bytes, f"{len(offloaded)} checkpoints, {len(dropped)} to recompute"
    )


def _checkpoints(problem: MemoryProblem, end: int) -> set[int]:
    """Forward ops whose results are offloaded rather than made again."""
    found = {op for op in range(end) if is_conv(problem, op)}
    for op in range(end):
        if not COSTLY.isdisjoint(re.split(r"[^a-z]+", problem.ops[op].name.lower())):
            found.add(op)
    if not found:
        raise ConstraintError(
            f"superneurons: no forward op's name has one of {', '.join(sorted(COSTLY))}: name the ops, or take capuchin"
        )
    return found


def _across(problem: MemoryProblem, end: int) -> list[Gap]:
    """The gaps of what the forward makes over the end of the forward, least recently used first."""
    spans = Spans(problem, tuple(range(len(problem.ops))))
    gaps = [gap for tensor in range(len(problem.tensors)) for gap in spans.gaps(tensor)]
    found = [g for g in gaps if 0 <= problem.tensors[g.tensor].maker < end and g.after < end <= g.before]
    return sorted(found, key=lambda gap: (gap.after, gap.tensor))


def _speed_centric(problem: MemoryProblem, end: int, checkpoints: set[int]) -> frozenset[int]:
    """Tensors of the segments that fit beside the costliest layer."""
    most = max(problem.working_bytes(op) for op in range(len(problem.ops))) - problem.base_bytes
    found: set[int] = set()
    segment: list[int] = []
    for op in range(end + 1):
        if op == end or op in checkpoints:
            if sum(problem.tensors[t].nbytes for t in segment) <= most:
                found.update(segment)
            segment = []
        else:
            segment += problem.ops[op].makes
    return frozenset(found)


def _cached(
    problem: MemoryProblem, ops: tuple[int, ...], candidates: list[Gap], budget_bytes: int, dropped: int
) -> MemoryAnswer:
    """A sequence with as many of the candidates offloaded, in order, as bring its peak under the budget."""
    spans = Spans(problem, ops)
    chosen: list[Gap] = []
    if problem.tiers:
        for gap in moved_gaps(ops, within_capacity(problem, candidates, problem.tiers[0]), spans.accesses):
            profile = spans.profile(chosen)
            if max(profile) <= budget_bytes:
                break
            if max(profile[gap.after + 1 : gap.before]) > budget_bytes:
                chosen.append(gap)
    notes = (f"{len(chosen)} offloaded, {dropped} made again",)
    if not chosen:
        return answer(problem, freeing(problem, ops), notes=notes)
    swaps = timed(spans, chosen, budget_bytes, problem.tiers[0])
    return answer(problem, written(problem, ops, swaps, problem.tiers[0]), notes=notes)
