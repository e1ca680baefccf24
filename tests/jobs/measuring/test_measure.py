"""Measuring: into a file, once, whatever interrupts it; on this machine's CPU, with no claim about time."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks.zoo import build
from paraplan.capture import capture
from paraplan.cost_models.communication.collectives import AxisLink, collective_time_s
from paraplan.cost_models.machine.link_fit import fit_link
from paraplan.cost_models.profiles.profile_file import read_profiles
from paraplan.ir.errors import ConstraintError, CostModelError
from paraplan.ir.model.program import Program
from paraplan.ir.profile import CollectiveTime, Measured, OpTime
from paraplan.ir.struct import to_json
from paraplan.jobs.measuring import measure_links, measure_ops, profile_ops
from paraplan.jobs.measuring.link_rank import LARGE_BYTES, LinkTimes, group_sizes, sizes
from paraplan.jobs.measuring.local_ops import LocalOp
from paraplan.jobs.measuring.measure_links import link_times
from paraplan.jobs.measuring.measure_ops import measure_op, measure_update
from paraplan.jobs.measuring.profile_ops import profile_program, this_machine


@pytest.fixture(scope="module")
def program() -> Program:
    small = build("gpt2", 0.1)
    return capture(small.model, small.batch)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_ops, "BUDGET_S", 0.0)
    monkeypatch.setattr(measure_ops, "SAMPLE_S", 0.0)


def test_a_model_is_measured_once_and_a_cut_run_goes_on(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.db"
    really, calls = profile_ops.measure_op, []

    def cut(op: LocalOp, device: str) -> OpTime:
        calls.append(op.full_key)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return really(op, device)

    monkeypatch.setattr(profile_ops, "measure_op", cut)
    with pytest.raises(KeyboardInterrupt):
        profile_program(program, path, ways=2)
    first = calls[:39]
    (kept,) = read_profiles(path)
    assert {op.full_key for op in kept.ops} >= set(first)
    done = profile_program(program, path, ways=2)
    assert not done.failed, done.failed
    assert not set(first) & set(calls[40:]), "what was kept is not measured again"
    assert len(calls) == len(set(calls)) + 1
    before = len(calls)
    again = profile_program(program, path, ways=2)
    assert (again.measured, len(calls)) == (0, before)
    assert again.known > 0
    assert all(op.seconds > 0 and op.samples >= 3 for op in again.profile.ops if op.inputs)
    targets = {op.target for op in again.profile.ops}
    assert {"paraplan.linear", "paraplan.attention_grad", "paraplan.dropout", "view", "update.adamw.fused"} <= targets


def test_each_kernel_of_a_device_is_measured(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails leaves the others; an op without a choice is measured once."""

    def measure(op: LocalOp, device: str) -> OpTime:
        if op.run_as == "efficient":
            raise RuntimeError("no kernel image is available")
        given = (op.inputs, op.outputs, op.detail)
        return OpTime(target=op.target, flag=op.flag, inputs=given[0], outputs=given[1], detail=given[2], seconds=1.0)

    monkeypatch.setattr(profile_ops, "kind_of", lambda device: ("cuda", 9))
    monkeypatch.setattr(profile_ops, "measure_op", measure)
    small = build("gpt2", 0.0)
    plain = capture(small.model, small.batch)
    done = profile_program(plain, tmp_path / "p.db", ways=1)
    assert set(done.failed) == {"paraplan.attention as efficient", "paraplan.attention_grad as efficient"}
    assert done.profile is not None
    details = [op.detail for op in done.profile.ops if op.target == "paraplan.attention"]
    assert details and all(each.endswith(" as triton") for each in details)
    assert not any(" as " in op.detail for op in done.profile.ops if op.target == "paraplan.linear")


def test_workspace_and_strides_are_the_op_s(program: Program) -> None:
    logits = Measured("float32", (4, 8, 16))
    loss = LocalOp(
        "paraplan.ce_sumexp", ("%0", "%1"), {}, (logits, Measured("float32", (4, 8))), (Measured("float32", (4, 8)),)
    )
    assert measure_op(loss, "cpu").workspace_bytes >= logits.nbytes
    turned = Measured("float32", (16, 8), (1, 16))
    copy = LocalOp("paraplan.reshape_copy", ("%0", (16, 8)), {}, (turned,), (Measured("float32", (16, 8)),))
    found = measure_op(copy, "cpu")
    assert (found.workspace_bytes, found.inputs) == (0, (turned,))
    assert measure_ops._tensor(turned, 1, "cpu", measure_ops.torch.Generator()).stride() == (1, 16)


def test_an_update_is_that_of_one_parameter() -> None:
    found = measure_update("sgd", measure_ops.torch.optim.SGD, {}, (64,), "cpu")
    assert (found.target, found.inputs) == ("update.sgd.fused", (Measured("float32", (64,)),))


def test_no_such_device() -> None:
    with pytest.raises(ConstraintError, match="--device 'tpu'"):
        this_machine("tpu")


def test_a_link_is_found_again_from_the_times_it_gives() -> None:
    def time_of(target: str, size: int, nbytes: int) -> CollectiveTime:
        link = AxisLink(size=size, latency_s=3e-5, bytes_per_s=2.5e9, local_size=size)
        return CollectiveTime(
            target=target,
            size=size,
            local_size=size,
            input_bytes=nbytes,
            seconds=collective_time_s(target, nbytes, link),
        )

    times = [
        time_of(target, size, nbytes)
        for target in ("all_reduce", "all_gather", "permute")
        for size in (2, 4)
        for nbytes in sizes(1 << 24)
    ]
    fit = fit_link(times, "cpu")
    assert fit.bytes_per_s == pytest.approx(2.5e9, rel=0.02)
    assert fit.latency_s == pytest.approx(3e-5, rel=0.02)
    assert fit.worst_error < 0.03
    with pytest.raises(CostModelError, match="at least 2 ranks"):
        fit_link([], "cpu")


def test_sizes_and_groups() -> None:
    assert sizes(1 << 26)[-1] == 1 << 26
    steps = [(a, b // a) for a, b in itertools.pairwise(sizes(1 << 26))]
    assert all(step == (2 if a >= LARGE_BYTES else 4) for a, step in steps)
    assert [group_sizes(world) for world in (1, 2, 4, 6, 8)] == [(), (2,), (2, 4), (2, 6), (2, 4, 8)]


def test_links_take_the_median_of_jobs_that_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """One job in which a collective was unlucky says nothing; how far jobs lie apart is spread."""
    asked: list[str] = []

    def job(_: int, __: str, args: tuple[str, ...]) -> int:
        asked.append(args[1])
        took = 9.0 if len(asked) == 3 else 1.0 + len(asked) / 100
        times = (
            CollectiveTime(
                target="all_reduce",
                size=2,
                local_size=2,
                input_bytes=int(args[1]),
                seconds=took,
                called_s=took / 4,
                samples=5,
            ),
        )
        Path(args[0]).write_bytes(to_json(LinkTimes(times=times, device_share=0.5 if took < 9 else 0.9)))
        return 0

    monkeypatch.setattr(measure_links, "spawn_local", job)
    small, large = link_times(2, 64, 128)
    assert asked == ["64", "128"] * measure_links.JOBS
    assert (small.times[0].seconds, small.times[0].called_s) == (pytest.approx(1.07), pytest.approx(1.07 / 4))
    assert small.times[0].spread == pytest.approx((9.0 - 1.01) / 1.07)
    assert (small.times[0].samples, small.device_share) == (25, 0.5)
    assert large.times[0].seconds == pytest.approx(1.06)
