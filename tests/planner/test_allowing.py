"""What may leave the device and need not never makes a search's plan slower."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from examples.models.mlp import factory
from paraplan.capture import capture
from paraplan.ir.errors import InfeasibleError, SolverLimitError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import Certificate, ModelRef
from paraplan.planner.allowing import KEPT_SHARE, allowing
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan, Progress
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import find

PROVED = Certificate(status="optimal", objective_s=0.5, bound_s=0.5, bound_scope="all", gap=0.0)


def _job() -> Job:
    model, batch = factory()
    program = capture(model, batch)
    return Job(program, ClusterSpec.local(2), OPTIMIZERS["sgd"], ModelRef(display="mlp"), {})


class _Said:
    """A search that finds plans of given steps: of those that keep everything, and of all; None for nothing."""

    def __init__(self, kept_s: float | None, all_s: float | None) -> None:
        self.job, self.steps = _job(), {True: kept_s, False: all_s}
        self.plan = find(self.job, Constraints(), certify=False).plan
        self.asked: list[tuple[Constraints, float]] = []

    def __call__(
        self,
        job: Job,
        constraints: Constraints,
        time_limit_s: float,
        progress: Progress,
        certify: bool,
        known: Sequence[BestPlan] = (),
    ) -> BestPlan:
        self.asked.append((constraints, time_limit_s))
        before = [self.steps[True]] if len(self.asked) == 2 and self.steps[True] else []
        assert [each.step_s for each in known] == before
        step_s = self.steps[not constraints.tiers]
        if step_s is None:
            raise SolverLimitError("nothing")
        assert self.plan.prediction is not None
        prediction = msgspec.structs.replace(self.plan.prediction, step_s=step_s)
        certificate = msgspec.structs.replace(PROVED, bound_s=min(0.5, step_s)) if certify else None
        plan = msgspec.structs.replace(self.plan, prediction=prediction, certificate=certificate, notes=())
        return BestPlan(plan, 0.0, 0.0)

    def found(self, constraints: Constraints, room: float = 1.0) -> BestPlan:
        return allowing(self, lambda *_: room, self.job, constraints, 30.0, lambda _: None, True)


@pytest.mark.parametrize(("kept_s", "all_s"), [(1.0, 2.0), (2.0, 1.0), (None, 1.0), (1.0, None)])
def test_the_faster_is_given(kept_s: float | None, all_s: float | None) -> None:
    search = _Said(kept_s, all_s)
    found = search.found(Constraints(offload="host"))
    assert found.step_s == 1.0
    assert [bool(each.tiers) for each, _ in search.asked] == [False, True]
    assert search.asked[0][1] == KEPT_SHARE * 30.0 and search.asked[1][1] <= 30.0
    if kept_s == 1.0 and all_s is not None:
        assert found.plan.certificate is not None and found.plan.certificate.status == "feasible"
        assert found.plan.certificate.bound_s == 0.5 and found.plan.certificate.gap == 0.5
        assert "nothing leaves the device" in found.plan.notes[0]


def test_what_cannot_fit_is_not_searched() -> None:
    search = _Said(1.0, 2.0)
    assert search.found(Constraints(offload="host"), room=0.0).step_s == 2.0
    assert [bool(each.tiers) for each, _ in search.asked] == [True]


def test_what_hardly_fits_is_searched_for_as_long() -> None:
    search = _Said(1.0, 2.0)
    assert search.found(Constraints(offload="host"), room=0.3).step_s == 1.0
    assert search.asked[0][1] == pytest.approx(0.3 * KEPT_SHARE * 30.0)


def test_nothing_is_searched_twice_that_has_to_leave_or_cannot() -> None:
    for pins in (Constraints(), Constraints(offload="host", place_states="host")):
        search = _Said(1.0, 1.0)
        search.found(pins)
        assert [each for each, _ in search.asked] == [pins]


def test_what_all_plans_fail_by_is_said() -> None:
    search = _Said(None, None)
    with pytest.raises((InfeasibleError, SolverLimitError), match="nothing"):
        search.found(Constraints(offload="host"))
