"""Interrupted searches give the best plan that they had, or the first that fits; interrupted again, none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from paraplan.baselines.planners import choosing, plan_by
from paraplan.ir.errors import SolverLimitError
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan, Progress
from paraplan.planner.constraints import Constraints
from paraplan.planner.fits import search_room
from paraplan.planner.interrupts import FIRST_WORDS, NOTE, interrupted_plan
from paraplan.planner.joint.bounding.proving import SpaceProof
from paraplan.planner.joint.search_joint import JointSearch
from paraplan.planner.one_stage import solved_meshes
from paraplan.planner.one_stage.one_stage_plans import OneStagePlans
from tests.planner.joint.chains import chained, cluster, group
from tests.planner.joint.chains import job as chain_job

Search = Callable[[Progress], BestPlan]
FREE, EIGHT = Constraints(microbatches=4), Constraints(microbatches=8)


def four() -> Job:
    return chain_job(cluster(group(1.0, devices=4)), chained())


def differing() -> Job:
    return chain_job(cluster(group(2.0), group(1.0)), chained())


def planned(job: Job, pins: Constraints) -> Search:
    return lambda progress: search_room(job, pins, 60.0, progress)


def interrupted(search: Search, at: int, again: bool = False) -> tuple[BestPlan | None, list[str]]:
    """What a search gives that is interrupted as it reports progress for the (at + 1)th time, or again as it makes the
    first plan, and its reports."""
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == at + 1 or (again and FIRST_WORDS in told):
            raise KeyboardInterrupt

    try:
        return search(tell), told
    except KeyboardInterrupt:
        return None, told


def one_stage(job: Job) -> Search:
    return planned(job, Constraints(pp=1))


@pytest.mark.parametrize(
    "search",
    [
        pytest.param(planned(four(), FREE), id="pipelines or none"),
        pytest.param(planned(four(), msgspec.structs.replace(FREE, pp=2)), id="a pinned pipeline"),
        pytest.param(one_stage(four()), id="one stage"),
        pytest.param(planned(differing(), FREE), id="groups that differ"),
        pytest.param(lambda tell: plan_by("megatron-grid", four(), EIGHT, 60.0, tell), id="another planner"),
    ],
)
def test_an_interrupt_at_any_report_gives_the_best_plan_so_far(search: Search) -> None:
    whole, told = interrupted(search, -1)
    assert whole is not None and not whole.is_interrupted and NOTE not in whole.plan.notes
    given = [interrupted(search, at, again=True) for at in range(len(told))]
    found = [best for best, _ in given if best is not None]
    assert given[0][0] is None and found
    for best, lines in given:
        known = any("best so far" in line for line in lines)
        assert best is not None or not known, lines
        if best is not None:
            assert best.is_interrupted and best.plan.notes.count(NOTE) == 1
            assert best.step_s >= whole.step_s * (1 - 1e-9)
    first = next(at for at, (best, _) in enumerate(given) if best is not None)
    assert all(best is not None for best, _ in given[first:]), "what is found is not lost later"


@pytest.mark.parametrize("pins", [FREE, msgspec.structs.replace(FREE, pp=2), Constraints(pp=1)])
def test_an_interrupt_before_a_plan_gives_the_first_that_fits(pins: Constraints) -> None:
    best, told = interrupted(planned(four(), pins), 0)
    assert best is not None and best.is_interrupted and best.plan.notes.count(NOTE) == 1
    assert told[1] == FIRST_WORDS and len(told) > 2


@pytest.mark.parametrize("fault", [SolverLimitError("nothing"), KeyboardInterrupt()])
def test_an_interrupt_where_nothing_is_found_stays_one(fault: BaseException) -> None:
    def first() -> BestPlan:
        raise fault

    with pytest.raises(KeyboardInterrupt):
        interrupted_plan(KeyboardInterrupt(), first, lambda _: None)


def interrupt(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


def test_an_interrupt_as_a_bound_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is there: it is given without the bound."""
    monkeypatch.setattr(SpaceProof, "answer", interrupt)
    best = search_room(four(), FREE)
    assert best.is_interrupted and NOTE in best.plan.notes


def test_an_interrupt_as_a_plan_is_quickened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solved_meshes, "passed", interrupt)
    best = search_room(four(), Constraints(pp=1, dp=4, microbatches=1))
    certificate = best.plan.certificate
    assert best.is_interrupted and certificate is not None and certificate.status == "feasible"


def test_a_second_interrupt_keeps_what_is_made_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one ends the search, the second the making of a draft: the plans that are made are left."""
    monkeypatch.setattr(JointSearch, "_make_fastest", interrupt)
    best = search_room(four(), FREE)
    assert best.is_interrupted and isinstance(best.plan, Plan)
    monkeypatch.setattr(OneStagePlans, "plan_usual", lambda *_: None)
    monkeypatch.setattr(JointSearch, "_plan_promising", lambda *_: True)
    with pytest.raises(KeyboardInterrupt):
        search_room(four(), msgspec.structs.replace(FREE, pp=2))


def test_a_comparison_ends_with_the_planner_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = search_room(four(), Constraints(pp=1, dp=4, microbatches=1))
    cut = msgspec.structs.replace(made.plan, notes=(NOTE,))
    monkeypatch.setattr(choosing, "plan_by", lambda *_: BestPlan(cut, 0.0, 0.0, is_interrupted=True))
    first, second = choosing.compare_planners(four(), FREE, ["paraplan", "megatron"], 60.0, lambda _: None)
    assert first.plan is cut and second.plan is None and "interrupted" in second.why
