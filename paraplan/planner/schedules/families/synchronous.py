"""GPipe and 1F1B: one stage a position.

GPipe (Huang et al. 2019) runs all forwards, then all backwards: every microbatch is in flight at once. 1F1B (DAPPLE,
Fan et al. 2021; PipeDream-flush, Narayanan et al. 2021) lets position p of P run P - p forwards ahead and then one
backward for each forward: the same bubble, (P - 1) / (M + P - 1) of the step where stages are equal, with at most P - p
in flight. Any number of microbatches will do.
"""

from __future__ import annotations

from paraplan.ir.execution.schedule import ActionKind
from paraplan.planner.schedules.schedule_problem import Orders, at, check_sizes

F, B = ActionKind.F, ActionKind.B


def gpipe(num_positions: int, num_microbatches: int) -> Orders:
    """All forwards, then all backwards, in the order of microbatches.

    Raises:
        ConstraintError: fewer than one position or microbatch.
    """
    check_sizes("gpipe", num_positions, num_microbatches)
    micros = range(num_microbatches)
    return tuple((*(at(p, F, m) for m in micros), *(at(p, B, m) for m in micros)) for p in range(num_positions))


def one_f_one_b(num_positions: int, num_microbatches: int) -> Orders:
    """Forwards ahead, then forward and backward in turn, then the backwards left.

    Raises:
        ConstraintError: fewer than one position or microbatch.
    """
    check_sizes("1f1b", num_positions, num_microbatches)
    orders = []
    for position in range(num_positions):
        ahead = min(num_microbatches, num_positions - position)
        order = [at(position, F, m) for m in range(ahead)]
        for m in range(num_microbatches):
            order.append(at(position, B, m))
            if m + ahead < num_microbatches:
                order.append(at(position, F, m + ahead))
        orders.append(tuple(order))
    return tuple(orders)
