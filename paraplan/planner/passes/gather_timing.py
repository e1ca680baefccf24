"""When parameters are gathered, and how many at a time: as the finished plan is fastest.

What is gathered a segment ahead (`StepOptions.params_ahead`), or with those of other segments (`bundle_bytes`), comes
beside computation and in fewer messages, but before what that segment itself sends over the same links: where it waits
for exchanges of its own (experts' tokens, partial sums), these then come later, and a bundle is there when its last
parameter is. The finished plan is lowered and simulated each way.
"""

from __future__ import annotations

import msgspec

from paraplan.cost_models.predict import plan_costs
from paraplan.cost_models.realised_plan import Budget, Realised
from paraplan.ir.execution.rank_program import BlockRole
from paraplan.planner.evaluate_plan import gathers_often
from paraplan.planner.schedules.full_rounds import as_a_whole, num_lowered, num_run

WORTH, LONG = 0.01, 0.02
"""Shares of a step that communication is waited for, and that gathers take, from which on another time is tried."""


def gathered(made: Realised, budget: Budget, times: float = 1.0) -> Realised:
    """The plan with parameters gathered where they are read, or each alone, where it is faster so and fits.

    Args:
        made: the plan.
        budget: bytes that devices may hold.
        times: how much longer a step is that has all microbatches, where the plan has the first of them.
    """
    plan, simulation = made.plan, made.simulation
    if plan.memory_actions is not None or simulation.exposed_comm_s < WORTH * simulation.step_s:
        return made
    if gathering_s(made) < LONG * simulation.step_s * (1.0 if gathers_often(made.programs) else times):
        return made
    options = plan.options
    tries = dict.fromkeys((options.but(params_ahead=False), options.but(bundle_bytes=0), options.lean))
    found = [
        as_a_whole(msgspec.structs.replace(plan, **msgspec.structs.asdict(each))) for each in tries if each != options
    ]
    fitting = [each for each in found if each.left_bytes(budget) >= 0 and each.over_bytes == made.over_bytes]
    best = min(fitting, key=lambda each: each.simulation.step_s, default=made)
    return best if best.simulation.step_s < simulation.step_s * (1 - 1e-9) else made


def gathering_s(made: Realised) -> float:
    """What parameters gathered before they are read take of a step, on the rank where that is most: waits for them, or
    for what comes later for them, are no longer. Of programs that run the first microbatches alone, as much more as
    there are more."""
    most_s = 0.0
    for program, costs in zip(made.programs, plan_costs(made.plan), strict=True):
        blocks = {name: block for name, block in program.blocks.items() if block.role is BlockRole.GATHER}
        each_s = {name: sum(costs.instr_s(block, i) for i in block.instrs) for name, block in blocks.items()}
        most_s = max(most_s, sum(each_s.get(step.block, 0.0) for step in program.steps))
    return most_s * num_run(made.plan) / num_lowered(made.programs) if gathers_often(made.programs) else most_s
