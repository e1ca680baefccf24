"""Plans known before a search: it finds faster ones, or gives them back, and ends with its time."""

from __future__ import annotations

import msgspec
import pytest

from paraplan.ir.errors import SolverLimitError
from paraplan.ir.plan import Plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.pipeline.draft import Draft
from paraplan.planner.search import find
from tests.planner.joint.chains import chained, cluster, group, job


def _quicker(plan: Plan, times: float) -> Plan:
    assert plan.prediction is not None
    step_s = plan.prediction.step_s / times
    return msgspec.structs.replace(plan, prediction=msgspec.structs.replace(plan.prediction, step_s=step_s))


def test_a_known_plan_is_given_back_where_none_is_faster() -> None:
    four, pins = job(cluster(group(1.0, devices=4)), chained()), Constraints(microbatches=4)
    plan = find(four, pins).plan
    known = find(four, pins, known=[Draft.of(_quicker(plan, 10.0))])
    assert known.step_s == pytest.approx(find(four, pins).step_s / 10) and any(
        "known before" in note for note in known.plan.notes
    )
    assert find(four, pins, known=[Draft.of(_quicker(plan, 0.1))]).step_s == pytest.approx(find(four, pins).step_s)


def test_one_stage_is_not_made_where_it_cannot_be_faster() -> None:
    four, pins = job(cluster(group(1.0, devices=4)), chained()), Constraints(pp=1, microbatches=4)
    plan = find(four, pins).plan
    with pytest.raises(SolverLimitError, match=r"s before passes, where .* s are known"):
        find(four, pins, certify=False, known=[Draft.of(_quicker(plan, 10.0))])
    certified = find(four, pins, known=[Draft.of(_quicker(plan, 10.0))]).plan
    assert certified.certificate is not None and certified.certificate.bound_s > 0, "what is proved is of all plans"


def test_slower_plans_of_one_stage_stay_beside_the_best() -> None:
    four = job(cluster(group(1.0, devices=4)), chained())
    found = find(four, Constraints(pp=1))
    assert found.others and all(each.step_s >= found.step_s * (1 - 1e-9) for each in found.others)
    made = found.others[0].made()
    assert made.prediction is not None and made.prediction.step_s <= found.others[0].step_s * (1 + 1e-9)
    assert made.certificate is not None and made.certificate.bound_s == 0.0
