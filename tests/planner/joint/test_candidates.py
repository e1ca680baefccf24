"""What a candidate of a free search says does not end the search."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.capture import capture
from paraplan.ir.errors import InvalidPlanError, MixedSamples, ParaplanError
from paraplan.ir.model.program import Program
from paraplan.planner.certificate import certified_alike
from paraplan.planner.constraints import Constraints
from paraplan.planner.joint import drafting, search_joint
from paraplan.planner.joint.bounding.space_bound import SpaceBound
from paraplan.planner.joint.prices import sharding_front
from paraplan.planner.search import find, search
from paraplan.rules.time_axis import program_micro
from tests.captures import zoo_job
from tests.runtime.pipelines import job_of

FAULTS: tuple[ParaplanError, ...] = (InvalidPlanError("a candidate's"), MixedSamples("a candidate's", "an op"))


class OverRows(nn.Module):
    """A loop whose steps are the rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.step = nn.Linear(8, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        rows, h, outs = self.wide(x), x.new_zeros(24), []
        for row in range(rows.shape[0]):
            h = torch.tanh(F.linear(h, self.step.weight, self.step.bias) + rows[row])
            outs.append(h)
        return torch.stack(outs).pow(2).mean()


def over_rows() -> Program:
    return capture(OverRows(), {"x": torch.randn(16, 8)}, precision="fp32")


def test_a_batch_that_cannot_be_split_has_a_free_plan_and_a_bound() -> None:
    program = over_rows()
    with pytest.raises(MixedSamples):
        program_micro(program, 2)
    assert 1 < len(program.segments) < 4  # a pipeline's positions have several devices each
    free = search(job_of(program, 4), Constraints())
    assert free.step_s <= search(job_of(program, 4), Constraints(pp=1)).step_s
    assert free.plan.certificate is not None and free.plan.certificate.bound_s > 0


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_plan_that_fails_leaves_the_others(fault: ParaplanError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the first to be planned as a pipeline is."""
    asked = []
    made = drafting.search_from

    def failing(*args: object) -> object:
        asked.append(args)
        if len(asked) == 1:
            raise fault
        return made(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(drafting, "search_from", failing)
    plan = search(zoo_job("gpt2", 2), Constraints(microbatches=2)).plan
    assert asked and any(each.why == str(fault) for each in plan.tried)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_prices_and_a_bound_that_fail_leave_what_was_planned(
    fault: ParaplanError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> object:
        raise fault

    monkeypatch.setattr(search_joint, "num_cores", lambda: 1)  # where nothing fails beside
    monkeypatch.setattr(sharding_front, "front", failing)
    monkeypatch.setattr(SpaceBound, "_undivided", failing)
    plan = search(zoo_job("gpt2", 2), Constraints(microbatches=2)).plan
    assert plan.certificate is not None and "combinations" not in plan.certificate.bound_scope


def test_a_plan_of_which_nothing_is_proved_has_the_bound_of_another_on_its_mesh() -> None:
    """Data parallelism is planned first, without one, and the solver finds nothing better."""
    job = job_of(over_rows(), 2)
    best, proved = find(job, Constraints(dp=2, pp=1), certify=False).plan, find(job, Constraints(pp=1)).plan
    assert best.certificate is not None and proved.certificate is not None and best.prediction is not None
    assert (best.certificate.status, best.certificate.bound_s) == ("feasible", 0.0)
    found = certified_alike(best, [proved]).certificate
    assert found is not None and 0 < found.bound_s == proved.certificate.bound_s <= best.prediction.step_s
    assert found.gap == pytest.approx(1 - found.bound_s / best.prediction.step_s)
    elsewhere = msgspec.structs.replace(proved, num_microbatches=2)
    assert certified_alike(best, [elsewhere]) == best
