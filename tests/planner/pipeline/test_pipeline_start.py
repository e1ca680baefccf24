"""A pipeline planned from what is known of it: the same, or better, or left for being slower."""

from __future__ import annotations

import math
from functools import cache, partial

import msgspec
import pytest
import torch
from torch import nn

from paraplan.capture import capture
from paraplan.cost_models.simulator.live_bytes import peak_bytes
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower, lower_alone
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.pipeline.draft import Draft
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.pipeline.pipeline_case import case_of, of_few_microbatches
from paraplan.planner.pipeline.pipeline_search import Slower, Start, search_from, search_pipeline
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.sharding.solve import choose
from tests.captures import zoo_job

PINS = Constraints(pp=2, mesh=(2,), microbatches=8, schedule="interleaved")
LIMITS = SolveLimits(time_s=60.0, memory_bytes=1 << 60, certify=False)


def _choose(job: Job, constraints: Constraints, kept: float | None, known: object) -> Decisions:
    mesh = candidate_meshes(job, constraints)[0]
    return choose(job, mesh, constraints.microbatches or 1, constraints, LIMITS, kept)


def _made(found: Draft | Slower) -> Plan:
    assert isinstance(found, Draft)
    plan = found.made()
    assert plan.prediction is not None and found.step_s == plan.prediction.step_s
    return plan


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def test_a_slower_pipeline_is_left_and_a_faster_one_is_not() -> None:
    job, shardings = zoo_job("gpt2", 4), Shardings(_choose)
    whole_s = _step_s(search_pipeline(job, PINS, shardings))
    case = case_of(job, PINS)
    first = shardings.get(case.part, case.inner)
    started = partial(search_from, job, PINS, shardings)
    assert _step_s(_made(started(Start(first)))) == whole_s
    assert _step_s(_made(started(Start(first, within_s=1.001 * whole_s)))) == whole_s
    left = started(Start(first, within_s=0.5 * whole_s))
    assert isinstance(left, Slower) and 0.5 * whole_s < left.step_s <= whole_s


def test_a_draft_says_what_its_plan_takes_at_least_and_holds() -> None:
    job, shardings = zoo_job("gpt2", 4), Shardings(_choose)
    pins = msgspec.structs.replace(PINS, schedule="1f1b")
    draft = search_from(job, pins, shardings, Start())
    assert isinstance(draft, Draft) and draft.plan is None and draft.sample.num_microbatches == 8
    least_s, peak = draft.step_s, draft.peak_bytes
    plan = draft.noted(("a note",), ()).made()
    assert plan.notes[-1] == "a note" and 0.8 * _step_s(plan) < least_s <= _step_s(plan)
    assert plan.prediction is not None and max(plan.prediction.peak_bytes) == peak


def test_first_microbatches_say_what_all_take_at_least() -> None:
    job, shardings = zoo_job("gpt2", 4), Shardings(_choose)
    pins = msgspec.structs.replace(PINS, schedule="1f1b")
    case = case_of(job, pins)
    few = of_few_microbatches(case)
    assert few is not None and few.num_run < case.num_run
    sharding = shardings.get(case.part, case.inner)
    whole = case.begun(sharding, ())
    assert 0.8 * whole.simulation.step_s < few.least_s(few.begun(sharding, ())) <= whole.simulation.step_s
    assert case.least_s(whole) == whole.simulation.step_s


@cache
def _many() -> Job:
    """Eight blocks on a batch of 48, on four processes."""
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))
    program = capture(
        nn.Sequential(*blocks), {"input": torch.zeros(48, 64)}, loss_fn=lambda out, _: out.square().mean()
    )
    return Job(program, ClusterSpec.local(4), OPTIMIZERS["adamw"], ModelRef(display="blocks"), {})


@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 12), ("1f1b", 48), ("interleaved", 48), ("zb-v", 24)])
def test_rounds_of_a_full_pipeline_say_what_all_microbatches_take(schedule: str, count: int) -> None:
    pins = msgspec.structs.replace(PINS, schedule=schedule, microbatches=count)
    draft = search_from(_many(), pins, Shardings(_choose), Start())
    assert isinstance(draft, Draft) and draft.plan is None
    least_s = draft.step_s
    assert 0.92 * _step_s(draft.made()) <= least_s <= 1.05 * _step_s(draft.made()), "rounds of two or of six"


def test_classes_lowered_alone_hold_what_they_hold_beside_others() -> None:
    job, shardings = zoo_job("gpt2", 4), Shardings(_choose)
    for schedule in ("1f1b", "interleaved", "zb-v"):
        plan = search_pipeline(job, msgspec.structs.replace(PINS, schedule=schedule), shardings)
        assert plan.prediction is not None
        classes = plan.schedule.classes
        for actions, peak in zip(classes, plan.prediction.peak_bytes, strict=True):
            (program,) = lower_alone(plan, [actions]).values()
            assert peak_bytes(program) == peak
        assert lower(plan) is lower(msgspec.structs.replace(plan, notes=("another",)))
        assert lower(plan) is not lower(msgspec.structs.replace(plan, bundle_bytes=plan.bundle_bytes + 1))


def test_recomputation_begun_with_is_kept_or_goes_on_until_it_fits() -> None:
    job, shardings = zoo_job("gpt2", 4), Shardings(_choose)
    roomy = search_pipeline(job, PINS, shardings)
    assert roomy.prediction is not None
    budget = int(0.9 * max(roomy.prediction.peak_bytes))
    pins = msgspec.structs.replace(PINS, memory_bytes=budget, reserve_bytes=0)
    case = case_of(job, pins)
    first = shardings.get(case.part, case.inner)
    most = tuple(len(first.options[segment.kind]) - 1 for segment in job.program.segments)
    plain = _made(search_from(job, pins, shardings, Start(first)))
    for taken in (most, tuple(min(1, each) for each in most)):
        found = _made(search_from(job, pins, shardings, Start(first, taken, math.inf)))
        assert found.prediction is not None
        assert max(found.prediction.peak_bytes) <= budget
        assert _step_s(found) <= 1.5 * _step_s(plain)
