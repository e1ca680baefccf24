"""A recorded run refines a profile: wrong times come back, right ones stay, nothing else changes."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import pytest

import paraplan as pp
from examples.models.mlp import factory
from paraplan.cost_models.costs import lowered_op
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.profiles.learn import learn, merged
from paraplan.cost_models.profiles.profile_file import ProfileWriter, read_profiles
from paraplan.ir.errors import ConstraintError, ProfileError
from paraplan.ir.profile import Measured, OpTime, Profile, RunTimes
from paraplan.jobs.measuring.profile_ops import this_machine
from paraplan.jobs.record import check_recordable, learn_into, read_run
from paraplan.jobs.run import run
from paraplan.jobs.run_options import RunOptions


def small(**options: object) -> pp.Plan:
    model, batch = factory()
    return pp.compile(model, "local:1", example_inputs=batch, microbatches=1, recompute="none", **options)


def timed(plan: pp.Plan, factor: float, samples: int, spread: float = 0.02) -> tuple[OpTime, ...]:
    """Every op of a plan at a time of its own times a factor."""
    blocks = [block for program in plan.programs for block in program.blocks.values()]
    found = {op.full_key: op for block in blocks for op in (lowered_op(block, i) for i in block.instrs) if op}
    return tuple(
        msgspec.structs.replace(op, seconds=factor * (1 + index) * 1e-4, samples=samples, spread=spread)
        for index, op in enumerate(found[key] for key in sorted(found))
    )


def test_wrong_times_come_back(tmp_path: Path) -> None:
    path, plan = tmp_path / "profile.db", small()
    true = msgspec.structs.replace(this_machine("cpu"), ops=timed(plan, 1.0, 9))
    actual_s = simulate_plan(msgspec.structs.replace(plan.data, profile=true), plan.programs).step_s
    with ProfileWriter(path, this_machine("cpu")) as writer:
        for op in timed(plan, 6.0, 25):
            writer.add(op)
    assert small(profile=path).prediction.step_s > 3 * actual_s
    noisy = tuple(
        msgspec.structs.replace(op, seconds=op.seconds * (0.99, 1.01)[i % 2]) for i, op in enumerate(true.ops)
    )
    found = learn_into(path, RunTimes(predicted_s=0.0, step_s=(1.0,), seen=msgspec.structs.replace(true, ops=noisy)))
    assert (found.new, found.pooled, found.corrected) == (0, 0, len(noisy))
    assert small(profile=path).prediction.step_s == pytest.approx(actual_s, rel=0.02)


def op(seconds: float, samples: int, spread: float = 0.0, rows: int = 4) -> OpTime:
    x = Measured("float32", (rows, 4))
    return OpTime(
        target="aten.relu.default", flag=0, inputs=(x,), outputs=(x,), seconds=seconds, samples=samples, spread=spread
    )


def test_times_that_agree_are_pooled_by_their_samples() -> None:
    found, how = merged(op(1.0, 30, 0.08), op(1.06, 10, 0.02))
    assert how == "pooled" and found.samples == 40 and found.spread == 0.08
    assert found.seconds == pytest.approx((30 * 1.0 + 10 * 1.06) / 40)


def test_a_run_is_believed_where_it_disagrees_and_the_distance_is_kept() -> None:
    found, how = merged(op(3.0, 30, 0.1), op(1.0, 10, 0.1))
    assert how == "corrected" and (found.seconds, found.samples) == (1.0, 10) and found.spread == pytest.approx(2.0)
    again, how = merged(found, op(1.2, 10, 0.1))
    assert how == "pooled" and again.seconds == pytest.approx(1.1)


def test_what_a_run_did_not_see_stays(tmp_path: Path) -> None:
    path = tmp_path / "profile.db"
    with ProfileWriter(path, this_machine("cpu")) as writer:
        writer.add(op(1.0, 5, rows=8))
    seen = msgspec.structs.replace(this_machine("cpu"), ops=(op(2.0, 3),))
    assert learn_into(path, RunTimes(predicted_s=0.0, step_s=(1.0,), seen=seen)).new == 1
    assert {each.inputs[0].shape[0]: each.seconds for each in read_profiles(path)[0].ops} == {8: 1.0, 4: 2.0}


def test_other_machines_and_files_are_refused(tmp_path: Path) -> None:
    run_of = RunTimes(predicted_s=0.0, step_s=(1.0,), seen=Profile(device="cpu", name="other", torch="0"))
    with pytest.raises(ProfileError, match="learn from runs of one machine"):
        learn(this_machine("cpu"), run_of)
    path = tmp_path / "run.json"
    with pytest.raises(ProfileError, match="run --record"):
        read_run(path)
    path.write_text('{"steps": []}')
    with pytest.raises(ProfileError, match="no recorded run"):
        read_run(path)
    with pytest.raises(ConstraintError, match="--compile"):
        check_recordable(small().data, compiled=True)


def test_a_run_writes_the_times_of_all_its_ops(tmp_path: Path) -> None:
    plan, path = small(), tmp_path / "run.json"
    result = run(
        plan.data,
        plan.programs,
        RunOptions(steps=2, record=str(path), model="examples.models.mlp:factory"),
        lambda step, loss, seconds: None,
    )
    found = read_run(path)
    assert {op.full_key for op in found.seen.ops} == {op.full_key for op in timed(plan, 1.0, 1)}
    assert all(op.samples >= 3 and op.seconds > 0 for op in found.seen.ops)
    assert result.step_s == statistics.median(found.step_s)
