"""Rematerialisation and offloading of a chain together.

The program of `pofo_program.py` decides what the first forward of the chain keeps, copies out, or leaves to be made
again by the best persistent schedule without copies (`rotor.py`). It is optimal in its model, in slots of bytes and to
the nearest of `QUEUE` parts for bytes in flight; the schedule is then timed by `swap_writing.py` and evaluated, and the
shorter of it and rotor's within the budget is the answer.

Source: Beaumont, Eyraud-Dubois & Shilova 2021 (POFO, NeurIPS). Limits: its program divides time, ours bytes in flight;
what is recomputed is never offloaded (as there); runs of at most `LONGEST` blocks; where time passes, rotor's.
"""

from __future__ import annotations

import contextlib

from paraplan.baselines.chains.block_costs import BlockCosts, block_costs
from paraplan.baselines.chains.chain_blocks import Chain, chain_of
from paraplan.baselines.chains.pofo_program import PofoTable
from paraplan.baselines.chains.rotor import plan_chain
from paraplan.baselines.common import (
    Clock,
    Limits,
    answer,
    best_within,
    check_budget,
    fits,
    given_bytes,
    pruned,
    tier_of,
)
from paraplan.baselines.swapping.swap_writing import Spans, timed, within_capacity, written
from paraplan.ir.errors import SolverLimitError
from paraplan.planner.memory.answer import MemoryAnswer
from paraplan.planner.memory.problem import MemoryProblem, Tier

RETRIES = 3


def pofo(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """The shorter of the program's schedule and rotor's.

    Raises:
        SolverLimitError: neither is within the budget, or time passed.
    """
    check_budget(problem, budget_bytes)
    tier, clock = tier_of(problem, "pofo"), Clock(limits)
    chain = chain_of(problem, "pofo")
    costs, tried = block_costs(chain), []
    room = budget_bytes - problem.base_bytes - given_bytes(problem)
    for _ in range(RETRIES):
        found = _combined(chain, costs, room, budget_bytes, tier, clock)
        if found is None:
            break
        tried.append(found)
        if fits(found, budget_bytes) or clock.over:
            break
        room -= found.evaluation.peak_bytes - budget_bytes
    with contextlib.suppress(SolverLimitError):  # rotor's own failure is no news where the program has a schedule
        tried.append(plan_chain(chain, budget_bytes, limits, "pofo"))
    return best_within("pofo", tried, budget_bytes, f"a chain of {len(chain)} blocks with {tier.name}")


def _combined(
    chain: Chain, costs: BlockCosts, room: int, budget_bytes: int, tier: Tier, clock: Clock
) -> MemoryAnswer | None:
    if room < 0:
        return None
    problem, planned = chain.problem, PofoTable(costs, room, tier, clock).plan()
    if planned is None:
        return None
    steps, away = planned
    ops = pruned(problem, chain.ops(steps))
    spans, turn = Spans(problem, ops), sum(map(len, chain.forward))
    gaps = [gap for tensor in sorted(away) for gap in spans.gaps(tensor) if gap.after < turn <= gap.before]
    swaps = timed(spans, within_capacity(problem, gaps, tier), budget_bytes, tier)
    notes = (f"{len(chain)} blocks, {len(swaps)} tensors to {tier.name}",)
    return answer(problem, written(problem, ops, swaps, tier), notes=notes)
