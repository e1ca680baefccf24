"""Zero bubble: the backward in two halves, of which only I is waited for, so W fills what would be bubbles.

ZB-H1 has the order of 1F1B with I for B; position p runs its W p microbatches later, so that every position has P
microbatches in flight at most, as many as 1F1B's first, and the W left over run at the end, where 1F1B stands still.
The bubble is (P - 1) (F + I - W). ZB-V puts stage s on position s of P on the way there and on 2 P - 1 - s on the way
back, so the loss is computed where the batch came in and the first backward starts early. With F = I = W no position
stands still once it has begun, from 2 P - 1 microbatches on, with 2 P stages' (P positions') activations.

Source: Qi et al. 2024, "Zero bubble pipeline parallelism", sections 2.1 and 6 of the long version.
"""

from __future__ import annotations

from collections import Counter

from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.planner.schedules.schedule_problem import Orders, at, check_sizes

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W


def zb_h1(num_positions: int, num_microbatches: int) -> Orders:
    """ZB-H1: one stage a position, the memory of 1F1B.

    Raises:
        ConstraintError: fewer than one position or microbatch.
    """
    check_sizes("zb-h1", num_positions, num_microbatches)
    orders = []
    for position in range(num_positions):
        ahead = min(num_microbatches, num_positions - position)
        order = [at(position, F, m) for m in range(ahead)]
        for m in range(num_microbatches):
            order.append(at(position, I, m))
            if m >= position:
                order.append(at(position, W, m - position))
            if m + ahead < num_microbatches:
                order.append(at(position, F, m + ahead))
        behind = min(position, num_microbatches)
        order += [at(position, W, m) for m in range(num_microbatches - behind, num_microbatches)]
        orders.append(tuple(order))
    return tuple(orders)


def zb_v(num_positions: int, num_microbatches: int) -> Orders:
    """ZB-V: two stages a position. With fewer than 2 P - 1 microbatches, the order of so many without the later ones.

    Raises:
        ConstraintError: fewer than one position or microbatch.
    """
    check_sizes("zb-v", num_positions, num_microbatches)
    full = max(num_microbatches, 2 * num_positions - 1)
    return tuple(
        tuple(action for action in _v_order(position, num_positions, full) if action.microbatch < num_microbatches)
        for position in range(num_positions)
    )


def _v_order(position: int, size: int, m: int) -> list[Action]:
    """One position's order: `pattern` says which kind of which half (0: there, 1: back) comes next."""
    back = size - position
    pattern: list[tuple[int, ActionKind]] = [(0, F)] * (2 * back - 1)
    pattern += [(1, F), (0, F)] * position
    pattern += [(1, F), (1, I), (1, W)] * back
    steady = m - (2 * back - 1) - position  # forwards of the first half that are left
    pattern += [(0, F), (0, I), (0, W), (1, F), (1, I), (1, W)] * steady
    pattern += [(0, I), (0, W), (1, F), (1, I), (1, W)] * (m - position - back - steady)
    pattern += [(0, I), (1, I)] * position
    pattern += [(0, I), (0, W)] * back
    count: Counter[tuple[int, ActionKind]] = Counter(pattern)
    pattern += [(1, W)] * (m - count[1, W])
    pattern += [(0, W)] * (m - count[0, W])
    done: Counter[tuple[int, ActionKind]] = Counter()
    order = []
    for half, kind in pattern:
        order.append(at(2 * size - 1 - position if half else position, kind, done[half, kind]))
        done[half, kind] += 1
    return order


def at_once(orders: Orders) -> Orders:
    """Orders of split backwards in which every W is run before the next I at the latest.

    Args:
        orders: any; those of whole backwards stay as they are.
    """
    return tuple(map(_at_once, orders))


def drained(orders: Orders) -> Orders:
    """Orders of whole backwards in which those after a position's last forward are split, each W before the next I.

    Args:
        orders: any; halves stay as they are.
    """
    return tuple(map(_drained, orders))


def _at_once(order: tuple[Action, ...]) -> tuple[Action, ...]:
    found: list[Action] = []
    waiting: list[Action] = []
    for action in order:
        if action.kind is I:
            found += waiting
            waiting = [at(action.stage, W, action.microbatch)]
        elif action.kind is W:
            if action not in waiting:  # run already
                continue
            waiting = []
        found.append(action)
    return (*found, *waiting)


def _drained(order: tuple[Action, ...]) -> tuple[Action, ...]:
    last = max((index for index, action in enumerate(order) if action.kind is F), default=-1)
    found = list(order[: last + 1])
    waiting: list[Action] = []
    for action in order[last + 1 :]:
        if action.kind is B:
            found += [*waiting, at(action.stage, I, action.microbatch)]
            waiting = [at(action.stage, W, action.microbatch)]
        else:
            found.append(action)
    return (*found, *waiting)
