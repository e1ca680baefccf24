"""When parameters are gathered, and how many at a time: as the finished plan is fastest.

What is gathered a segment ahead (`StepOptions.params_ahead`), or with those of other segments (`bundle_bytes`), comes
beside computation and in fewer messages, but before what that segment itself sends over the same links: where it waits
for exchanges of its own (experts' tokens, partial sums), these then come later, and a bundle is there when its last
parameter is. The finished plan is lowered and simulated each way, where it waits for a link that gathers take.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from paraplan.cost_models.predict import plan_costs
from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.execution.rank_program import BlockRole
from paraplan.ir.execution.streams import COMPUTE, Stream
from paraplan.planner.evaluate_plan import gathers_often
from paraplan.planner.passes.pass_context import PassContext
from paraplan.planner.schedules.full_rounds import as_a_whole, num_lowered, num_run

WORTH = 0.02
"""The share of a step that gathers may make longer, from which on another time is tried."""


def gathered(made: Realised, context: PassContext) -> Realised:
    """The plan with parameters gathered where they are read, or each alone, where it is faster so and fits."""
    plan, simulation = made.plan, made.simulation
    longer = 1.0 if gathers_often(made.programs) else context.times
    if plan.memory_actions is not None or delayed_s(made) < WORTH * simulation.step_s * longer:
        return made
    options = plan.options
    tries = dict.fromkeys((options.but(params_ahead=False), options.but(bundle_bytes=0), options.lean))
    found = [
        as_a_whole(msgspec.structs.replace(plan, **msgspec.structs.asdict(each))) for each in tries if each != options
    ]
    fitting = [each for each in found if context.fits(each, made)]
    best = min(fitting, key=lambda each: each.simulation.step_s, default=made)
    return best if best.simulation.step_s < simulation.step_s * (1 - 1e-9) else made


def delayed_s(made: Realised) -> float:
    """What computation waits for at most that parameters gathered before they are read may be the reason of, on the
    rank where that is most: of every link no longer than it waits for that link, nor than gathers take there."""
    most_s, more = 0.0, 1.0
    if gathers_often(made.programs):  # of which those may be of the first microbatches alone
        more = num_run(made.plan) / num_lowered(made.programs)
    for program, trace, costs in zip(made.programs, made.simulation.traces, plan_costs(made.plan), strict=True):
        calls = Counter(step.block for step in program.steps)
        links: Counter[Stream] = Counter()
        for name, block in program.blocks.items():
            for instr in block.instrs if block.role is BlockRole.GATHER else ():
                links[costs.stream(instr)] += calls[name] * costs.instr_s(block, instr)  # type: ignore[assignment]
        del links[COMPUTE]
        most_s = max(most_s, sum(min(trace.stalled_s.get(link, 0.0), more * each_s) for link, each_s in links.items()))
    return most_s
