"""Interleaved 1F1B: several stages a position, in turns (Megatron's virtual stages).

Stage s lies on position s mod P. Microbatches go through in groups of P: a group's forwards run on a position's first
stage, then on its second, and so on, and its backwards the other way round. After 2 (P - p - 1) + (v - 1) P forwards,
forwards and backwards take turns. A stage is a v-th of a position's work, so the bubble shrinks v-fold: (P - 1) / v
against M microbatches, for up to 2 (P - p - 1) + (v - 1) P + 1 stages' microbatches in flight on position p.

Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2.
"""

from __future__ import annotations

from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.planner.schedules.schedule_problem import Orders, at, check_sizes


def interleaved(num_positions: int, num_microbatches: int, stages_per_position: int = 2) -> Orders:
    """Interleaved 1F1B.

    Args:
        num_positions: P, of the pipeline.
        num_microbatches: a multiple of P.
        stages_per_position: at least 2.
    Raises:
        ConstraintError: fewer than two stages a position, or microbatches that do not come in groups of P.
    """
    check_sizes("interleaved", num_positions, num_microbatches)
    if stages_per_position < 2:
        raise ConstraintError(
            f"schedule interleaved: {stages_per_position} stages a position; give at least 2, or use 1f1b"
        )
    if num_microbatches % num_positions:
        below = num_microbatches - num_microbatches % num_positions
        near = " or ".join(str(each) for each in (below, below + num_positions) if each)
        raise ConstraintError(
            f"schedule interleaved: {num_microbatches} microbatches on {num_positions} positions; give a multiple of "
            f"{num_positions}, such as {near}"
        )
    size, v, total = num_positions, stages_per_position, num_microbatches * stages_per_position

    def turn(index: int, kind: ActionKind, position: int) -> Action:
        """The index-th forward or backward of a position."""
        group, within = divmod(index, size * v)
        chunk, offset = divmod(within, size)
        chunk = chunk if kind is ActionKind.F else v - 1 - chunk
        return at(chunk * size + position, kind, group * size + offset)

    orders = []
    for position in range(size):
        ahead = min(2 * (size - position - 1) + (v - 1) * size, total)
        order = [turn(index, ActionKind.F, position) for index in range(ahead)]
        for index in range(total):
            if index + ahead < total:
                order.append(turn(index + ahead, ActionKind.F, position))
            order.append(turn(index, ActionKind.B, position))
        orders.append(tuple(order))
    return tuple(orders)
