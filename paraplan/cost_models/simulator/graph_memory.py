"""Memory of a rank whose steps are captured as graphs and replayed (`runtime.executing.graphs`).

    peak = still + pool + update

Graphs keep what an eager step gives back: batches are copied to one place and stay (`still`); the pool holds the most
that either part of a step has at once, and what the first leaves (gradients, losses) for as long as there are graphs;
the optimizer, which runs eagerly between the parts, has its workspace beside the pool.

Limits: as `memory`; rounding of the allocator, and what runs eagerly besides (evaluations, recorded steps).
"""

from __future__ import annotations

from typing import NamedTuple

from paraplan.cost_models.simulator.live_bytes import MemoryWalk
from paraplan.ir.execution.rank_program import RankProgram, StepKind


class GraphsBytes(NamedTuple):
    """Bytes on the device.

    Attributes:
        still: parameters, optimizer states, buffers and one batch.
        pool: what graphs make, their private pool.
        update: what the optimizer makes and drops.
    """

    still: int
    pool: int
    update: int

    @property
    def peak(self) -> int:
        """All at once."""
        return self.still + self.pool + self.update


def graphs_bytes(program: RankProgram) -> GraphsBytes:
    """What a rank holds while its graphs are replayed; of a program with one update, on the device.

    Raises:
        CostModelError: the program names what does not exist.
    """
    walk = MemoryWalk(program)
    still, pool, update = walk.live, 0, 0
    _hold(walk)
    for step in program.steps:
        if step.kind is StepKind.UPDATE:
            update = max(update, program.update_workspace(step))
            _hold(walk)
            walk.advance(step)
        else:
            pool = max(pool, walk.advance(step).peak - still)
    return GraphsBytes(still, pool, update)


def _hold(walk: MemoryWalk) -> None:
    """Nothing that has a name dies when it loses it."""
    for held in walk.outer.values():
        held.storage.names += 1
