"""Weights cast to float8 once a step: taken where the finished plan is faster with them and has room
(`lowering.transfers.held_casts`).

Casts that are held take two bytes an element beside the weight for most of a step, sharded as it is stored. A finished
plan is lowered and simulated with them; the bound of its certificate is over plans that cast at every use.
"""

from __future__ import annotations

import msgspec

from paraplan.cost_models.realised_plan import Realised
from paraplan.planner.passes.pass_context import PassContext
from paraplan.planner.schedules.full_rounds import as_a_whole

AT_EVERY_USE = "; weights cast at every use"
"""Of what a bound is where weights are cast once."""


def cast_once(made: Realised, context: PassContext) -> Realised:
    """The plan with held casts, where it is faster so and fits."""
    plan = made.plan
    if plan.program.precision != "fp8" or plan.memory_actions is not None:
        return made
    tried = as_a_whole(msgspec.structs.replace(plan, hold_casts=True))
    faster = tried.simulation.step_s < made.simulation.step_s * (1 - 1e-9)
    return tried if faster and context.fits(tried, made) else made
