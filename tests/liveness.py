"""What a rank still holds once its steps are done."""

from __future__ import annotations

from paraplan.cost_models.simulator.live_bytes import MemoryWalk
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import RankProgram


def left_alive(program: RankProgram) -> set[Name]:
    """Names that neither were there before the step nor are its results: loss, metrics, outputs and gradients."""
    walk = MemoryWalk(program)
    for step in program.steps:
        walk.advance(step)
    results = {program.loss, *program.metrics.values(), *program.grads.values()}
    return set(walk.outer) - set(program.outer) - results
