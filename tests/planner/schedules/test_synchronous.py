"""GPipe and 1F1B: bubbles and microbatches in flight as in the papers, for any sizes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.ir.execution.schedule import ActionKind, spread
from paraplan.lowering.verification.verify_schedule import verify_schedule
from paraplan.planner.schedules.complete import complete, orders_of
from paraplan.planner.schedules.event_simulation import evaluate
from paraplan.planner.schedules.families.synchronous import gpipe, one_f_one_b
from paraplan.planner.schedules.named import NAMED, named_orders
from paraplan.planner.schedules.order_times import ended
from paraplan.planner.schedules.schedule_problem import COMPUTE, StageCosts, stages_of


@given(p=st.integers(1, 8), m=st.integers(1, 12), forward_s=st.floats(0.5, 2), backward_s=st.floats(0.5, 4))
def test_bubble_and_flight(p: int, m: int, forward_s: float, backward_s: float) -> None:
    costs = (StageCosts(forward_s=forward_s, backward_s=backward_s),) * p
    for orders, flights in ((gpipe(p, m), (m,) * p), (one_f_one_b(p, m), tuple(min(m, p - i) for i in range(p)))):
        found = evaluate(orders, costs)
        assert found.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert found.step_s == pytest.approx((m + p - 1) * (forward_s + backward_s))
        assert found.peak_in_flight == found.peak_bytes == flights
        made = complete("x", orders)
        assert verify_schedule(made, p, m, stages_of(orders)) == flights
        assert orders_of(made) == orders


@pytest.mark.parametrize("name", NAMED)
def test_ends_are_those_of_the_events(name: str) -> None:
    draw = random.Random(name)
    for p, m in ((2, 4), (4, 8)):
        orders = named_orders(name, p, m)
        costs = tuple(
            StageCosts(
                forward_s=draw.uniform(0.5, 2),
                backward_s=draw.uniform(1, 4),
                input_grad_s=draw.uniform(0.5, 2),
                weight_grad_s=draw.uniform(0.5, 2),
                send_forward_s=draw.choice([0.0, 0.3, 3.0]),
                send_backward_s=draw.choice([0.0, 0.3]),
                activation_bytes=draw.randint(1, 9),
                weight_grad_bytes=draw.randint(0, 9),
                fixed_bytes=draw.randint(0, 9),
            )
            for _ in range(1 + max(action.stage for order in orders for action in order))
        )
        whole, found = evaluate(orders, costs), ended(orders, costs)
        assert found.step_s == pytest.approx(max(e.end_s for e in whole.events if e.action.kind in COMPUTE))
        assert found.peak_bytes == whole.peak_bytes
        for stage, over_s in enumerate(found.stage_s):
            last = (ActionKind.B, ActionKind.W)
            mine = [e.end_s for e in whole.events if e.action.stage == stage and e.action.kind in last]
            assert over_s == pytest.approx(max(mine))


def test_written_out() -> None:
    made = complete("1f1b", one_f_one_b(2, 3))
    assert [" ".join(actions) for actions in made.classes] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0F2 0SEND_F2 0B1 0RECV_B2 0B2 0REDUCE_GRAD 0UPDATE",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1REDUCE_GRAD 1UPDATE",
    ]


def test_ranks_of_a_position_do_the_same() -> None:
    made = spread(complete("gpipe", gpipe(2, 2)), (0, 0, 1, 1))
    assert made.rank_class == (0, 0, 1, 1)
    assert verify_schedule(made, 2, 2, ((0,), (0,), (1,), (1,))) == (2, 2, 2, 2)
