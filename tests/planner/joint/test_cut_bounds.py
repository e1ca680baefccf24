"""What positions take and hold at least, against every cut."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from paraplan.ir.execution.schedule import ActionKind
from paraplan.planner.joint.bounding.cut_bounds import filled_s, shared_s
from paraplan.planner.joint.bounding.in_flight import fullest, most_at_once, waiting
from paraplan.planner.joint.bounding.relaxations import Tangent, next_price
from paraplan.planner.schedules.named import NAMED, named_orders
from paraplan.planner.schedules.schedule_problem import BACKWARD


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_into_one_stage_a_position_is_below_the_filling(seed: int) -> None:
    draw = random.Random(seed)
    own = [draw.choice((0.5, 1.0, 3.0)) for _ in range(9)]
    before = [each * draw.choice((0.3, 1.0)) for each in own]
    positions, m = draw.choice((2, 3, 4)), draw.choice((1, 2, 8))
    best_s = min(
        max(sum(before[: cut[p]]) + m * sum(own[cut[p] : cut[p + 1]]) for p in range(positions))
        for cut in ((0, *inner, 9) for inner in itertools.combinations(range(1, 9), positions - 1))
    )
    found_s = filled_s(own, before, positions, m)
    assert found_s <= best_s * (1 + 1e-9)
    assert found_s >= best_s * 0.99 or found_s >= 0.99 * m * sum(own) / positions


@pytest.mark.parametrize("seed", range(8))
def test_no_sharing_out_leaves_the_fullest_less(seed: int) -> None:
    draw = random.Random(seed)
    own = [draw.choice((1.0, 1.0, 1.0, 2.5)) for _ in range(7)]
    positions = draw.choice((2, 3))
    best = min(
        max(sum(x for x, at in zip(own, places, strict=True) if at == p) for p in range(positions))
        for places in itertools.product(range(positions), repeat=7)
    )
    assert sum(own) / positions <= shared_s(own, positions) <= best + 1e-9
    assert shared_s([1.0] * 7, 3) == 3.0  # of seven alike three are together


@pytest.mark.parametrize("name", NAMED)
def test_a_position_is_fullest_where_most_forwards_wait(name: str) -> None:
    pp, m, each = 4, 8, NAMED[name].stages
    orders = named_orders(name, pp, m, each)
    found, at_once = [0] * (pp * each), 0
    for order in orders:
        counts = []
        for end in range(1, len(order) + 1):
            flying = Counter(a.stage for a in order[:end] if a.kind is ActionKind.F)
            flying.subtract(Counter(a.stage for a in order[:end] if a.kind in BACKWARD))
            counts.append(flying)
            at_once = max(at_once, flying[0])
        for stage, count in max(reversed(counts), key=lambda flying: flying.total()).items():
            found[stage] += count
    assert fullest(orders)[0].counts == tuple(found) and most_at_once(orders) == at_once
    assert {"gpipe": 8, "1f1b": 4, "gems": 1}.get(name, at_once) == at_once


@pytest.mark.parametrize("name", NAMED)
def test_more_microbatches_wait_no_less(name: str) -> None:
    """The counts of a few microbatches stand for those of more."""
    each = NAMED[name].stages
    few, many = (fullest(named_orders(name, 4, m, each)) for m in (16, 32))
    for less, more in zip(few, many, strict=True):
        assert less.have_grads == more.have_grads
        assert all(a <= b for a, b in zip(less.counts, more.counts, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_every_cut_below_a_limit_waits_as_often(seed: int) -> None:
    draw = random.Random(seed)
    seconds = [draw.choice((1.0, 2.0)) for _ in range(8)]
    counts, limit_s = (4, 3, 2, 1), sum(seconds) / 4 * 1.4
    least = waiting(counts, seconds, limit_s)
    cuts = 0
    for inner in itertools.combinations(range(1, 8), 3):
        bounds = list(itertools.pairwise((0, *inner, 8)))
        if max(sum(seconds[slice(*bound)]) for bound in bounds) <= limit_s:
            cuts += 1
            waits = [count for count, bound in zip(counts, bounds, strict=True) for _ in range(*bound)]
            assert least is not None and all(a <= b for a, b in zip(least, waits, strict=True))
    assert cuts or least is None
    assert waiting(counts, seconds, sum(seconds) / 5) is None


def test_an_even_cut_waits_within_a_stage_of_its_own() -> None:
    assert waiting((8, 6, 4, 2), [1.0] * 8, None) == [6, 6, 4, 4, 2, 2, 2, 2]


def test_prices_are_looked_for_where_tangents_meet() -> None:
    below, above = Tangent(0.0, 10.0, 4.0), Tangent(4.0, 12.0, -1.0)
    found = next_price([below, above], 1.0)
    assert found is not None and found == pytest.approx((16.0 - 10.0) / 5.0, rel=0.2)
    assert next_price([Tangent(0.0, 10.0, -1.0)], 1.0) is None
    assert next_price([below], 2.0) == pytest.approx(2.0)
    assert next_price([Tangent(0.0, 10.0, 0.001), above], 1.0) is None
