"""Every plan goes through one list of passes, in its order, until the deadline."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paraplan.baselines.planners import plan_by
from paraplan.cost_models.realised_plan import Realised, realised
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.passes import quickened as module
from paraplan.planner.passes.pass_context import PassContext
from paraplan.planner.passes.quickened import PASSES, quickened
from paraplan.planner.search import find, find_mixed
from tests.planner.joint.chains import chained, cluster, group
from tests.planner.joint.chains import job as chain_job

PINS = Constraints(microbatches=4)


def four() -> Job:
    return chain_job(cluster(group(1.0, devices=4)), chained())


PLANNED: dict[str, Callable[[], BestPlan]] = {
    "one stage": lambda: find(four(), Constraints(pp=1, dp=4)),
    "a pipeline": lambda: find(four(), Constraints(pp=2, microbatches=4)),
    "groups that differ": lambda: find_mixed(chain_job(cluster(group(2.0), group(1.0)), chained()), PINS),
    "another planner's answer": lambda: plan_by("ddp", four(), PINS, 60.0),
}


@pytest.mark.parametrize("what", PLANNED)
def test_a_pass_of_the_list_sees_every_plan(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Realised]()

    def looking(made: Realised, context: PassContext) -> Realised:
        assert context.fits(made, made)
        seen.append(made)
        return made

    monkeypatch.setattr(module, "PASSES", (*PASSES, looking))
    plan = PLANNED[what]().plan
    assert any(each.plan.stages == plan.stages for each in seen)


def test_passes_follow_each_other_until_the_deadline() -> None:
    plan = PLANNED["one stage"]().plan
    made, told = realised(plan), list[str]()

    def named(name: str) -> Callable[[Realised, PassContext], Realised]:
        return lambda made, _: (told.append(name), made)[1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "PASSES", tuple(map(named, "abc")))
        assert quickened(made, PassContext(made.peak_bytes, PINS, deadline=Deadline(60.0))) is made
        assert told == ["a", "b", "c"]
        assert quickened(made, PassContext(made.peak_bytes, PINS, deadline=Deadline(0.0))) is made
        assert len(told) == 3
