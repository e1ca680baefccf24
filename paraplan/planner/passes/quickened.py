"""What makes a finished plan's step shorter in the same layouts: a list of passes, plan to plan, for every plan.

A pass is given a plan that is lowered and simulated and gives the one that it makes of it, or the same one where
nothing is won; it says by itself where it has nothing to do. Plans of one stage, pipelines, pipelines over groups that
differ and named planners' answers go through all of them. A new one is an entry here.
"""

from __future__ import annotations

from collections.abc import Callable

from paraplan.cost_models.realised_plan import Realised
from paraplan.planner.passes.cast_holding import cast_once
from paraplan.planner.passes.gather_timing import gathered
from paraplan.planner.passes.grad_reductions import reducing
from paraplan.planner.passes.message_parts import parted
from paraplan.planner.passes.overlap_products import overlapped
from paraplan.planner.passes.pass_context import PassContext
from paraplan.planner.passes.update_placement import placed

Pass = Callable[[Realised, PassContext], Realised]

PASSES: tuple[Pass, ...] = (
    cast_once,  # weights to float8, once a step
    gathered,  # parameters, ahead or where they are read
    parted,  # messages between stages
    reducing,  # gradients, how often and how many at a time
    overlapped,  # products, beside their collectives
    placed,  # states and who updates them, and when
)


def quickened(made: Realised, context: PassContext) -> Realised:
    """The plan after all passes; after those that there was time for, where its deadline comes first."""
    for each in PASSES:
        made = made if context.is_late else each(made, context)
    return made
