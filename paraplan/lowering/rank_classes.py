"""A plan's programs, one per class of equal ranks; in the order of its memory schedule where it has one."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.memory_actions import parse_actions
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.rank_groups import group_of_class
from paraplan.ir.plan import Plan
from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.lowering.implement import Done, implement, implement_all, times_of
from paraplan.lowering.lower_rank import RankSteps
from paraplan.lowering.ordered import order_program
from paraplan.lowering.rewrites.summed_grads import Done as DoneSums
from paraplan.lowering.rewrites.summed_grads import sum_products
from paraplan.lowering.stage_blocks import PlanBlocks
from paraplan.lowering.steps.stage_messages import in_order
from paraplan.lowering.transfers.held_casts import held_casts

_SAID = frozenset({"made_with", "model", "prediction", "certificate", "notes", "pins", "tried"})
"""What a plan says of itself, which nothing is lowered from."""
_LATELY: Lately[tuple[RankProgram, ...]] = SESSION.lately(
    "lowering.programs", 300_000, lambda programs: sum(len(program.steps) for program in programs)
)


def lower(plan: Plan) -> tuple[RankProgram, ...]:
    """One program per rank class of the plan's schedule; of plans lowered lately, those made then.

    Raises:
        InvalidPlanError: the plan does not fit its program.
    """
    return _LATELY.get(lowered_from(plan), lambda: lower_anew(plan))


def lowered_from(plan: Plan) -> Hashable:
    """What a plan is lowered from, as a key: equal for plans that differ in what they say of themselves alone."""
    return tuple(_known_by(getattr(plan, name)) for name in plan.__struct_fields__ if name not in _SAID)


def _known_by(value: object) -> Hashable:
    return value if isinstance(value, int | str | None) else Same(value)


def lower_alone(plan: Plan, classes: Collection[tuple[str, ...]]) -> dict[tuple[str, ...], RankProgram]:
    """Programs of some of a plan's rank classes, by their actions, each as if it were alone: receives are where its own
    steps have them, not in the order of the sends of others. What is held in them is what is held in `lower`'s.

    Args:
        plan: without a memory schedule.
        classes: of its schedule.
    Raises:
        InvalidPlanError: the plan does not fit its program.
    """
    built, done = _built(plan, classes), Done()
    return {actions: implement(program, plan, times_of(plan), done) for actions, program in built.items()}


def _built(plan: Plan, classes: Collection[tuple[str, ...]]) -> dict[tuple[str, ...], RankProgram]:
    """Programs of rank classes, by their actions: classes that differ only in the kind of their device share one."""
    casts = held_casts(plan)
    blocks = PlanBlocks(casts.plan, casts=casts.of)
    built = {
        actions: RankSteps(blocks, group_of_class(plan, blocks.held, actions), actions).build()
        for actions in dict.fromkeys(classes)
    }
    if not plan.sum_products:
        return built
    done: DoneSums = {}
    return {actions: sum_products(program, plan.cluster.backend, done) for actions, program in built.items()}


def lower_anew(plan: Plan) -> tuple[RankProgram, ...]:
    """As `lower`, whatever was lowered before.

    Raises:
        InvalidPlanError: the plan does not fit its program.
    """
    ordered = in_order(_built(plan, plan.schedule.classes))
    if plan.memory_actions is not None:
        if plan.cluster.num_devices > 1:
            raise InvalidPlanError(
                f"memory_actions on {plan.cluster.num_devices} devices: a memory schedule is for one"
            )
        order = parse_actions(plan.memory_actions)
        ordered = {actions: order_program(program, order) for actions, program in ordered.items()}
    return implement_all(ordered, plan)
