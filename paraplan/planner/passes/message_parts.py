"""Messages between stages in parts: ranks that hold the same send a part each, which the next stage gathers.

Under tensor parallelism without sequence parallelism what a stage hands on is whole on every rank of a group, and each
sends all of it over its own way between nodes. In parts it crosses nodes once and is gathered inside a node, which is
faster (Narayanan et al. 2021, section 4.1: "scatter/gather"); and what waits for its backward is a part. Within a node
nothing is won. Both are simulated; the faster counts.
"""

from __future__ import annotations

import msgspec

from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.machine.mesh import R
from paraplan.ir.plan import Plan
from paraplan.lowering.stage_blocks import PlanBlocks
from paraplan.planner.passes.pass_context import PassContext
from paraplan.planner.schedules.full_rounds import as_a_whole


def parted(made: Realised, context: PassContext) -> Realised:
    """The pipeline with messages in parts where that is faster and fits."""
    if not _sends_the_same(made.plan):
        return made
    tried = as_a_whole(msgspec.structs.replace(made.plan, parted_messages=True))
    faster = tried.simulation.step_s < made.simulation.step_s and context.fits(tried, made)
    return tried if faster else made


def _sends_the_same(plan: Plan) -> bool:
    """Whether ranks of a stage send what others of it send as well."""
    if len({stage.mesh.devices for stage in plan.stages}) < 2 or plan.stages[0].mesh.size < 2:
        return False
    blocks = PlanBlocks(plan)
    crossings = (each for route in blocks.routes for each in (*route.values, *route.grads))
    return any(
        place == R and size > 1
        for each in crossings
        for place, size in zip(each.message.sent[1:], blocks.held[each.message.source].mesh.shape, strict=True)
    )
