"""What people lay out by hand is tried where time is left, so that nothing they pin is faster on few devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from paraplan.ir.errors import NoPlanError
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.fits import search_room
from paraplan.planner.joint.search_joint import JointSearch
from paraplan.planner.one_stage import one_stage_plans
from paraplan.planner.one_stage.one_stage_plans import CHUNKED, FAR, SOLVED, OneStagePlans
from paraplan.planner.pipeline.draft import Draft, step_s
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.search import find
from tests.captures import zoo_job
from tests.planner.joint.chains import chained, cluster, group
from tests.planner.joint.chains import job as chain_job


@pytest.mark.parametrize("link", [1.0, 30.0])
def test_no_width_of_tensor_parallelism_is_faster(link: float) -> None:
    job = chain_job(cluster(group(1.0, devices=4, link=link)), chained())
    plan = search_room(job, Constraints()).plan
    words = {each.what for each in plan.tried}
    assert plan.prediction is not None
    if len(plan.stages) == 1:
        assert words >= {"tp=4", "tp=2 dp=2"}
    for tp in (4, 2):
        pinned = search_room(job, Constraints(tp=tp, dp=4 // tp, pp=1)).plan
        assert pinned.prediction is not None
        assert plan.prediction.step_s <= pinned.prediction.step_s * (1 + 1e-9)


def test_no_sequence_parallelism_is_faster() -> None:
    job = zoo_job("gpt2", 2)
    plan = search_room(job, Constraints()).plan
    assert plan.prediction is not None
    if len(plan.stages) == 1:
        assert "tp=2 sp=True" in {each.what for each in plan.tried}
    pinned = search_room(job, Constraints(tp=2, sp=True)).plan
    assert pinned.prediction is not None and plan.prediction.step_s <= pinned.prediction.step_s * (1 + 1e-9)


def test_under_tight_memory_no_zero_level_that_keeps_everything_is_faster() -> None:
    job = zoo_job("gpt2", 2)
    roomy = search_room(job, Constraints(pp=1)).plan
    assert roomy.prediction is not None
    tight = int(0.7 * max(roomy.prediction.peak_bytes))
    plan = search_room(job, Constraints(memory_bytes=tight, reserve_bytes=0)).plan
    assert plan.prediction is not None
    for zero in (1, 2, 3):
        pins = Constraints(memory_bytes=tight, reserve_bytes=0, dp=2, zero=zero, pp=1, recompute="none")
        try:
            pinned = search_room(job, pins).plan
        except NoPlanError:
            continue
        assert pinned.prediction is not None
        assert plan.prediction.step_s <= pinned.prediction.step_s * (1 + 1e-9), zero


@pytest.mark.parametrize(
    ("hoped", "binds"), [(1.0, True), (1.004, True), (1.01, True), (1.04, True), (1.1, True), (1.0, False)]
)
def test_what_was_to_be_faster_is_solved_and_zero_3_before_it(
    monkeypatch: pytest.MonkeyPatch, hoped: float, binds: bool
) -> None:
    """A draft of one stage that came out longer than a pipeline, for want of room, and was estimated shorter."""
    monkeypatch.setattr(one_stage_plans, "MESHES", 1)  # there are more
    job, tried = zoo_job("gpt2", 4), list[Constraints]()
    alone = Draft.of(find(job, Constraints(mesh=(4,), pp=1), certify=False).plan)
    alone.step_s, best = 2.0, replace(alone, step_s=1.0, sample=msgspec.structs.replace(alone.sample, stages=()))

    def attempt(what: str, pins: Constraints, make: Callable[[], Draft]) -> float | None:
        tried.append(pins)
        return None if binds and pins.recompute == "none" else 1.0

    search = OneStagePlans(job, Constraints(), Deadline(60.0), fail, attempt, [alone, best])
    search.plan_usual()
    tried.clear()
    search.solve([], lambda draft: hoped if draft is alone else draft.step_s, 9.0, certify=False)
    solved = [(pins.dp, pins.zero, pins.mesh) for pins in tried]
    zero_3 = binds and hoped <= CHUNKED
    assert solved == [(4, 3, None)] * zero_3 + [(None, None, (4,))] * (hoped <= SOLVED)
    unmade = OneStagePlans(job, Constraints(), Deadline(60.0), fail, attempt, [best])
    unmade.plan_usual()
    tried.clear()
    unmade.solve([], lambda draft: draft.step_s, hoped, certify=False)
    assert [(pins.dp, pins.zero) for pins in tried] == [(4, 3)] * zero_3, "it was estimated"


@pytest.mark.parametrize(("alone_s", "is_far"), [(0.99 * FAR, False), (1.01 * FAR, True), (math.inf, False)])
def test_nothing_of_one_stage_is_solved_where_it_is_far_from_a_pipeline(alone_s: float, is_far: bool) -> None:
    """Where it was not estimated to fit, nothing is known of it."""
    job, tried = zoo_job("gpt2", 4), list[str]()
    alone = Draft.of(find(job, Constraints(mesh=(4,), pp=1), certify=False).plan)
    best = replace(alone, step_s=1.0, sample=msgspec.structs.replace(alone.sample, stages=()))
    search = OneStagePlans(
        job, Constraints(), Deadline(60.0), fail, lambda what, *_: tried.append(what), [best], is_tight=True
    )
    search.solve([], step_s, alone_s, certify=False)
    assert bool(tried) != is_far


def test_what_recomputes_is_fitted_first_only_where_nothing_else_fits() -> None:
    """On few meshes, where ZeRO-1 does not fit: it takes longer than all that is estimated from prices. What holds
    least comes before it, each with everything made again and with nothing, until a degree fits."""
    tried, job = list[tuple[int | None, int | None, str | None, bool]](), zoo_job("gpt2", 4)
    alone = Draft.of(find(job, Constraints(mesh=(4,), pp=1), certify=False).plan)

    def usual(*fitting: tuple[int | None, int | None, str | None]) -> list[tuple[int | None, int | None, str | None]]:
        tried.clear()
        drafts = list[Draft]()

        def attempt(what: str, pins: Constraints, make: Any) -> float | None:
            tried.append((pins.tp, pins.zero, pins.recompute, make.keywords["again"]))
            if tried[-1][:3] not in fitting:
                return None
            drafts.append(alone)
            return alone.step_s

        OneStagePlans(job, Constraints(), Deadline(60.0), fail, attempt, drafts).plan_usual()
        return [each[:3] for each in tried]

    begin = [(None, 1, "none"), (None, 2, "none")]
    assert usual((None, 2, "none")) == begin
    lean, split = ([(tp, zero, recompute) for recompute in ("full", "none")] for tp, zero in ((None, 3), (4, None)))
    found = usual((None, 3, "none"))
    assert found[:5] == [*begin, *lean, lean[1]], "in half as many microbatches, which is no faster"
    assert found[5:] == [(None, 3, None), (None, 2, None)][: len(found) - 5]
    assert usual(split[0], (None, 3, None))[:7] == [*begin, *lean, *split, split[0]]
    found = usual((None, 3, None))
    assert found[:8] == [*begin, *lean, *split, (2, 3, "full"), (2, 3, "none")] and found[8] == (None, 3, None)
    assert [again for *_, again in tried[:9]] == [True, *[False] * 7, True]

    def recorded(what: str, pins: Constraints, make: Any) -> None:
        tried.append((pins.tp, pins.zero, pins.recompute, make.keywords["again"]))

    tried.clear()
    OneStagePlans(job, Constraints(), Deadline(60.0), fail, recorded, [alone], is_tight=True).plan_by_hand()
    assert tried[:4] == [(None, zero, recompute, False) for recompute in (None, "none") for zero in (3, 2)]


def test_what_was_hoped_of_drafts_that_were_estimated_and_of_others() -> None:
    job = zoo_job("gpt2", 4)
    search = JointSearch(job, Constraints(), Shardings(fail), lambda text: None, Deadline(60.0))
    roomless = Draft.of(find(job, Constraints(mesh=(4,), pp=1), certify=False).plan)
    assert search._hoped_of(roomless) == roomless.step_s
    for estimated_s in (2 * roomless.step_s, 0.5 * roomless.step_s):
        search._drafted[id(roomless)] = "one stage", estimated_s, {}
        assert search._hoped_of(roomless) == min(roomless.step_s, estimated_s)


def fail(*given: object, **more: object) -> Any:
    raise AssertionError(f"nothing is made here ({given}, {more})")


@pytest.mark.parametrize("fits", ["few", "many", "none"])
def test_what_holds_least_has_few_microbatches_at_first(monkeypatch: pytest.MonkeyPatch, fits: str) -> None:
    """Of many a plan takes as long as the search has, and a microbatch' call mostly launches; they follow where it does
    not fit in few."""
    job, tried, drafts = zoo_job("gpt2", 4), list[int | None](), list[Draft]()
    alone = Draft.of(find(job, Constraints(mesh=(4,), pp=1), certify=False).plan)
    pins = Constraints(dp=4, zero=3, pp=1)
    ways = [msgspec.structs.replace(pins, recompute=how, microbatches=96) for how in ("full", "none")]

    def attempt(what: str, pins: Constraints, make: Any) -> float | None:
        tried.append(pins.microbatches)
        if fits == "none" or (pins.microbatches == 96) != (fits == "many"):
            return None
        drafts.append(alone)
        return alone.step_s

    monkeypatch.setattr(one_stage_plans, "all_sharded", lambda *_: ways)
    OneStagePlans(job, Constraints(), Deadline(60.0), fail, attempt, drafts, is_tight=True)._plan_least()
    assert tried == {"few": [32, 32, 16], "many": [32, 32, 96, 96, 48], "none": [32, 32, 96, 96]}[fits]


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_with_little_time_left_one_stage_is_solved_before_tensor_parallelism(share: float) -> None:
    job, tried = zoo_job("gpt2", 4), list[str]()
    deadline = Deadline(600.0)
    deadline._started -= share * 600.0
    alone = Draft.of(find(job, Constraints(mesh=(4,), pp=1), certify=False).plan)
    search = OneStagePlans(
        job, Constraints(), deadline, fail, lambda what, *_: tried.append(what), [alone], is_tight=True
    )
    search.solve([], step_s, alone.step_s, certify=False)
    assert tried == (["tp=4", "one stage"] if share < 0.5 else ["one stage", "tp=4"])
