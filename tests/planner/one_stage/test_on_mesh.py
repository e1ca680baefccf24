"""Numbers of microbatches that are tried on a mesh once the time is over."""

from __future__ import annotations

import math

import pytest

from paraplan.ir.errors import SolverLimitError
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline, SolveLimits
from paraplan.planner.one_stage import on_mesh
from paraplan.planner.one_stage.failures import Failure
from paraplan.planner.pipeline.meshes import candidate_meshes
from tests.captures import zoo_job


@pytest.mark.parametrize("is_long", [False, True])
def test_a_last_try_after_the_limit_is_no_long_one(is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was found the most microbatches are tried all the same, unless to lower them takes a minute."""
    job, pins, tried = zoo_job("gpt2", 1), Constraints(), list[int]()
    (mesh, *_) = candidate_meshes(job, pins)
    most = 64

    def solved(job: object, mesh: object, count: int, *rest: object) -> list[object]:
        tried.append(count)
        return []

    monkeypatch.setattr(on_mesh, "_solve", solved)
    monkeypatch.setattr(on_mesh, "other_counts", lambda *_: (16, 32, most))
    monkeypatch.setattr(on_mesh, "MOST_CALLS", most * len(job.program.segments) - is_long)
    failures = [Failure(SolverLimitError("the usual ones do not fit"), mesh, 1)]
    limits = SolveLimits(time_s=0.0, memory_bytes=1.0, certify=False)
    on_mesh.with_other_counts(job, mesh, pins, limits, failures, lambda _: None, Deadline(600.0))
    assert tried == ([] if is_long else [most])
    assert any(each.late and each.num_microbatches == most for each in failures) == is_long


@pytest.mark.parametrize(("known_s", "counts"), [(math.inf, [1, 4]), (1.0, [1])])
def test_where_a_plan_is_known_none_has_to_be_found(
    known_s: float, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the limit the most microbatches, which hold least, are tried where there is nothing else."""
    job, pins, tried = zoo_job("gpt2", 1), Constraints(), list[int]()
    (mesh, *_) = candidate_meshes(job, pins)

    def solved(job: object, mesh: object, count: int, *rest: object) -> list[object]:
        tried.append(count)
        failures.append(Failure(SolverLimitError("no room"), mesh, count))  # type: ignore[arg-type]
        return []

    monkeypatch.setattr(on_mesh, "_solve", solved)
    monkeypatch.setattr(on_mesh, "usual_counts", lambda *_: (1, 2, 4))
    failures = list[Failure]()
    limits = SolveLimits(time_s=0.0, memory_bytes=1.0, certify=False, known_s=known_s)
    assert on_mesh.plans_on_mesh(job, mesh, pins, limits, failures, lambda _: None, math.inf) == []
    assert tried == counts and {each.num_microbatches for each in failures if each.late} == {1, 2, 4} - {*counts}


def test_nothing_is_tried_long_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a mesh may take by itself: other meshes came before."""
    job, pins = zoo_job("gpt2", 1), Constraints()
    (mesh, *_) = candidate_meshes(job, pins)
    monkeypatch.setattr(on_mesh, "_solve", lambda *_: pytest.fail("it was tried"))
    monkeypatch.setattr(on_mesh, "other_counts", lambda *_: (16, 32))
    failures = [Failure(SolverLimitError("the usual ones do not fit"), mesh, 1)]
    limits = SolveLimits(time_s=600.0, memory_bytes=1.0, certify=False)
    assert on_mesh.with_other_counts(job, mesh, pins, limits, failures, lambda _: None, Deadline(0.0)) == []
    assert [each.num_microbatches for each in failures if each.late] == [32, 16]
