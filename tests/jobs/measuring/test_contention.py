"""Companions run what they are given while it is measured; links that take some of a device hold its compute."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from benchmarks.sleeping import step_by_threads
from paraplan.cost_models.costs import Costs
from paraplan.cost_models.predict import predict, simulate_plan
from paraplan.cost_models.profiles.profile_file import ProfileWriter, choose_profile, read_profiles
from paraplan.ir.errors import ClusterError, ProfileError, RuntimeFailure
from paraplan.ir.machine.cluster import ClusterSpec, check_cluster
from paraplan.ir.machine.mesh import make_mesh
from paraplan.ir.profile import CollectiveTime, Measured, OpTime, Profile
from paraplan.jobs.measuring.contention import companions, crowding
from paraplan.jobs.measuring.profile_ops import Book, this_machine
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from tests.conftest import Tiny


def test_companions_run_until_it_is_measured(tmp_path: Path) -> None:
    def calls() -> int:
        return len(list(tmp_path.iterdir()))

    with companions(1, 1) as others:
        with others.running(partial(int, "no number")):
            pass
        with others.running(partial(partial, tempfile.mkdtemp, dir=str(tmp_path))):
            deadline = time.monotonic() + 20
            while calls() < 4 and time.monotonic() < deadline:
                time.sleep(0.002)
        seen = calls()
        time.sleep(0.05)
        assert seen >= 4
        assert calls() == seen, "nothing runs when nothing is measured"
    assert crowding(10**6) > 1 == crowding(1)


def test_a_companion_that_dies_is_told(tmp_path: Path) -> None:
    died = pytest.raises(RuntimeFailure, match="beside this one")
    with companions(1, 1) as others, died, others.running(partial(os._exit, 3)):
        pass


def op(seconds: float, samples: int) -> OpTime:
    x = Measured("float32", (4,))
    return OpTime(target="aten.relu.default", flag=0, inputs=(x,), outputs=(x,), seconds=seconds, samples=samples)


def test_measured_again_is_pooled_and_machines_are_told_apart(tmp_path: Path) -> None:
    path, two = tmp_path / "p.db", this_machine("cpu", processes=2)
    with ProfileWriter(path, this_machine("cpu")) as writer:
        writer.add(op(1.0, 5))
    with ProfileWriter(path, two) as writer:
        book = Book(writer, {}, again=False)
        book.enter(op(2.0, 10))
        book = Book(writer, {each.full_key: each for each in writer.profile().ops}, again=True)
        assert book.lacks(op(0.0, 1).full_key)
        book.enter(op(3.0, 10))
        assert not book.lacks(op(0.0, 1).full_key)
        writer.add(CollectiveTime(target="all_reduce", size=2, local_size=2, input_bytes=64, seconds=1.0))
    found = read_profiles(path)
    torch, name = two.torch, two.name
    chosen, warning = choose_profile(found, "cpu", name, torch, processes=2)
    assert ([each.seconds for each in chosen.ops], chosen.ops[0].samples, warning) == ([2.5], 20, "")
    assert chosen.ops[0].spread == pytest.approx(0.4), "how far measurements lie apart is spread"
    alone, warning = choose_profile(found, "cpu", name, torch, processes=1)
    assert ([each.seconds for each in alone.ops], warning) == ([1.0], "")
    assert len(alone.collectives) == 1, "links are measured between ranks, whoever measured the ops"
    _, warning = choose_profile(found, "cpu", name, torch, processes=4)
    assert "this plan has 4: paraplan profile --processes 4" in warning


def test_a_profile_of_an_earlier_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    with ProfileWriter(path, this_machine("cpu")) as writer:
        writer._db.execute("PRAGMA user_version = 1")
    with pytest.raises(ProfileError, match="version 1, of an earlier paraplan"):
        read_profiles(path)


def taking(share: float, count: int) -> ClusterSpec:
    local = ClusterSpec.local(count)
    link = msgspec.structs.replace(local.groups[0].in_node, device_share=share)
    return check_cluster(
        msgspec.structs.replace(local, groups=(msgspec.structs.replace(local.groups[0], in_node=link),))
    )


def job_of(tiny: Tiny, share: float) -> Job:
    return replace(tiny.job(2), cluster=taking(share, 2))


@pytest.mark.parametrize("seed", [3, 4])
def test_what_collectives_take_of_compute_is_simulated_as_it_runs(tiny_gpt2: Tiny, seed: int) -> None:
    plan = random_plan(job_of(tiny_gpt2, 0.5), seed, max_microbatches=2)
    programs = verify_plan(plan)
    simulation = simulate_plan(plan, programs)
    assert step_by_threads(plan, programs, simulation) == pytest.approx(simulation.step_s, rel=1e-9)
    free = msgspec.structs.replace(plan, cluster=taking(0.0, 2))
    without = predict(free, programs)
    comm = sum(simulation.comm_s.values())
    assert simulation.compute_s == pytest.approx(simulate_plan(free, programs).compute_s + 0.5 * comm)
    assert without.step_s <= simulation.step_s <= without.step_s + 0.5 * comm + 1e-12


def test_the_planner_pays_for_it(tiny_gpt2: Tiny) -> None:
    """A device that collectives take whole has nothing to hide behind: no plan is shorter than its work."""
    pins = Constraints(pp=1, microbatches=1)
    plan = search(job_of(tiny_gpt2, 1.0), pins).plan
    simulation = simulate_plan(plan, verify_plan(plan))
    assert plan.certificate is not None
    assert plan.certificate.bound_s <= simulation.step_s + 1e-12
    assert simulation.step_s + 1e-12 >= simulation.compute_s >= sum(simulation.comm_s.values())
    free = search(job_of(tiny_gpt2, 0.0), pins).plan
    moved = msgspec.structs.replace(free, cluster=taking(1.0, 2))
    assert simulation.step_s <= simulate_plan(moved, verify_plan(moved)).step_s + 1e-12


def calling(job: Job, called: float) -> Job:
    """Collectives of a millisecond, of which the call is so much."""
    times = tuple(
        CollectiveTime(target=target, size=2, local_size=2, input_bytes=nbytes, seconds=1e-3, called_s=called)
        for target in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
        for nbytes in (64, 1 << 20)
    )
    return replace(job, profile=Profile(device="cpu", name="made up", torch="2.13.0", collectives=times))


@pytest.mark.parametrize("seed", [3, 4])
def test_what_a_call_does_itself_holds_compute_whole(tiny_gpt2: Tiny, seed: int) -> None:
    plan = random_plan(calling(job_of(tiny_gpt2, 0.5), 4e-4), seed, max_microbatches=2)
    programs = verify_plan(plan)
    simulation = simulate_plan(plan, programs)
    assert step_by_threads(plan, programs, simulation) == pytest.approx(simulation.step_s, rel=1e-9)
    free = msgspec.structs.replace(plan, profile=calling(job_of(tiny_gpt2, 0.0), 0.0).profile, cluster=taking(0.0, 2))
    comm = sum(simulation.comm_s.values())
    assert comm > 0
    assert simulation.compute_s == pytest.approx(simulate_plan(free, programs).compute_s + (0.4 + 0.5 * 0.6) * comm)


def test_a_tensor_of_a_bundle_adds_at_least_its_share() -> None:
    times = tuple(
        CollectiveTime(target="all_gather", size=2, local_size=2, input_bytes=size, seconds=seconds, called_s=called)
        for size, seconds, called in ((64, 1e-3, 1e-4), (4096, 2e-3, 5e-4), (65536, 9e-3, 5e-3))
    )
    profile = Profile(device="cpu", name="made up", torch="2.13.0", collectives=times)
    costs = Costs(taking(0.25, 2), make_mesh((2,), ("x",)), profile)
    assert costs.moves.taken_s("all_gather", 0, 4096) == pytest.approx(5e-4 + 0.25 * 1.5e-3)
    for size in (64, 300, 4096, 20000, 65536, 1 << 20):
        for parts in (1, 3, 7):
            shares = parts * costs.moves.taken_share_s("all_gather", 0, size / parts)  # type: ignore[arg-type]
            assert shares <= costs.moves.taken_s("all_gather", 0, size) * (1 + 1e-12)


def test_a_share_is_a_share() -> None:
    with pytest.raises(ClusterError, match=r"in_node\.device_share is 1\.5"):
        taking(1.5, 2)
