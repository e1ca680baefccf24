"""What pipelines are estimated for where those that were to fit do not, and in which order."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paraplan.ir.process.memo import release_caches
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint import estimating, search_joint
from paraplan.planner.joint.combinations import Combination, combinations
from paraplan.planner.joint.estimate import Estimate
from paraplan.planner.joint.estimating import BATCH, FEWEST
from paraplan.planner.joint.prices.pricing import Pricing
from paraplan.planner.joint.prices.pricing_rounds import PricingRounds
from paraplan.planner.joint.promise import LEANER, LESS, SMALL, Promise
from paraplan.planner.joint.search_joint import JointSearch
from paraplan.planner.pipeline.draft import Draft
from paraplan.planner.pipeline.stage_sharding import Shardings
from tests.captures import zoo_job

GIB = 2**30
FREE = Constraints(recompute="none", reserve_bytes=0)
PIPED = Combination(2, (2,), 4, "1f1b", 1)


def _search(reserves: bool = True) -> JointSearch:
    release_caches()
    shardings = Shardings(lambda *_: pytest.fail("none"))
    return JointSearch(zoo_job("gpt2", 4), FREE, shardings, lambda _: None, Deadline(600.0), reserves)


def _draft(step_s: float) -> Draft:
    return cast("Draft", SimpleNamespace(step_s=step_s, cut=(), plan=None))


def test_what_allocators_use_in_part_is_left_free() -> None:
    assert Promise.first(GIB, True) == 1 - SMALL == Promise.first(GIB // 8, True)
    assert Promise.first(80 * GIB, True) == pytest.approx(1 - 1 / (80 * 32)) and Promise.first(GIB, False) == 1.0


def test_all_are_estimated_for_as_much_less_as_the_nearest_to_fitting_is_over() -> None:
    """And for ever less, to the last of the shares, whatever little it is."""
    known, of = Promise(), cast("Estimate", SimpleNamespace(combination=PIPED))
    assert known.leaner(1.0, GIB) == LEANER[0]
    known.lacks(of, GIB // 2)
    assert known.leaner(1.0, GIB) == LEANER[0]
    known.lacks(of, GIB // 100)
    known.lacks(cast("Estimate", SimpleNamespace(combination=Combination(1, (2,), 4, "1f1b", 1))), 1)
    assert known.leaner(1.0, GIB) == pytest.approx(1 - 0.015 - LESS, abs=1e-6)
    shares: list[float] = [1.0]
    while (less := known.leaner(shares[-1], GIB)) is not None:
        shares.append(less)
    assert shares == sorted(shares, reverse=True) and set(LEANER) <= set(shares) and len(shares) < 2 / LESS


@pytest.mark.parametrize("over", [0, 1, 2])
def test_estimates_are_made_anew_once_none_that_was_to_fit_does(monkeypatch: pytest.MonkeyPatch, over: int) -> None:
    """For fewer bytes until one does; then for as many as at first, since more was priced on the way."""
    search, shares, handed = _search(), list[float](), list[int]()
    listed = combinations(search.job, FREE)[:3]

    def estimate_best(_rounds: object, _best_s: float, _faults: object, share: float) -> list[Estimate]:
        shares.append(share)
        return [Estimate(each, 1.0, 0, (), cast("Any", None)) for each in listed]

    def plan_promising(estimates: list[Estimate]) -> bool:
        handed.append(len(estimates))
        search._planned[estimates[0].combination.text] = estimates[0]
        search._promise.over_bytes = search.budget // 100
        if len(handed) > over:
            search.drafts.append(_draft(1.0))
        return len(handed) > over

    monkeypatch.setattr(search_joint, "estimate_best", estimate_best)
    monkeypatch.setattr(search, "_plan_promising", plan_promising)
    monkeypatch.setattr(PricingRounds, "has_more", lambda *_: False)
    search._propose(listed)
    first = Promise.first(search.budget, True)
    assert shares[0] == first and shares[: over + 1] == sorted(set(shares), reverse=True)
    assert shares[over + 1 :] == ([first] if over else [])
    assert handed == [3] * (over + 1) + ([2] if over else []), "what was planned is not planned again"


@pytest.mark.parametrize("over_bytes", [0, 10])
@pytest.mark.parametrize("found", [False, True])
def test_the_first_that_is_over_ends_a_round_that_found_nothing(
    monkeypatch: pytest.MonkeyPatch, over_bytes: int, found: bool
) -> None:
    search, planned = _search(), list[Estimate]()
    search.drafts.append(_draft(9.0))
    estimates = [
        Estimate(Combination(2, (2,), count, "1f1b", 1), 1.0 + count / 100, 0, (), cast("Any", None))
        for count in (1, 2, 4)
    ]

    def plan(estimate: Estimate, _: object = None) -> None:
        planned.append(estimate)
        search._promise.unfit[estimate.combination] += 1
        search._promise.lacks(estimate, over_bytes)
        if found:
            search.drafts.append(_draft(8.0))

    monkeypatch.setattr(search, "_plan", plan)
    assert not search._plan_promising(estimates)
    assert len(planned) == (1 if over_bytes and not found else 3)


def test_those_of_whose_likes_none_fits_come_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed form does not see that a chain cannot be cut so that all stages fit."""
    pricing, asked = Pricing(zoo_job("gpt2", 4), FREE, GIB, lambda _: None, Deadline(60.0)), list[list[int]]()
    waiting = [
        (1.0 + 0.01 * (each == 1), number, Combination(4, (1,), 4 + number, "1f1b", each), cast("Any", None))
        for number, each in enumerate([2] * (2 * FEWEST) + [1] * BATCH)
    ]

    def batch(_: object, pairs: list[tuple[Combination, Any]], *__: object) -> list[Estimate]:
        asked.append([combination.each for combination, _ in pairs])
        return [
            Estimate(combination, 1.0 if combination.each == 1 else math.inf, 1, (), prices)
            for combination, prices in pairs
        ]

    monkeypatch.setattr(estimating, "_batch", batch)
    estimating._in_turn(pricing, cast("Any", waiting), [], 1.0)
    assert asked[:2] == [[2] * BATCH, [1] * BATCH]


def test_what_is_wholly_priced_is_not_priced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job, made = zoo_job("gpt2", 4), list[Combination]()
    pricing, listed = Pricing(job, FREE, device_budget(job.cluster, FREE), lambda _: None, Deadline(600.0)), []
    listed = combinations(job, FREE)
    priced = Pricing.priced

    def counted(self: Pricing, combination: Combination, *others: Any) -> Any:
        made.append(combination)
        return priced(self, combination, *others)

    monkeypatch.setattr(Pricing, "priced", counted)
    PricingRounds(pricing, listed).go_on()
    known, first = dict(pricing.prices), len(made)
    assert pricing.whole and pricing.whole <= known.keys()
    PricingRounds(pricing, listed).go_on()
    again = {pricing.kind(each) for each in made[first:]}
    assert not again & pricing.whole and all(
        pricing.prices[kind] is known[kind] for kind in pricing.whole & known.keys()
    )
