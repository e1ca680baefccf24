"""Where states and parameters are, who updates them, and when: the pass that chooses them together."""

from __future__ import annotations

import math

from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.machine.tier_placement import HERE
from paraplan.ir.plan import Plan
from paraplan.planner.deadline import Deadline
from paraplan.planner.passes.delayed_updates import choose_ahead, choose_delay
from paraplan.planner.passes.pass_context import PassContext
from paraplan.planner.passes.state_placement import choose_places
from paraplan.planner.schedules.full_rounds import as_a_whole

SHARE = 0.25
"""Of the time left, what is taken for it where there is a deadline."""


def placed(made: Realised, context: PassContext) -> Realised:
    """The plan with states and parameters where that is fastest, and updated by whom and when, as far as the planner
    may choose; as it is where nothing is off its device and it fits."""
    plan, constraints = made.plan, context.constraints
    away = any(layouts.place != HERE for stage in plan.stages for layouts in stage.params.values())
    if not away and made.left_bytes(context.budget) >= 0:
        return made
    chooses = len(constraints.places) > 1 and plan.memory_actions is None
    within = context.deadline and Deadline(SHARE * max(context.deadline.limit_s - context.deadline.passed_s, 0.0))

    def price(tried: Plan) -> tuple[float, float]:
        if within is not None and within.is_over and tried != plan:
            return math.inf, math.inf
        found = made if tried == plan else as_a_whole(tried)
        return found.simulation.step_s, max(-found.left_bytes(context.budget), *found.over_bytes.values(), -math.inf)

    def step_s(tried: Plan) -> float:
        seconds, over = price(tried)
        return seconds if over <= 0 else math.inf

    def place(tried: Plan) -> Plan:
        return choose_places(tried, constraints.places, price, constraints.params) if chooses else tried

    best = choose_ahead(choose_delay(plan, constraints.delayed_update, step_s, place), step_s)
    return made if best == plan else as_a_whole(best)
