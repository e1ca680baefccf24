"""A sharding chosen for one mesh and its microbatches, on another of as many axes, or with other microbatches."""

from __future__ import annotations

from dataclasses import replace

from paraplan.ir.errors import ParaplanError
from paraplan.ir.machine.mesh import Mesh
from paraplan.lowering import lower
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.pipeline.prices.shorten import runs_of, shortened
from paraplan.planner.pipeline.prices.stage_prices import Sharding
from paraplan.planner.pipeline.prices.stage_timing import few_microbatches


def in_same_layouts(part: Job, decisions: Decisions, mesh: Mesh, microbatches: int) -> Sharding | None:
    """The sharding of the same layouts; None where its dims do not divide there.

    Args:
        part: the job on a position's devices.
        decisions: chosen on other devices, or for other microbatches.
        mesh: of the position, with as many axes.
        microbatches: of a step.
    """
    decisions = replace(decisions, mesh=mesh, num_microbatches=microbatches)
    try:
        sharding = Sharding(part, decisions)
        lower(few_microbatches(shortened(sharding.whole, runs_of(sharding.whole)).plan))
    except (ParaplanError, LookupError, ValueError):
        return None
    return sharding
