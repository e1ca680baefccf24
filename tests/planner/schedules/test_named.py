"""Every named schedule: legal for random sizes, and with the bubbles and microbatches in flight of its paper."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.schedule import ActionKind
from paraplan.lowering.verification.verify_schedule import verify_schedule
from paraplan.planner.schedules.complete import orders_of
from paraplan.planner.schedules.event_simulation import ScheduleTimes, evaluate
from paraplan.planner.schedules.named import NAMED, applicable, named_orders, named_schedule
from paraplan.planner.schedules.schedule_problem import COMPUTE, Orders, StageCosts, stages_of

EQUAL = StageCosts(backward_s=1.0)
"""Forward and backward a slot each."""


def over(orders: Orders, costs: StageCosts) -> ScheduleTimes:
    return evaluate(orders, (costs,) * (1 + max(max(held) for held in stages_of(orders))))


def spans(found: ScheduleTimes) -> list[tuple[float, float]]:
    """Per position, from when to when it is at work."""
    own: list[list[float]] = [[] for _ in found.busy_s]
    for event in found.events:
        if event.action.kind in COMPUTE:
            own[event.positions[0]] += [event.start_s, event.end_s]
    return [(min(times), max(times)) for times in own]


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(NAMED)),
    p=st.integers(1, 6),
    groups=st.integers(1, 4),
    more=st.integers(0, 3),
    v=st.integers(0, 2),
    seed=st.randoms(use_true_random=False),
)
def test_legal(name: str, p: int, groups: int, more: int, v: int, seed: object) -> None:
    """Complete, ordered, free of deadlock though every message blocks; whatever costs said where messages stand."""
    kind = NAMED[name]
    per = kind.stages + v * kind.step
    if kind.num_replicas == 2:
        p, groups = p + p % 2, 2 * groups
    m = p * groups if name in ("interleaved", "interleaved-zb", "chimera") else groups + more + (kind.num_replicas - 1)
    costs = tuple(
        StageCosts(
            forward_s=seed.random() + 0.1,
            backward_s=seed.random() + 0.1,
            input_grad_s=seed.random() + 0.1,  # type: ignore[attr-defined]
            weight_grad_s=seed.random() + 0.1,
            send_forward_s=seed.random(),
            send_backward_s=seed.random(),  # type: ignore[attr-defined]
        )
        for _ in range(per * p)
    )
    orders = named_orders(name, p, m, per)
    for given_costs in (None, costs):
        made = named_schedule(name, p, m, per, given_costs)
        flights = verify_schedule(made, per * p, m, stages_of(orders))
        assert orders_of(made) == orders
    assert flights == over(orders, EQUAL).peak_in_flight
    assert name in applicable(per * p, p, m)


@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 2, 2), (2, 6, 3), (4, 4, 2), (4, 8, 2), (4, 12, 3), (5, 10, 2), (8, 16, 2)]
)
def test_interleaved(p: int, m: int, v: int) -> None:
    """Bubble time over ideal time (p - 1) / (m v): Narayanan et al. 2021, section 2.2.2."""
    orders = named_orders("interleaved", p, m, v)
    for costs in (EQUAL, StageCosts(), StageCosts(forward_s=0.7, backward_s=1.3)):
        bubble = over(orders, costs).bubble
        assert bubble / (1 - bubble) == pytest.approx((p - 1) / (m * v))
    ahead = [min(2 * (p - i - 1) + (v - 1) * p + 1, m * v) for i in range(p)]
    assert over(orders, EQUAL).peak_in_flight == tuple(ahead)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 3), (4, 4), (4, 8), (5, 7), (8, 16), (8, 30)])
def test_zb_h1(p: int, m: int) -> None:
    """Bubble (p - 1) (F + I - W) with the memory of 1F1B: Qi et al. 2024, table 2."""
    orders = named_orders("zb-h1", p, m)
    for forward_s, input_grad_s, weight_grad_s in ((1.0, 1.0, 1.0), (1.0, 1.2, 1.0), (1.0, 1.0, 0.8)):
        costs = StageCosts(forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s)
        found = over(orders, costs)
        idle_s = found.step_s - m * (forward_s + input_grad_s + weight_grad_s)
        if weight_grad_s == forward_s == input_grad_s:
            assert idle_s == pytest.approx((p - 1) * (forward_s + input_grad_s - weight_grad_s))
        assert idle_s >= (p - 1) * (forward_s + input_grad_s - weight_grad_s) - 1e-9
        assert idle_s < (p - 1) * (forward_s + input_grad_s + weight_grad_s)  # 1F1B's
        assert max(found.peak_in_flight) == p == max(over(named_orders("1f1b", p, m), costs).peak_in_flight)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (3, 5), (4, 7), (4, 8), (5, 12), (8, 16)])
def test_zb_v(p: int, m: int) -> None:
    """Nobody stands still between its first and its last computation, with 2 p halves in flight: section 6."""
    found = over(named_orders("zb-v", p, m), StageCosts())
    assert [stop - start for start, stop in spans(found)] == [6 * m] * p
    assert found.step_s == 6 * m + p - 1
    assert max(found.peak_in_flight) == min(2 * p, 2 * m)
    short = over(named_orders("zb-v", p, 2 * p - 2), StageCosts()) if p > 1 else found
    assert p < 3 or any(stop - start > 6 * (2 * p - 2) for start, stop in spans(short))


@pytest.mark.parametrize(("name", "p", "m", "v"), [("1f1b", 4, 4, 1), ("1f1b", 4, 12, 1), ("1f1b", 5, 7, 1)])
@pytest.mark.parametrize("weight_grad_s", [0.4, 1.0, 1.3])
def test_backwards_split_in_the_drain(name: str, p: int, m: int, v: int, weight_grad_s: float) -> None:
    """Bubble (p - 1) (max(F, W) + I), with what whole backwards hold and one microbatch of a stage between halves."""
    costs = StageCosts(backward_s=1.2 + weight_grad_s, input_grad_s=1.2, weight_grad_s=weight_grad_s)
    whole, split = (over(named_orders(each, p, m, v), costs) for each in (name, f"{name}-zb"))
    work_s = m * v * (1.0 + costs.backward_s)
    assert whole.step_s == pytest.approx(work_s + (p - 1) * (1.0 + costs.backward_s))
    assert split.step_s == pytest.approx(work_s + (p - 1) * (1.2 + max(1.0, weight_grad_s)))
    assert split.peak_in_flight == whole.peak_in_flight


@pytest.mark.parametrize(("p", "m", "v"), [(4, 4, 2), (4, 8, 3), (8, 8, 16), (8, 64, 6)])
def test_interleaved_backwards_split_in_the_drain(p: int, m: int, v: int) -> None:
    """A third of a whole backward's bubble less where F, I and W take as long."""
    whole, split = (over(named_orders(name, p, m, v), StageCosts()) for name in ("interleaved", "interleaved-zb"))
    assert whole.step_s == pytest.approx(3 * m * v + 3 * (p - 1))
    assert split.step_s == pytest.approx(3 * m * v + 2 * (p - 1))
    assert split.peak_in_flight == whole.peak_in_flight


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 8), (8, 64)])
def test_weight_gradients_at_once(p: int, m: int) -> None:
    """ZB-V with one microbatch of a stage between halves at most, and less than half of 1F1B's bubble more."""
    orders = named_orders("zb-v-lean", p, m)
    for order, full in zip(orders, named_orders("zb-v", p, m), strict=True):
        waiting = [0]
        for action in order:
            waiting.append(waiting[-1] + {ActionKind.I: 1, ActionKind.W: -1}.get(action.kind, 0))
        assert max(waiting) == 1 and sorted(map(str, order)) == sorted(map(str, full))
        assert [a for a in order if a.kind is not ActionKind.W] == [a for a in full if a.kind is not ActionKind.W]
    lean, full_s, plain = (over(named_orders(name, p, m), StageCosts()) for name in ("zb-v-lean", "zb-v", "1f1b"))
    assert full_s.step_s <= lean.step_s <= full_s.step_s + (plain.step_s - 3 * m)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 6), (6, 5), (8, 16)])
