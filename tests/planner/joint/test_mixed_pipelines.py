"""Pipelines over groups of differing devices and links: against every order and cut, executed, within each budget."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.model.program import Program
from paraplan.ir.process.memo import release_caches
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint.prices import sharding_front
from paraplan.planner.joint.prices.sharding_front import front
from paraplan.planner.mixed.listing import divisions, group_orders
from paraplan.planner.mixed.mixed_estimate import MixedEstimate
from paraplan.planner.mixed.mixed_plan import MixedCase
from paraplan.planner.mixed.search_mixed import MixedSearch, allows_mixed, search_mixed
from paraplan.planner.mixed.work_bound import work_bound_s
from paraplan.planner.search import find, search
from tests.planner.joint.chains import WIDTHS, Chain, chained, cluster, group, job, step_s
from tests.runtime.pipelines import run
from tests.runtime.web import batch, program, web


def searched(on: ClusterSpec, of: Program, pins: Constraints) -> tuple[MixedSearch, list[MixedEstimate]]:
    """A search whose spans are priced, and the best estimate of every division and order of the groups."""
    made = MixedSearch(job(on, of), pins, lambda _: None, Deadline(60.0))
    ways = list(divisions(made.job, pins))
    made.prices.price(ways, {count for _, counts in ways for count in counts})
    found: dict[object, MixedEstimate] = {}
    for estimate in itertools.chain.from_iterable(made.estimates([way]) for way in ways):
        found.setdefault(estimate.pipeline.spans, estimate)
    return made, list(found.values())


def case_of(search: MixedSearch, estimate: MixedEstimate) -> MixedCase:
    return MixedCase(search.job, search.constraints, estimate.pipeline, estimate.positions)


def plan_of(search: MixedSearch, estimate: MixedEstimate) -> Realised:
    """An estimated pipeline's plan, with all its microbatches and within the budgets of its devices."""
    case = case_of(search, estimate)
    made = case.whole(case.made(estimate.bounds, estimate.taken))
    assert case.fits(made)
    return made


def every_plan(search: MixedSearch, estimates: list[MixedEstimate]) -> Iterator[tuple[MixedCase, Realised]]:
    """Every cut of every order, each device's budget apart."""
    segments = len(search.job.program.segments)
    for estimate in estimates:
        case = case_of(search, estimate)
        for points in itertools.combinations(range(1, segments), estimate.pipeline.num_stages - 1):
            yield case, case.whole(case.priced(tuple(itertools.pairwise((0, *points, segments)))))


PINS = Constraints(schedule="1f1b", microbatches=4, recompute="none", reserve_bytes=0)


@pytest.mark.parametrize("speeds", [(4.0, 1.0), (1.0, 4.0), (1.0, 3.0, 2.0)])
@pytest.mark.parametrize("between", [1e7, 1e9])
def test_no_order_of_groups_and_no_cut_is_faster(speeds: tuple[float, ...], between: float) -> None:
    on = cluster(*map(group, speeds), between=between)
    pins = msgspec.structs.replace(PINS, pp=len(speeds))
    search, estimates = searched(on, chained(), pins)
    assert {each.pipeline.spans for each in estimates} == {
        tuple(spans[at] for at in order)
        for spans, _ in divisions(search.job, pins)
        for order in group_orders(search.job)
    }
    least = min(made.simulation.step_s for _, made in every_plan(search, estimates))
    plan = search_mixed(job(on, chained()), pins, Deadline(60.0), lambda _: None)
    assert step_s(plan) <= least * (1 + 1e-9)
    assert plan.certificate is not None and 0 < plan.certificate.bound_s <= least


@pytest.mark.parametrize("counts", [(2, 2), (2, 1)])
def test_no_division_of_the_groups_is_faster(counts: tuple[int, int]) -> None:
    """Each planned at the best cut that is known of it."""
    on = cluster(*(group(speed, count) for speed, count in zip((4.0, 1.0), counts, strict=True)))
    pins = Constraints(schedule="1f1b", microbatches=4)
    search, estimates = searched(on, chained(), pins)
    least = min(plan_of(search, each).simulation.step_s for each in estimates)
    assert step_s(search_mixed(job(on, chained()), pins, Deadline(60.0), lambda _: None)) <= least * (1 + 1e-9)


