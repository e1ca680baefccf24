"""Pipelines over Gloo: equal to the in-process transport, entries and peaks as predicted, checkpoints across plans."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paraplan.api import Plan
from paraplan.cost_models.predict import predict
from paraplan.lowering import lower
from paraplan.runtime.transport.launch import spawn_local
from tests.runtime.pipelines import cut, pipeline_of
from tests.runtime.web import one_stage, stages_of

WORKER = str(Path(__file__).with_name("pipeline_worker.py"))


@pytest.mark.parametrize(
    ("size", "schedules"), [(1, ("chimera", "1f1b", "zb-v")), (2, ("interleaved", "zb-h1", "gems"))]
)
def test_processes_train_as_one(tmp_path: Path, size: int, schedules: tuple[str, ...]) -> None:
    paths = []
    for schedule in schedules:
        one = one_stage(size, 4 if size == 1 else 2)
        stages = cut(len(one.program.segments), stages_of(schedule, 2))
        plan = pipeline_of(one, schedule, 2, stages)
        programs = lower(plan)
        paths.append(tmp_path / f"{schedule}.json")
        Plan(msgspec.structs.replace(plan, prediction=predict(plan, programs)), programs).save(paths[-1])
    assert spawn_local(2 * size, WORKER, [str(tmp_path), *map(str, paths)]) == 0
    assert {path.name for path in tmp_path.glob("done*")} == {f"done{rank}" for rank in range(2 * size)}
