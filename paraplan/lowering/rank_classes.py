"""A plan's programs, one per class of equal ranks; in the order of its memory schedule where it has one."""

from __future__ import annotations

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.memory_actions import parse_actions
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.rank_groups import group_of_class
from paraplan.ir.plan import Plan
from paraplan.lowering.implement import implement_all
from paraplan.lowering.lower_rank import RankSteps
from paraplan.lowering.ordered import order_program
from paraplan.lowering.rewrites.summed_grads import Done, sum_products
from paraplan.lowering.stage_blocks import PlanBlocks
from paraplan.lowering.steps.stage_messages import in_order
from paraplan.lowering.transfers.held_casts import held_casts


def lower(plan: Plan) -> tuple[RankProgram, ...]:
    """One program per rank class of the plan's schedule.

    Raises:
        InvalidPlanError: the plan does not fit its program.
    """
    casts = held_casts(plan)
    blocks = PlanBlocks(casts.plan, casts=casts.of)
    # Classes that differ only in the kind of their device share a program.
    built = {
        actions: RankSteps(blocks, group_of_class(plan, blocks.held, actions), actions).build()
        for actions in dict.fromkeys(plan.schedule.classes)
    }
    done: Done = {}
    if plan.sum_products:
        built = {actions: sum_products(program, plan.cluster.backend, done) for actions, program in built.items()}
    ordered = in_order(built)
    if plan.memory_actions is not None:
        if plan.cluster.num_devices > 1:
            raise InvalidPlanError(
                f"memory_actions on {plan.cluster.num_devices} devices: a memory schedule is for one"
            )
        order = parse_actions(plan.memory_actions)
        ordered = {actions: order_program(program, order) for actions, program in ordered.items()}
    return implement_all(ordered, plan)
