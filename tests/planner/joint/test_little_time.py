"""With little time what is found is no plan that others are many times as fast as."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from paraplan.ir.process.memo import release_caches
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.deadline import FIRST, Deadline
from paraplan.planner.joint.combinations import combinations
from paraplan.planner.joint.drafting import PlanningEffort
from paraplan.planner.joint.estimate import Estimate
from paraplan.planner.joint.estimating import estimate_best
from paraplan.planner.joint.prices.pricing import PRICED_SHARE, Pricing
from paraplan.planner.joint.prices.pricing_rounds import BATCH, PricingRounds
from paraplan.planner.joint.promise import Promise
from paraplan.planner.joint.search_joint import AGAIN_LEFT, LATE, POOR, JointSearch
from paraplan.planner.one_stage.one_stage_plans import OneStagePlans
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.search import find
from tests.captures import zoo_job

FREE = Constraints(recompute="none", reserve_bytes=0)


class Stopped(Deadline):
    """As much of the limit has passed, always.

    Args:
        share: of it.
    """

    def __init__(self, share: float) -> None:
        super().__init__(60.0)
        self.share = share

    @property
    def passed_s(self) -> float:
        """Seconds."""
        return self.share * self.limit_s


@pytest.mark.parametrize(
    ("fits", "share", "least", "most"),
    [(True, 0.9, 1, BATCH), (False, 0.9, BATCH + 1, math.inf), (False, 1.0, 1, 1)],
)
def test_late_it_goes_on_pricing_until_something_fits_or_time_is_up(
    monkeypatch: pytest.MonkeyPatch, fits: bool, share: float, least: int, most: float
) -> None:
    assert PRICED_SHARE < share
    job = zoo_job("gpt2", 4)
    release_caches()
    pricing = Pricing(job, FREE, device_budget(job.cluster, FREE), lambda _: None, Stopped(share))
    if not fits:
        monkeypatch.setattr(pricing, "least_s", lambda *_: math.inf)
    PricingRounds(pricing, combinations(job, FREE)).go_on()
    assert least <= len(pricing.prices) <= most


@pytest.mark.parametrize(("share", "again"), [(1.01 * PRICED_SHARE, True), (1 - 0.9 * AGAIN_LEFT, False)])
def test_what_there_was_no_time_to_price_is_priced_after_the_first_plans(
    monkeypatch: pytest.MonkeyPatch, share: float, again: bool
) -> None:
    job, rounds = zoo_job("gpt2", 4), list[tuple[int, list[Estimate]]]()
    release_caches()
    search = JointSearch(job, FREE, Shardings(lambda *_: pytest.fail("none")), lambda _: None, Stopped(share))
    search.drafts.append(_draft(1e9))

    def plan_promising(estimates: list[Estimate]) -> bool:
        rounds.append((len(search.pricing.prices), estimates))
        search._planned.update({each.combination.text: each for each in estimates[:1]})
        return True

    monkeypatch.setattr(search, "_plan_promising", plan_promising)
    found = search._propose(combinations(job, FREE))
    assert len(rounds) == 1 + again and rounds[0][1][0].combination in {each.combination for each in found}
    if again:
        (few, first), (more, then) = rounds
        assert few < more and first[0].combination not in {each.combination for each in then}, "it is planned"


def test_what_was_estimated_again_for_fewer_bytes_says_nothing_of_other_kinds() -> None:
    one, other = (SimpleNamespace(family="1f1b, recomputing", step_s=step_s) for step_s in (1.0, 1.2))
    known = Promise()
    known.planned(one, "a", 2.1, 2.0)  # type: ignore[arg-type]
    assert known.hoped_s(one, "a") == pytest.approx(2.1)  # type: ignore[arg-type]
    assert known.hoped_s(other, "b") == pytest.approx(1.2 * 1.05)  # type: ignore[arg-type]


@pytest.mark.parametrize("times", [0.9 * POOR, 1.1 * POOR])
def test_a_plan_much_slower_than_others_promise_is_not_what_time_is_kept_for(
    monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    job, planned = zoo_job("gpt2", 4), list[Estimate]()
    search = JointSearch(job, FREE, Shardings(lambda *_: pytest.fail("none")), lambda _: None, Stopped(0.9))
    pricing = Pricing(job, FREE, search.budget, lambda _: None, Deadline(60.0))
    estimates = [
        each for each in estimate_best(PricingRounds(pricing, combinations(job, FREE)), math.inf, []) if each.step_s > 0
    ]
    search.__dict__["pricing"] = pricing
    least_s = min(each.step_s for each in estimates)
    search.drafts.append(_draft(times * least_s))
    monkeypatch.setattr(PlanningEffort, "seconds", lambda *_: math.inf)

    def plan(estimate: Estimate, _: object = None) -> None:
        planned.append(estimate)
        search.drafts.append(_draft(estimate.step_s))

    monkeypatch.setattr(search, "_plan", plan)
    assert search._plan_promising(estimates) and LATE in search.words
    assert len(planned) == (times > POOR)


@pytest.mark.parametrize(("reserves", "times"), [(True, 1.1), (True, 1.0), (False, 1.1)])
def test_time_kept_for_other_searches_goes_into_a_pipeline_that_promises_more(
    monkeypatch: pytest.MonkeyPatch, reserves: bool, times: float
) -> None:
    job, planned = zoo_job("gpt2", 4), list[Estimate]()
    search = JointSearch(job, FREE, Shardings(lambda *_: pytest.fail("none")), lambda _: None, Stopped(0.9), reserves)
    pricing = Pricing(job, FREE, search.budget, lambda _: None, Deadline(60.0))
    estimates = [
        each for each in estimate_best(PricingRounds(pricing, combinations(job, FREE)), math.inf, []) if each.step_s > 0
    ]
    search.__dict__["pricing"] = pricing
    search.deadline.kept = 1 / FIRST if reserves else 1.0
    search.drafts.append(_draft(times * min(each.step_s for each in estimates)))
    late_s = 0.1 * 60.0 * (1 + 1 / FIRST) / 2  # between what is left before and after
    monkeypatch.setattr(PlanningEffort, "seconds", lambda *_: late_s)

    def plan(estimate: Estimate, _: object = None) -> None:
        planned.append(estimate)
        search.drafts.append(_draft(estimate.step_s))

    monkeypatch.setattr(search, "_plan", plan)
    assert search._plan_promising(estimates)
    assert len(planned) == (reserves and times > 1.0) and LATE in search.words


def _draft(step_s: float) -> Any:
    return SimpleNamespace(step_s=step_s, plan=None)


@pytest.mark.parametrize("reserves", [True, False])
def test_once_allocators_have_room_the_time_of_searches_for_fewer_bytes_is_free(
    monkeypatch: pytest.MonkeyPatch, reserves: bool
) -> None:
    job, limits = zoo_job("gpt2", 2), list[float]()
    pins = Constraints(microbatches=2)
    monkeypatch.setattr(OneStagePlans, "solve", lambda plans, *_: limits.append(plans.deadline.limit_s))
    find(job, pins, 20.0, certify=False, reserves=reserves)
    assert limits == [pytest.approx(20.0 / FIRST if reserves else 20.0)]