def test_equal_groups_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one search, and in another on equal devices of a cluster of another name."""
    asked: list[tuple[int, ...]] = []

    def counted(part: Job, mesh: Mesh, *more: Any) -> Iterator[Decisions]:
        asked.append(mesh.shape)
        yield from front(part, mesh, *more)

    monkeypatch.setattr(sharding_front, "front", counted)
    release_caches()
    on, pins = cluster(group(2.0), group(2.0)), Constraints(microbatches=4)
    searched(on, chained(), pins)
    assert asked == [(1,)]
    searched(msgspec.structs.replace(on, name="other"), chained(), pins)
    assert asked == [(1,)]
    searched(cluster(group(2.0), group(3.0)), chained(), pins)
    assert asked == [(1,), (1,)]


def test_the_order_of_groups_in_the_cluster_decides_nothing() -> None:
    fast, slow = group(4.0), group(1.0)
    pins = msgspec.structs.replace(PINS, pp=2)
    one, other = (
        search_mixed(job(cluster(*each), chained()), pins, Deadline(60.0), lambda _: None)
        for each in ((fast, slow), (slow, fast))
    )
    assert step_s(one) == step_s(other)
    assert [(each.first, each.stop) for each in one.stages] == [(each.first, each.stop) for each in other.stages]


def test_pinned_stages_are_kept_whatever_order_the_groups_are_in() -> None:
    pins = msgspec.structs.replace(PINS, pp=2, stages=((0, 2), (2, 6)), recompute=None)
    on = cluster(group(4.0), group(1.0))
    search, estimates = searched(on, chained(), pins)
    plan = search_mixed(job(on, chained()), pins, Deadline(60.0), lambda _: None)
    assert [(each.first, each.stop) for each in plan.stages] == [(0, 2), (2, 6)]
    assert step_s(plan) == min(plan_of(search, each).simulation.step_s for each in estimates)


def test_a_faster_device_has_more_to_do() -> None:
    on = cluster(group(8.0), group(1.0))
    plan = search_mixed(job(on, chained()), msgspec.structs.replace(PINS, pp=2), Deadline(60.0), lambda _: None)
    flops = {
        stage.mesh.devices: sum(WIDTHS[i] * WIDTHS[min(i + 1, len(WIDTHS) - 1)] for i in range(stage.first, stage.stop))
        for stage in plan.stages
    }
    assert flops[0,] > 2 * flops[1,]


def test_every_device_keeps_within_its_own_budget() -> None:
    """Of a small fast device and a large slow one."""
    free = search_mixed(
        job(cluster(group(4.0), group(1.0)), chained()),
        msgspec.structs.replace(PINS, pp=2),
        Deadline(60.0),
        lambda _: None,
    )
    assert free.prediction is not None
    small = free.prediction.peak_bytes[free.schedule.rank_class[0]] * 7 // 10
    on = cluster(group(4.0, memory_bytes=small), group(1.0))
    pins = msgspec.structs.replace(PINS, pp=2)
    search, estimates = searched(on, chained(), pins)
    plan = search_mixed(job(on, chained()), pins, Deadline(60.0), lambda _: None)
    assert plan.prediction is not None
    held = [plan.prediction.peak_bytes[of] for of in plan.schedule.rank_class]
    assert held[0] <= small
    fitting = [
        made.simulation.step_s for case, made in every_plan(search, estimates) if made.left_bytes(case.budgets) >= 0
    ]
    assert min(fitting) * (1 - 1e-9) <= step_s(plan) <= 1.02 * min(fitting)


@pytest.mark.parametrize(
    "on",
    [
        cluster(group(4.0), group(1.0)),
        cluster(group(4.0, 2), group(1.0, 2, link=0.1), between=1e8),
        cluster(group(4.0, 2), group(1.0), group(2.0)),
    ],
    ids=["2 ranks", "links differ", "three groups"],
)
def test_every_division_runs_as_simulated_and_equals_one_device(on: ClusterSpec) -> None:
    """Tied weights, skips and buffers over positions of differing sizes, meshes and shardings, in any order."""
    search, estimates = searched(on, program(), Constraints())
    assert len(estimates) > 1
    for estimate in estimates:
        made = plan_of(search, estimate)
        verify_plan(made.plan)
        assert run(made.plan, web().double(), batch()) <= 1e-9


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_data_and_tensor_parallel_positions_in_one_pipeline_equal_one_device(order: tuple[int, int]) -> None:
    """ZeRO-3 over one group, tensor parallelism over the other, whichever comes first."""
    on, found = cluster(group(4.0, 2), group(1.0, 2)), []
    for pins in (Constraints(dp=2, zero=3), Constraints(tp=2)):
        search, estimates = searched(on, program(), msgspec.structs.replace(pins, microbatches=2, schedule="1f1b"))
        found.append(next(each for each in estimates if [at.group for at in each.pipeline.spans] == list(order)))
    sharded, split = found
    case = MixedCase(search.job, Constraints(), sharded.pipeline, (sharded.positions[0], split.positions[1]))
    made = case.whole(case.made(sharded.bounds, ()))
    axes = [stage.mesh.axes for stage in made.plan.stages]
    assert axes == [("dp",), ("tp",)] and case.fits(made)
    verify_plan(made.plan)
    assert run(made.plan, web().double(), batch()) <= 1e-9


def test_positions_have_shardings_of_their_own() -> None:
    on = cluster(group(4.0, 2), group(1.0, 2))
    search, estimates = searched(on, program(), Constraints(pp=3))
    plans = [plan_of(search, each).plan for each in estimates]
    assert {tuple(stage.mesh.shape for stage in plan.stages) for plan in plans} >= {((2,), (1,), (1,))}


def test_the_free_plan_is_no_slower_than_groups_alone_and_one_mesh_for_all() -> None:
    on = cluster(group(4.0, 2), group(3.0, 2), between=1e8)
    whole = job(on, chained())
    free = search(whole, Constraints(microbatches=8)).plan
    alike = find(whole, Constraints(microbatches=8), certify=False).plan
    assert step_s(free) <= step_s(alike)
    for each in on.groups:
        alone = job(cluster(each), chained())
        assert step_s(free) <= step_s(search(alone, Constraints(microbatches=8), certify=False).plan)
    assert free.certificate is not None
    assert free.certificate.bound_s <= step_s(free)


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_undercuts_the_bound_of_work(seed: int) -> None:
    on = cluster(group(4.0 + seed), group(1.0))
    search, estimates = searched(on, chained(), Constraints())
    bound_s = work_bound_s(chained(), on)
    assert bound_s > 0
    for estimate in estimates:
        assert plan_of(search, estimate).simulation.step_s >= bound_s


def test_allocators_have_room_on_each_device_of_its_own() -> None:
    """Of one group there is less than would be reserved there for the fastest plan, though all that is alive fits."""
    with torch.device("meta"):
        wide = Chain(32)
    of = capture(wide, {"x": torch.empty(256, 32 * WIDTHS[0], device="meta")}, precision="fp32")
    on, pins = parse_cluster("1xA100-80+1xH100"), msgspec.structs.replace(PINS, pp=2, reserve_bytes=None)
    free = search_mixed(job(on, of), pins, Deadline(60.0), lambda _: None, reserves=True)
    assert free.prediction is not None
    first = free.schedule.rank_class[0]
    tight = (free.prediction.reserved_bytes[first] + free.prediction.peak_bytes[first]) // 2
    small = msgspec.structs.replace(on.groups[0].device, memory_bytes=tight, reserves=())
    groups = (msgspec.structs.replace(on.groups[0], device=small), on.groups[1])
    cramped = job(msgspec.structs.replace(on, groups=groups), of)
    assert search_mixed(cramped, pins, Deadline(60.0), lambda _: None).prediction is not None
    plan = search_mixed(cramped, pins, Deadline(60.0), lambda _: None, reserves=True)
    assert plan.prediction is not None
    assert plan.prediction.reserved_bytes[plan.schedule.rank_class[0]] <= tight


def test_what_is_pinned_may_leave_no_pipeline_over_groups() -> None:
    on = job(cluster(group(4.0), group(1.0)), chained())
    assert allows_mixed(on, Constraints()) and allows_mixed(on, Constraints(pp=2, schedule="zb-h1"))
    for pins in (Constraints(pp=1), Constraints(schedule="gems"), Constraints(offload="host")):
        assert not allows_mixed(on, pins)
    assert not allows_mixed(job(cluster(group(4.0)), chained()), Constraints())
