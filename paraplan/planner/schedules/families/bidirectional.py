"""GEMS and Chimera: two replicas of the model, one running through the positions in each direction.

Position p holds stage p of the replica that goes down and stage P - 1 - p of the one that goes up, hence twice the
parameters, whose gradients are added over the two positions of a stage at the end (`ir.execution.schedule`, replicas).

GEMS (Jain et al. 2020) has one microbatch in flight on a position: the next one's forward, in the other replica,
follows the backward before it through the positions. It is for memory: the bubble is (P - 1) / (P + 1/2) for backwards
twice as long as forwards.

Chimera (Li and Hoefler 2021) lets P / 2 microbatches run each way as 1F1B; for even P the two fit into each other's
gaps slot by slot, which leaves P - 2 idle slots in 2 M + P - 2 where forward and backward take a slot each, and between
P / 2 + 1 and P microbatches in flight. More microbatches are such units one after the other, each filling the gaps of
the one before.
"""

from __future__ import annotations

from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.planner.schedules.schedule_problem import Orders, at, check_sizes

F, B = ActionKind.F, ActionKind.B


def gems(num_positions: int, num_microbatches: int) -> Orders:
    """GEMS: microbatches take turns in the two replicas.

    Raises:
        ConstraintError: fewer than two positions or microbatches.
    """
    check_sizes("gems", num_positions, num_microbatches)
    _check_two("gems", num_positions, num_microbatches)
    orders = []
    for position in range(num_positions):
        stages = (position, num_positions - 1 - position)
        orders.append(tuple(at(stages[m % 2], kind, m) for m in range(num_microbatches) for kind in (F, B)))
    return tuple(orders)


def chimera(num_positions: int, num_microbatches: int) -> Orders:
    """Chimera: of each P microbatches the even ones go down, the odd ones up.

    Raises:
        ConstraintError: an odd number of positions or microbatches.
    """
    check_sizes("chimera", num_positions, num_microbatches)
    for count, what in ((num_positions, "positions"), (num_microbatches, "microbatches")):
        if count % 2:
            raise ConstraintError(
                f"schedule chimera: {count} {what}; half of them go each way, so give an even number, "
                f"such as {count + 1}"
            )
    size = num_positions
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(size)]
    for micro in range(num_microbatches):
        unit, within = divmod(micro, size)
        pair, up = divmod(within, 2)
        start = 2 * size * unit + 2 * pair
        for stage in range(size):
            own = slots[size - 1 - stage if up else stage]
            own.append((start + stage, at(stage, F, micro)))
            own.append((start + 2 * size - 1 - stage, at(stage, B, micro)))
    return tuple(tuple(action for _, action in sorted(own, key=lambda pair: pair[0])) for own in slots)


def _check_two(name: str, num_positions: int, num_microbatches: int) -> None:
    if num_positions < 2 or num_microbatches < 2:
        raise ConstraintError(
            f"schedule {name}: {num_positions} positions and {num_microbatches} microbatches; two replicas need at "
            "least 2 of each"
        )
