"""Pipelines with pinned stages: the even cut against brute force, and what cannot be divided is said."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.errors import ConstraintError, InfeasibleError
from paraplan.ir.verify import verify_plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.pipeline_search import even_stages, segment_seconds
from paraplan.planner.search import search
from tests.runtime.pipelines import job_of, run
from tests.runtime.test_pipelines import batch, one_stage, program, web


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_slowest_stage_is_as_fast_as_any_cut_makes_it(num_stages: int) -> None:
    one = one_stage()
    seconds = segment_seconds(one)
    assert min(seconds) > 0

    def slowest(inner: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *inner, len(seconds))))

    found = even_stages(one, num_stages)
    assert [first for first, _ in found[1:]] == [stop for _, stop in found[:-1]]
    best = min(map(slowest, itertools.combinations(range(1, len(seconds)), num_stages - 1)))
    assert slowest(tuple(first for first, _ in found[1:])) == pytest.approx(best)


def test_a_pinned_pipeline_is_planned_and_runs() -> None:
    n = len(program().segments)
    pins = Constraints(pp=2, tp=2, schedule="zb-h1", stages=((0, 2), (2, n)), microbatches=4)
    plan = search(job_of(program(), 4), pins).plan
    assert [(stage.first, stage.stop, stage.mesh.devices) for stage in plan.stages] == [(0, 2, (0, 1)), (2, n, (2, 3))]
    assert plan.prediction is not None
    assert plan.prediction.step_s == simulate_plan(plan, verify_plan(plan)).step_s
    assert plan.certificate is not None
    assert 0 < plan.certificate.bound_s <= plan.prediction.step_s
    assert run(plan, web().double(), batch()) <= 1e-9


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"pp": 3}, "pp=3 does not divide the cluster's 4 devices"),
        ({"schedule": "1f1b"}, "schedule=1f1b without a pipeline"),
        ({"pp": 4, "schedule": "hanayo", "stages": tuple((i, i + 1) for i in range(16))}, "more than the model's"),
        ({"pp": 4, "stages": ((0, 1), (1, 2))}, "2 stages cannot lie on pp=4"),
        ({"pp": 2, "stages": ((0, 2), (3, 4))}, "stage 1 is 3:4; it starts at 2"),
        ({"pp": 2, "stages": ((0, 1), (1, 2))}, "stages end at segment 2"),
        ({"pp": 2, "schedule": "chimera", "microbatches": 1}, "1 microbatches; half of them go each way"),
        ({"pp": 2, "schedule": "nothing"}, "no schedule 'nothing'"),
        ({"pp": 2, "schedule": "interleaved", "microbatches": 1}, "1 microbatch"),
        ({"pp": 2, "microbatches": 3}, "does not divide into 3 microbatches"),
    ],
)
def test_what_cannot_be_divided_is_said(pins: dict[str, object], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        search(job_of(program(), 4), msgspec.convert(pins, Constraints))


def test_a_pipeline_that_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(InfeasibleError, match=r"recompute=none: .* recompute=full: rank class \d peaks at"):
        search(job_of(program(), 2), Constraints(pp=2, microbatches=2, memory_bytes=1000))
