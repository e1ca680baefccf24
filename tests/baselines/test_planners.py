"""Other planners' choices: what they try, in which order, and that their plans train as one device does."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

import paraplan
from examples.models.mlp import factory
from paraplan.baselines.planners import NAMES, PLANNERS, compare_planners, plan_by
from paraplan.baselines.planners.task import SAMPLES, Task
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.errors import ConstraintError, SolverLimitError
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from tests.captures import zoo_job


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "fsdp", "gpipe", "megatron", "megatron-grid"])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_what_is_tried_makes_sense(name: str, devices: int) -> None:
    job = zoo_job("llama", devices)
    tries = list(PLANNERS[name].tries(Task(job)))
    assert tries and len(set(map(str, tries))) == len(tries)
    for pins in tries:
        check_constraints(pins, devices)


def test_the_first_that_fits_is_taken() -> None:
    job = zoo_job("gpt2", 2)
    roomy = plan_by("ddp", job, Constraints(), 60.0).plan
    assert roomy.prediction is not None and roomy.num_microbatches == 1
    assert "chosen as ddp does" in roomy.notes[-1] and "1 of" in roomy.notes[-1]
    less = msgspec.structs.replace(Constraints(), memory_bytes=max(roomy.prediction.peak_bytes) - 1, reserve_bytes=0)
    tight = plan_by("ddp", job, less, 60.0).plan
    assert tight.prediction is not None and max(tight.prediction.peak_bytes) < max(roomy.prediction.peak_bytes)
    assert tight.num_microbatches > 1 or any(choice.activations for choice in tight.stages[0].choices)
    with pytest.raises(SolverLimitError, match=r"strategy 'ddp': none of \d+ tries fits"):
        plan_by("ddp", job, Constraints(memory_bytes=1000, reserve_bytes=0), 60.0)
    with pytest.raises(ConstraintError, match=r"strategy 'ddp', whose own .*: dp=2 times tp=2 is 4"):
        plan_by("ddp", job, Constraints(tp=2), 60.0)


def test_the_fastest_of_the_first_degrees_that_fit_is_taken() -> None:
    job = zoo_job("llama", 4)
    plan = plan_by("megatron", job, Constraints(), 60.0).plan
    assert plan.prediction is not None and plan.stages[0].mesh.axes == ("dp",)
    pins = [each for each in PLANNERS["megatron"].tries(Task(job)) if (each.tp, each.pp) == (1, 1)]
    steps = [plan_by("paraplan", job, each, 60.0).plan.prediction for each in pins]
    assert plan.prediction.step_s == min(each.step_s for each in steps if each is not None)


def test_what_the_user_pins_is_kept() -> None:
    job = zoo_job("gpt2", 2)
    plan = plan_by("zero2", job, Constraints(microbatches=2, reduce_dtype=""), 60.0).plan
    assert plan.num_microbatches == 2
    with pytest.raises(ConstraintError, match="'zero2' has no plan with what is pinned"):
        plan_by("zero2", job, Constraints(tp=2, pp=2), 60.0)
    with pytest.raises(ConstraintError, match=r"'fsdp' has no plan .*: zero=1 is pinned, and its plans have zero=3;"):
        plan_by("fsdp", job, Constraints(zero=1, dp=2), 60.0)
    with pytest.raises(ConstraintError, match="'megatorn' is unknown; there are megatron"):
        plan_by("megatorn", job, Constraints(), 60.0)


def test_ours_is_never_slower() -> None:
    job = zoo_job("mlp", 2)
    pins = Constraints(microbatches=2)
    found = {each.strategy: each for each in compare_planners(job, pins, NAMES, 15.0, lambda _: None)}
    assert set(found) == set(NAMES)
    steps = {name: each.plan.prediction.step_s for name, each in found.items() if each.plan and each.plan.prediction}
    assert len(steps) > 3 and all(steps["paraplan"] <= step_s * (1 + 1e-9) for step_s in steps.values())


@pytest.mark.parametrize("name", ["fsdp", "gpipe", "megatron"])
def test_their_plans_train_as_one_device_does(name: str) -> None:
    torch.manual_seed(0)
    model, batch = factory(batch=8)
    plan = paraplan.compile(model, "local:2", example_inputs=batch, precision="fp64", strategy=name)
    assert "largest error" in plan.check(model, [batch])


@pytest.mark.parametrize(("tokens", "unit"), [(4096, 1), (128, 1), (1, 128)])
def test_microbatches_of_samples_of_few_rows_are_larger(tokens: int, unit: int) -> None:
    model = nn.Linear(16, 16)
    batch = {"input": torch.zeros(8192, tokens, 16, device="meta")}
    program = capture(model.to("meta"), batch, loss_fn=lambda out, _: out.square().mean())
    task = Task(Job(program, parse_cluster("2xH100"), OPTIMIZERS["sgd"], ModelRef(display="linear"), {}))
    assert task.samples == tuple(unit * each for each in SAMPLES)
