"""Plans that hardly fit, with the states of a few parameters off the device."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.machine.tier_placement import HERE
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import check_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.fits import search_room
from paraplan.planner.one_stage.few_away import with_few_away
from paraplan.planner.one_stage.roomier import needed_bytes, with_room

PINS = Constraints(dp=2, zero=1, recompute="none", microbatches=1)
FREE = msgspec.structs.replace(PINS, offload="host")
MIB, LAYERS = 1 << 20, 8


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


@cache
def job() -> Job:
    with torch.device("meta"):
        program = capture(Deep(), {"x": torch.randn(64, 512)})
    return Job(program, parse_cluster("2xH100"), OPTIMIZERS["adamw"], ModelRef(display="deep"), {})


@cache
def roomy() -> Plan:
    """With nothing off the device, and memory for all."""
    return search_room(job(), PINS, 20.0).plan


def away(plan: Plan) -> list[str]:
    return [name for stage in plan.stages for name, layouts in stage.params.items() if layouts.place != HERE]


def step_s_of(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


@pytest.mark.parametrize("missing_bytes", [1, MIB, 2 * MIB, 4 * MIB])
def test_as_few_states_leave_the_device_as_make_room(missing_bytes: int) -> None:
    plan = roomy()
    budget = needed_bytes(plan) - missing_bytes
    (found,) = with_few_away(plan, FREE, budget, Deadline(20.0), needed_bytes)
    assert needed_bytes(found) <= budget and 0 < len(away(found)) < len(plan.stages[0].params)
    assert simulate_plan(found, lower(found)).step_s == pytest.approx(step_s_of(found))
    assert step_s_of(found) >= step_s_of(plan) * (1 - 1e-9)
    check_plan(found)
    assert found.certificate is not None and found.certificate.bound_s <= step_s_of(found)


def test_the_less_is_missing_the_fewer_are_moved_and_the_faster_is_the_step() -> None:
    plan = roomy()
    found = [
        with_few_away(plan, FREE, needed_bytes(plan) - missing, Deadline(20.0), needed_bytes)[0]
        for missing in (MIB, 4 * MIB)
    ]
    assert len(away(found[0])) < len(away(found[1])) and step_s_of(found[0]) < step_s_of(found[1])


def test_nothing_is_moved_that_may_not_be_or_would_not_do() -> None:
    plan, deadline = roomy(), Deadline(20.0)
    budget = needed_bytes(plan) - MIB
    assert not with_few_away(plan, PINS, budget, deadline, needed_bytes)  # states are to stay
    pinned = msgspec.structs.replace(FREE, params={name: at.text for name, at in plan.stages[0].params.items()})
    assert not with_few_away(plan, pinned, budget, deadline, needed_bytes)
    assert not with_few_away(plan, FREE, MIB, deadline, needed_bytes)


def test_a_plan_is_given_room_so_before_more_is_made_again() -> None:
    plan, said = roomy(), list[str]()
    budget = needed_bytes(plan) - MIB
    made = with_room(job(), FREE, plan, budget, Deadline(20.0), said.append)
    assert [len(away(each)) > 0 for each in made] == [True] and not said
    assert all(needed_bytes(each) <= budget for each in made)
