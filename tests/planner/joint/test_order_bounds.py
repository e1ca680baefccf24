"""The bound of orders against the least makespan over all shares of the work, and against cuts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paraplan.ir.execution.schedule import ActionKind
from paraplan.planner.joint.bounding.order_bounds import MOST_ACTIONS, orders_s, passed
from paraplan.planner.schedules.named import named_orders
from paraplan.planner.schedules.order_times import ended
from paraplan.planner.schedules.schedule_problem import BACKWARD, Orders, StageCosts
from paraplan.planner.solvers.milp import MilpBuilder, solve

CASES = [("1f1b", 4, 6, 1), ("gpipe", 3, 4, 1), ("zb-h1", 3, 5, 1), ("zb-v", 3, 5, 2), ("chimera", 4, 4, 1)]
MIXED = [("1f1b-zb", 3, 5, 1), ("interleaved-zb", 2, 4, 3), ("zb-v-lean", 3, 5, 2)]
MANY = [("interleaved", 2, 2, 6), ("interleaved", 3, 6, 3), ("hanayo", 2, 4, 4), ("gems", 2, 4, 1)]


def _least_s(orders: Orders) -> float:
    """The least makespan where stages may have any share of a work of one second for F, I and W each: a program in
    shares and in the times at which actions end."""
    actions = [action for order in orders for action in order]
    number = {(action.kind, action.stage, action.microbatch): at for at, action in enumerate(actions)}
    stages = 1 + max(action.stage for action in actions)
    builder = MilpBuilder()
    shares, ends = builder.add_columns(stages), builder.add_columns(len(actions))
    last = builder.add_columns(1, objective=1.0)
    builder.add_row(range(shares, shares + stages), [1.0] * stages, lower=1.0, upper=1.0)
    for order in orders:
        for before, action in zip((None, *order), order, strict=False):
            at, took = (
                ends + number[action.kind, action.stage, action.microbatch],
                2.0 if action.kind is ActionKind.B else 1.0,
            )
            needs = [] if before is None else [(before.kind, before.stage, before.microbatch)]
            m, stage = action.microbatch, action.stage
            if action.kind is ActionKind.F and stage:
                needs.append((ActionKind.F, stage - 1, m))
            elif action.kind is ActionKind.W:
                needs.append((ActionKind.I, stage, m))
            elif action.kind in BACKWARD:
                later = [(kind, stage + 1, m) for kind in BACKWARD if (kind, stage + 1, m) in number]
                needs += [(ActionKind.F, stage, m)] if stage == stages - 1 else later
            builder.add_row([at, shares + stage], [1.0, -took], lower=0.0)
            builder.add_row([last, at], [1.0, -1.0], lower=0.0)
            for need in needs:
                builder.add_row([at, ends + number[need], shares + stage], [1.0, -1.0, -took], lower=0.0)
    return solve(builder.build(), relax=True).objective


@pytest.mark.parametrize(("name", "pp", "count", "each"), [*CASES, *MIXED, *MANY])
def test_alike_segments_are_bounded_by_the_least_makespan(name: str, pp: int, count: int, each: int) -> None:
    orders = named_orders(name, pp, count, each)
    counts = passed(orders, 60.0)
    assert counts is not None
    alike = np.full(7, 1 / 7)
    found_s = orders_s(counts, (alike, 2 * alike, alike, alike))
    assert found_s == pytest.approx(_least_s(orders), rel=1e-4)


@pytest.mark.parametrize(("name", "pp", "count", "each"), [*CASES, *MIXED, *MANY])
def test_no_cut_of_unequal_segments_is_below_the_bound(name: str, pp: int, count: int, each: int) -> None:
    orders, rng, stages = named_orders(name, pp, count, each), random.Random(0), pp * each
    counts = passed(orders, 60.0)
    assert counts is not None
    for _ in range(20):
        segments = [[rng.uniform(0.2, 1.0) for _ in range(2 * stages)] for _ in range(3)]
        forward, first, second = segments
        bound_s = orders_s(
            counts, (forward, [sum(halves) for halves in zip(first, second, strict=True)], first, second)
        )
        for _ in range(20):
            at = sorted(rng.sample(range(1, 2 * stages), stages - 1))
            took = [[sum(row[a:b]) for row in segments] for a, b in zip([0, *at], [*at, 2 * stages], strict=True)]
            costs = tuple(
                StageCosts(forward_s=f, backward_s=i + w, input_grad_s=i, weight_grad_s=w) for f, i, w in took
            )
            assert bound_s <= ended(orders, costs).step_s * (1 + 1e-9)


def test_orders_that_are_too_long_say_nothing() -> None:
    assert passed(named_orders("gpipe", 2, MOST_ACTIONS), 60.0) is None
