"""A plan's programs, one per class of equal ranks; in the order of its memory schedule where it has one."""

from __future__ import annotations

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.lower.ordered import order_program
from paraplan.ir.lower.program import StageSteps
from paraplan.ir.memory_actions import parse_actions
from paraplan.ir.plan import Plan
from paraplan.ir.rank_program import RankProgram


def lower(plan: Plan) -> tuple[RankProgram, ...]:
    """One program per rank class of the plan's schedule.

    Raises:
        InvalidPlanError: the plan does not fit its program.
    """
    if len(plan.stages) != 1:
        raise InvalidPlanError(
            f"a plan of {len(plan.stages)} stages: only single-stage plans can be lowered by this version"
        )
    stage = plan.stages[0]
    # Classes that differ only in the kind of their device share a program.
    built = {actions: StageSteps(plan, stage).build(actions) for actions in dict.fromkeys(plan.schedule.classes)}
    if plan.memory_actions is not None:
        if stage.mesh.size > 1:
            raise InvalidPlanError(f"memory_actions on {stage.mesh.size} devices: a memory schedule is for one")
        order = parse_actions(plan.memory_actions)
        built = {actions: order_program(program, order) for actions, program in built.items()}
    return tuple(built[actions] for actions in plan.schedule.classes)
