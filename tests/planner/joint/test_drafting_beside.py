"""What another process drafts is what this one would."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache

import msgspec
import pytest
import torch
from torch import nn

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import with_reserved
from paraplan.ir.errors import SolverLimitError
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.ir.process.workers import Workers
from paraplan.planner import search as search_module
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint import search_joint
from paraplan.planner.joint.combinations import Combination, combinations
from paraplan.planner.joint.drafting import Drafting
from paraplan.planner.joint.drafting_beside import PackedEstimate, _unasked, drafted_beside, received
from paraplan.planner.joint.estimate import Estimate
from paraplan.planner.joint.estimating import estimate_best
from paraplan.planner.joint.prices.pricing import Pricing, pricing_beside
from paraplan.planner.joint.prices.pricing_rounds import PricingRounds
from paraplan.planner.pipeline.draft import Draft
from paraplan.planner.pipeline.pipeline_search import Slower
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.schedules.full_rounds import programs_of
from paraplan.planner.search import search

PINS = Constraints(pp=4, mesh=(1,), microbatches=16)


@cache
def _job() -> Job:
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))
    program = capture(
        nn.Sequential(*blocks), {"input": torch.zeros(1024, 64)}, loss_fn=lambda out, _: out.square().mean()
    )
    return Job(program, parse_cluster("4xH100"), OPTIMIZERS["adamw"], ModelRef(display="blocks"), {})


def _pricing(job: Job | None = None, workers: Workers | None = None) -> Pricing:
    job = job or _job()
    budget = device_budget(job.cluster, PINS)
    return Pricing(job, msgspec.structs.replace(PINS, pp=None), budget, lambda _: None, Deadline(600.0), workers)


@contextmanager
def _workers(count: int) -> Iterator[Workers]:
    one = _pricing()
    workers = Workers(count, pricing_beside, one.job, one.constraints, one.budget, one.deadline)
    try:
        yield workers
    finally:
        workers.close()


def _listed() -> list[Combination]:
    return [each for each in combinations(_job(), msgspec.structs.replace(PINS, pp=None)) if each.pp > 1]


def _drafting(pricing: Pricing) -> Drafting:
    return Drafting(pricing, Shardings(_unasked), True, [])


def _told(plan: Plan) -> object:
    return plan.stages, plan.schedule, plan.prediction, plan.num_microbatches


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved", "gpipe"])
def test_what_is_received_is_what_is_drafted_here(schedule: str) -> None:
    """Through what passes between processes, with a job that is another object there."""
    pricing, there = _pricing(), _pricing(pickle.loads(pickle.dumps(_job())))
    listed = [each for each in _listed() if each.schedule == schedule and each.pp == 4]
    first = estimate_best(PricingRounds(pricing, listed), math.inf, [])[0]
    here = _drafting(pricing).drafted(first, math.inf)
    assert isinstance(here, Draft)
    whole = here.made()
    with_room = with_reserved(whole, programs_of(whole), pricing.budget)
    for within_s, told in ((math.inf, with_room), (here.step_s, whole)):  # the best known comes whole
        asked, reserves = pickle.loads(pickle.dumps((PackedEstimate.of(first, pricing), True)))
        answer = pickle.loads(pickle.dumps(drafted_beside(there, asked, within_s, reserves)))
        assert answer.sample.program is not _job().program and answer.is_whole >= math.isinf(within_s)
        found = received(answer, _drafting(pricing))
        assert isinstance(found, Draft)
        assert (found.step_s, found.peak_bytes) == (here.step_s, here.peak_bytes)
        assert _told(found.made()) == _told(told) and found.made().program is _job().program
    left = received(drafted_beside(there, asked, here.step_s / 2, True), _drafting(pricing))
    assert isinstance(left, Slower) and left.step_s > here.step_s / 2


def test_why_nothing_comes_of_an_estimate_passes() -> None:
    pricing = _pricing()
    first = estimate_best(PricingRounds(pricing, _listed()), math.inf, [])[0]
    tight = Pricing(pricing.job, pricing.constraints, 1 << 20, lambda _: None, pricing.deadline)
    answer = drafted_beside(tight, PackedEstimate.of(first, pricing), math.inf, True)
    assert answer.why and answer.sample is None
    with pytest.raises(SolverLimitError, match=r"1\.00 MiB"):
        received(answer, _drafting(pricing))


def test_estimates_of_other_processes_are_those_of_this_one() -> None:
    def numbers(found: list[Estimate]) -> list[object]:
        return [(each.combination, each.step_s, each.bounds, each.taken, each.is_recut) for each in found]

    alone = estimate_best(PricingRounds(_pricing(), _listed()), math.inf, [])
    with _workers(2) as workers:
        beside = estimate_best(PricingRounds(_pricing(workers=workers), _listed()), math.inf, [])
        assert workers.lost == workers.redone == 0
    assert numbers(alone) == numbers(beside) and len(alone) > 10


def test_prices_that_positions_of_several_sizes_share_pass_between_processes() -> None:
    job, free = replace(_job(), cluster=parse_cluster("8xH100")), Constraints()
    pricing = Pricing(job, free, device_budget(job.cluster, free), lambda _: None, Deadline(600.0))
    listed = [each for each in combinations(job, free) if each.pp > 1]
    workers = Workers(1, pricing_beside, job, free, pricing.budget, pricing.deadline)
    with closing(workers):
        pricing.workers = workers
        found = estimate_best(PricingRounds(pricing, listed), math.inf, [])
        assert workers.lost == workers.redone == 0
    sizes = {each.combination.pp: each.prices.sharding.decisions.mesh.size for each in found}
    assert any(job.cluster.num_devices // pp != size for pp, size in sizes.items()), "of another's positions"


def test_a_search_with_processes_beside_finds_no_slower_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = Constraints(microbatches=16, mesh=(1,))
    alone, told = search(_job(), pins).plan, list[str]()
    monkeypatch.setattr(search_joint, "LISTED", 0)
    monkeypatch.setattr(search_joint, "num_cores", lambda: 3)
    beside = search_module.search(_job(), pins, progress=told.append).plan
    assert any(text.startswith("beside: ") for text in told)
    assert beside.prediction is not None and alone.prediction is not None
    assert beside.prediction.step_s <= alone.prediction.step_s * (1 + 1e-9)