def test_gems(p: int, m: int) -> None:
    """One microbatch in flight; the bubble tends to (p - 1) / (p + 1/2): Li and Hoefler 2021, table 2."""
    found = over(named_orders("gems", p, m), StageCosts())
    assert found.step_s == p + (m - 1) * (2 * p + 1) + 2 * p
    assert set(found.peak_in_flight) == {1}
    many = over(named_orders("gems", p, 400), StageCosts())
    assert many.bubble == pytest.approx((p - 1) / (p + 0.5), abs=2e-3)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 8), (6, 12), (8, 8), (8, 24)])
def test_chimera(p: int, m: int) -> None:
    """Bubble (p - 2) / (2 m + p - 2) slot for slot, (p - 2) / (3 m / 2 + p - 2) with long backwards: section 3.1."""
    orders = named_orders("chimera", p, m)
    found = over(orders, EQUAL)
    assert found.step_s == 2 * m + p - 2
    assert found.bubble == pytest.approx((p - 2) / (2 * m + p - 2))
    assert (min(found.peak_in_flight), max(found.peak_in_flight)) == (p // 2 + 1, p)
    if m == p:
        assert over(orders, StageCosts()).bubble == pytest.approx((p - 2) / (1.5 * m + p - 2))


@pytest.mark.parametrize(("p", "m", "waves"), [(2, 2, 1), (2, 4, 2), (4, 4, 1), (4, 8, 2), (8, 8, 2), (8, 8, 4)])
def test_hanayo(p: int, m: int, waves: int) -> None:
    orders = named_orders("hanayo", p, m, 2 * waves)
    assert over(orders, EQUAL).step_s == 4 * m * waves + 2 * p - 2
    if m == p:
        assert over(orders, StageCosts()).bubble <= (2 * p - 2) / (3 * p * waves + p - 1)
    assert max(over(orders, EQUAL).peak_in_flight) == 2 * p * waves


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "message"),
    [
        ("interleaved", 4, 6, 2, "6 microbatches on 4 positions; give a multiple of 4, such as 4 or 8"),
        ("interleaved", 4, 3, 2, "such as 4$"),
        ("interleaved", 4, 4, 1, "1 stages a position; it takes 2, 3"),
        ("chimera", 4, 5, 1, "5 microbatches; half of them go each way, so give an even number, such as 6"),
        ("chimera", 3, 4, 1, "3 positions; half of them"),
        ("gems", 4, 1, 1, "two replicas need at least 2 of each"),
        ("zb-v", 4, 4, 3, "3 stages a position; it takes 2"),
        ("hanayo", 4, 4, 3, r"3 stages a position; it takes 2, 4, \.\.\."),
        ("1f1b", 0, 4, 1, "0 positions and 4 microbatches"),
        ("zb-v", 4, 0, 2, "0 microbatches"),
        ("2f2b", 4, 4, 1, f"no schedule '2f2b'; there are {', '.join(NAMED)}"),
    ],
)
def test_sizes_that_do_not_fit(name: str, p: int, m: int, v: int, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        named_orders(name, p, m, v)
