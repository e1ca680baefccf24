"""What the orders of a schedule take at least, however the chain of segments is cut into its stages.

Every action waits for the one before it at its position and for what another stage hands it, so a step takes as long as
the longest path; and no less than paths do on the average, whatever their weights. Weights are a flow of one unit from
the step's begin to its end. Where n[k, s] of it passes actions of kind k and stage s,

    step >= sum over segments i of min over s of (sum over k of n[k, s] . seconds[k, i])

as the minimum is over any assignment of segments to stages, cuts among them. The flow is the one for which this is
most, were all segments alike: a linear program, the dual of the least makespan over all shares that stages may have of
the work. It is found once for each schedule, degree and number of microbatches, and bounds whatever segments take.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.planner.schedules.schedule_problem import BACKWARD, Orders
from paraplan.planner.solvers.milp import MilpBuilder, solve

Counts = npt.NDArray[np.float64]
"""[F, B, I, W; stages]: how much of the flow passes actions of a kind and stage."""
MOST_ACTIONS = 4500
"""Actions of orders up to which a flow is looked for."""
ROUNDING = 1e-6
"""Of a bound, what a solver's flow may be short of one."""
_ROW = {ActionKind.F: 0, ActionKind.B: 1, ActionKind.I: 2, ActionKind.W: 3}
_PHASE = {ActionKind.F: 0, ActionKind.B: 1, ActionKind.I: 1, ActionKind.W: 2}


def passed(orders: Orders, limit_s: float) -> Counts | None:
    """How much of the best flow passes every kind of action and stage; None where orders are too long, or none was
    found in time.

    Args:
        orders: of a schedule.
        limit_s: for the solver.
    """
    actions = [action for order in orders for action in order]
    if len(actions) > MOST_ACTIONS:
        return None
    size, stages = len(actions), 1 + max(action.stage for action in actions)
    tails, heads = np.array(_waits(orders, stages), dtype=np.int64).reshape(-1, 2).T
    first, last = np.setdiff1d(np.arange(size), heads), np.setdiff1d(np.arange(size), tails)
    builder = MilpBuilder()
    along, begins, ends = (builder.add_columns(len(each)) + np.arange(len(each)) for each in (heads, first, last))
    value = builder.add_columns(1, objective=-1.0)
    entering, by = np.concatenate([heads, first]), np.concatenate([along, begins])
    leaving, after = np.concatenate([tails, last]), np.concatenate([along, ends])
    signs = np.repeat([1.0, -1.0], [len(entering), len(leaving)])
    through = np.concatenate([entering, leaving]), np.concatenate([by, after])
    builder.add_rows(size, *through, signs, lower=0.0, upper=0.0)
    builder.add_row(begins, np.ones(len(first)), lower=1.0, upper=1.0)
    took = np.array([2.0 if action.kind is ActionKind.B else 1.0 for action in actions])
    of, every = np.array([action.stage for action in actions]), np.arange(stages)
    stage, column = np.concatenate([of[entering], every]), np.concatenate([by, np.full(stages, value)])
    builder.add_rows(stages, stage, column, np.concatenate([took[entering], -np.ones(stages)]), lower=0.0)
    found = solve(builder.build(), relax=True, time_limit_s=limit_s, relative_gap=1e-4)
    if found.values is None:
        return None
    counts, kinds = np.zeros((len(_ROW), stages)), np.array([_ROW[action.kind] for action in actions])
    np.add.at(counts, (kinds[entering], of[entering]), np.maximum(found.values[by], 0.0))
    return counts


def orders_s(counts: Counts, seconds: Sequence[Sequence[float]]) -> float:
    """What a step takes at least.

    Args:
        counts: of a schedule (`passed`).
        seconds: per segment, of a microbatch: forwards, backwards, and these' first and second halves.
    """
    each = np.array(seconds).T @ counts
    return float(each.min(1).sum()) * (1 - ROUNDING)


def _waits(orders: Orders, num_stages: int) -> list[tuple[int, int]]:
    """(an action, one that waits for it), by their places in all orders one after another."""
    number = {_key(action): at for at, action in enumerate(itertools.chain(*orders))}
    found: list[tuple[int, int]] = []
    for order in orders:
        mine = [number[_key(action)] for action in order]
        found += itertools.pairwise(mine)
        needs = (number.get(_needed(action, num_stages)) for action in order)
        found += [(need, at) for need, at in zip(needs, mine, strict=True) if need is not None]
    return found


def _key(action: Action) -> tuple[int, int, int]:
    return _PHASE[action.kind], action.stage, action.microbatch


def _needed(action: Action, num_stages: int) -> tuple[int, int, int]:
    """What an action waits for, wherever that is done; what is nowhere for nothing."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind in BACKWARD:
        return (0, stage, microbatch) if stage == num_stages - 1 else (1, stage + 1, microbatch)
    return (1, stage, microbatch) if action.kind is ActionKind.W else (0, stage - 1, microbatch)
