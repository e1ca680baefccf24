"""When updates are done that are done elsewhere, by simulation: late or not, and their states brought ahead or not.

A late update is done beside the next step's work (`lowering.steps.delayed_update`), so the step is shorter by what of
it that hides, and the host holds one more gradient of every parameter that it updates. It changes what is computed,
so it is for the user to allow (`Constraints.delayed_update`), and then for the simulated step to tell: that of a step
in full swing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from paraplan.ir.model.program import trained_params
from paraplan.ir.plan import Plan


def choose_delay(plan: Plan, steps: int | None, step_s: Callable[[Plan], float], place: Callable[[Plan], Plan]) -> Plan:
    """The plan with late updates or without, whichever is faster.

    Args:
        plan: priced or not; whether its updates are late is not looked at.
        steps: before late updates; None where none may be late.
        step_s: what a plan's step takes; infinite where it does not fit.
        place: chooses who updates, given whether updates are late.
    """
    found = [place(msgspec.structs.replace(plan, delayed_update=None))]
    if steps is not None:
        found.append(place(msgspec.structs.replace(plan, delayed_update=steps)))
    found = [each for each in found if each.delayed_update is None or is_any_late(each)]
    return found[0] if len(found) == 1 else min(found, key=step_s)


def choose_ahead(plan: Plan, step_s: Callable[[Plan], float]) -> Plan:
    """The plan whose first states to come to their update set out before the last backward, where that is faster."""
    if not any(layouts.staged for stage in plan.stages for layouts in stage.params.values()):
        return plan
    return min((msgspec.structs.replace(plan, states_ahead=ahead) for ahead in (False, True)), key=step_s)


def is_any_late(plan: Plan) -> bool:
    """Whether some parameter of a plan is updated late."""
    trained = set(trained_params(plan.program))
    return any(
        plan.is_late(layouts) for stage in plan.stages for name, layouts in stage.params.items() if name in trained
    )


def delay_note(plan: Plan) -> tuple[str, ...]:
    """What the reader should know of late updates, where there are any."""
    if plan.delayed_update is None:
        return ()
    return (
        f"after {plan.delayed_update} steps, what the host updates is one step late: parameters of a step lack the "
        "gradients of the step before (delayed_update); checkpoints have them",
    )
