"""Products of a sharding in pieces beside their collectives, where its microbatches are faster so.

A pipeline is begun in pieces, and what else is chosen of it (what it recomputes, its passes) is chosen for them.
"""

from __future__ import annotations

from dataclasses import replace

from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.planner.passes.overlap_products import best_pieces
from paraplan.planner.pipeline.prices.stage_prices import Sharding

_PIECED: Lately[Sharding] = SESSION.lately("in_pieces.shardings", 64)


def in_best_pieces(sharding: Sharding, most: int) -> Sharding:
    """The sharding with the products in pieces that make a microbatch fastest; itself where none do.

    Args:
        sharding: of one position's devices.
        most: pieces a product may be in.
    Raises:
        InvalidPlanError: it cannot be lowered.
    """
    return _PIECED.get((Same(sharding), most), lambda: _pieced(sharding, most))


def _pieced(sharding: Sharding, most: int) -> Sharding:
    best = best_pieces(sharding.whole, most)
    if best is sharding.whole:
        return sharding
    ops = {choice.kind: choice.ops for choice in best.stages[0].choices}
    decisions = replace(sharding.decisions, ops=tuple(ops[kind] for kind in range(len(ops))))
    return Sharding(sharding.job, decisions, sharding.options)
