"""Combinations refined lowest first, and the bound that another process refines meanwhile."""

from __future__ import annotations

import random
import time
from contextlib import closing

import pytest

from paraplan.ir.process.workers import Begun, Workers
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint.bounding.proving import SpaceProof, bound_of, one_round
from paraplan.planner.joint.bounding.refining import NEAR, Level, Refining, Timed
from paraplan.planner.joint.bounding.space_bound import SpaceBound, largest_of
from paraplan.planner.joint.combinations import Combination, combinations
from paraplan.planner.joint.prices.pricing import Pricing, pricing_beside
from tests.captures import zoo_job

ENDLESS = 1e9


def _listed(count: int) -> list[Combination]:
    return [Combination(2, (1,), number + 2, "1f1b", 1) for number in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_the_least_of_all_is_found_and_every_value_before_is_below_it(seed: int) -> None:
    draw = random.Random(seed)
    listed = _listed(12)
    steps = {each: sorted(draw.uniform(1.0, 2.0) for _ in range(4)) for each in listed}
    asked: list[tuple[int, Combination]] = []

    def level(number: int) -> Level:
        def bound_s(each: Combination) -> float:
            asked.append((number, each))
            return steps[each][number]

        return Level(bound_s, lambda each: each.microbatches)

    refining = Refining(listed, lambda each: steps[each][0], [level(n) for n in (1, 2, 3)], Timed[None](), 10.0)
    least = min(found[-1] for found in steps.values())
    while not refining.is_done:
        assert refining.least_s <= least
        refining.go_on(time.perf_counter(), gives_up=False)  # no time: one of them
    assert refining.least_s == least
    assert len(asked) == len(set(asked)), "nothing is asked twice"
    worst = max((steps[each][n - 1] for n, each in asked), default=0.0)
    assert worst <= least, "only what was below the least is refined"


def test_it_ends_near_the_best_step() -> None:
    listed = _listed(3)
    refining = Refining(listed, lambda _: 1 - NEAR, [Level(pytest.fail, lambda _: 0)], Timed[None](), 1.0)
    refining.go_on(ENDLESS)
    assert refining.is_done and refining.least_s == 1 - NEAR


def test_what_is_not_there_is_expected_to_take_as_long_as_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    timed = Timed[int]()
    assert timed.waiting_s("abc") == 0.0

    def make() -> int:
        clock[0] += 2.0
        return 7

    assert timed.get("a", make) == timed.get("a", make) == 7 and clock[0] == 2.0
    assert timed.waiting_s("abcb") == 4.0
    timed.took(make)
    assert timed.waiting_s("abcb") == 8.0


def test_a_way_is_bounded_by_that_of_whole_multiples_of_its_samples() -> None:
    ways = [("a", 1.0), ("a", 2.0), ("a", 3.0), ("a", 8.0), ("a", 0.5), ("b", 6.0)]
    found = largest_of(ways)
    assert [found[way][1] for way in ways] == [8.0, 8.0, 3.0, 8.0, 8.0, 6.0]


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "mlp"])
def test_most_samples_bound_fewer(name: str) -> None:
    """What a microbatch takes at least is no less than its share of what one of more samples does."""
    job, pins = zoo_job(name, 2), Constraints()
    pricing = Pricing(job, pins, 10**12, lambda _: None, Deadline(600.0))
    listed = combinations(job, pins)
    bound = SpaceBound(job, pins, pricing.budget, pricing.position, pricing.way_of)
    alike = {bound.way(each): each for each in listed}
    pairs = {way: other for way, other in largest_of(alike).items() if other != way}
    assert pairs
    for way, other in pairs.items():
        own, coarse = bound._relaxed(alike[way]), bound._relaxed(alike[other], way[1] / other[1])
        assert own is not None and coarse is not None
        assert coarse.whole_s <= own.whole_s * (1 + 2e-3), (way, other)  # relaxations are solved to a thousandth
        assert all(c <= o * (1 + 1e-9) for c, o in zip(coarse.round_s, own.round_s, strict=True))


def test_another_process_proves_what_this_one_would() -> None:
    """Begun for another plan first, and alone in a process without others."""
    job, pins = zoo_job("gpt2", 2), Constraints(microbatches=4)
    pricing = Pricing(job, pins, 10**12, lambda _: None, Deadline(600.0))
    listed = combinations(job, pins)
    here = bound_of(pricing, listed, (), 1.0, 600.0)
    made_with = job, pins, pricing.budget, pricing.deadline
    with closing(Workers(1, pricing_beside, *made_with)) as workers:
        proof = SpaceProof(pricing, listed, workers)
        proof.prepare(((0, 1), (1, len(job.program.segments))), 0.5)
        assert not workers.has_idle
        proof.pause()
        proof.begin((), 1.0)
        found = proof.answer()
        assert workers.lost == 0
    assert found.least_s == pytest.approx(here.least_s, rel=2e-3) and found.spread == here.spread
    assert pricing.under_way == {}, "nothing was left to this process"
    alone = SpaceProof(pricing, listed, None)
    alone.prepare((), 1.0)
    alone.begin((), 1.0)
    assert alone.answer() == here


def test_what_is_proved_late_is_what_is_known_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round may take longer than there is time for: then it is what is known at once."""
    job, pins, waited = zoo_job("gpt2", 2), Constraints(microbatches=4), list[float]()
    pricing = Pricing(job, pins, 10**12, lambda _: None, Deadline(200.0))
    real = Begun.within
    listed = combinations(job, pins)

    def within(self: Begun[object], seconds: float) -> object:
        waited.append(seconds)
        return real(self, seconds) if seconds > 100.0 else None

    monkeypatch.setattr(Begun, "within", within)
    with closing(Workers(1, pricing_beside, job, pins, pricing.budget, pricing.deadline)) as workers:
        proof = SpaceProof(pricing, listed, workers)
        proof.begin((), 1.0)
        whole = proof.answer()
        assert waited[0] > 100.0
        pricing.deadline.limit_s = 0.0
        known = proof.answer()
    assert waited[1:] == [20.0] and 0.0 < known.least_s <= whole.least_s


def test_rounds_go_on_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    job, pins = zoo_job("gpt2", 4), Constraints(microbatches=2)
    pricing = Pricing(job, pins, 10**12, lambda _: None, Deadline(600.0))
    task = combinations(job, pins), (), 1.0
    monkeypatch.setattr("paraplan.planner.joint.bounding.proving.ROUND_S", 0.0)
    found = [one_round(pricing, *task)]
    while found[-1].waiting_s < float("inf"):
        found.append(one_round(pricing, *task))
    least = [each.least_s for each in found]
    assert len(found) > 3 and least == sorted(least) and least[0] < least[-1]
