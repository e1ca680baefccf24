"""Pipelines over groups of differing devices and links: against every order and cut, executed, within each budget."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.errors import ConstraintError, SolverLimitError
from paraplan.ir.machine.cluster import ClusterSpec, Link, NodeGroup, check_cluster
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.model.program import Program
from paraplan.ir.plan import OPTIMIZERS, ModelRef, Plan
from paraplan.ir.process.memo import release_caches
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.best_plan import BestPlan
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint import pricing
from paraplan.planner.joint.sharding_front import front
from paraplan.planner.mixed.idle_groups import among_groups
from paraplan.planner.mixed.listing import check_on_cluster, divisions, group_orders
from paraplan.planner.mixed.mixed_estimate import MixedEstimate
from paraplan.planner.mixed.mixed_plan import MixedCase
from paraplan.planner.mixed.search_mixed import MixedSearch, allows_mixed, search_mixed
from paraplan.planner.mixed.work_bound import work_bound_s
from paraplan.planner.search import find, find_mixed, search
from tests.runtime.pipelines import account, run
from tests.runtime.web import batch, program, web

(LOCAL,) = ClusterSpec.local(2).groups
WIDTHS = (24, 96, 48, 160, 32, 64, 8)


class Chain(nn.Module):
    """Layers of different sizes, one after another."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(times * a, times * b) for a, b in itertools.pairwise(WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * x).mean()


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain().double()


def rows() -> dict[str, Tensor]:
    return {"x": torch.randn(256, WIDTHS[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


@functools.cache
def chained() -> Program:
    return capture(chain(), rows(), precision="fp64")


def group(speed: float, devices: int = 1, memory_bytes: int = 4 << 30, link: float = 1.0) -> NodeGroup:
    """A node of CPU processes so many times as fast as `ClusterSpec.local`'s, their link likewise."""
    device = msgspec.structs.replace(
        LOCAL.device,
        kind=f"cpu x{speed:g}",
        memory_bytes=memory_bytes,
        reserves=(),
        launch_s=1e-7,
        flops_per_s={dtype: rate * speed / 25 for dtype, rate in LOCAL.device.flops_per_s.items()},
        memory_bytes_per_s=LOCAL.device.memory_bytes_per_s * speed,
    )
    in_node = Link(bytes_per_s=LOCAL.in_node.bytes_per_s * link, latency_s=1e-6)
    return msgspec.structs.replace(LOCAL, device=device, devices_per_node=devices, in_node=in_node)


def cluster(*groups: NodeGroup, between: float = 1e9) -> ClusterSpec:
    slow = Link(bytes_per_s=between, latency_s=1e-6)
    return check_cluster(ClusterSpec(name="mixed", groups=groups, between_nodes=slow))


def job(on: ClusterSpec, of: Program) -> Job:
    return Job(of, on, OPTIMIZERS["adamw"], ModelRef(display="chain"), {})


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def searched(on: ClusterSpec, of: Program, pins: Constraints) -> tuple[MixedSearch, list[MixedEstimate]]:
    """A search whose spans are priced, and the best estimate of every division and order of the groups."""
    made = MixedSearch(job(on, of), pins, lambda _: None, Deadline(60.0))
    ways = list(divisions(made.job, pins))
    made.prices.price((span, count) for spans, counts in ways for span in spans for count in counts)
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

    monkeypatch.setattr(pricing, "front", counted)
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


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (Constraints(pp=2, stages=((0, 2), (2, 9))), "stage 1 is 2:9.*the model has 6"),
        (Constraints(pp=2, stages=((0, 2), (2, 5))), "stages end at segment 5, the model has 6"),
        (Constraints(pp=2, stages=((0, 1), (1, 2), (2, 6))), "3 stages cannot lie on pp=2"),
        (Constraints(microbatches=3), "does not divide into 3 microbatches"),
        (Constraints(pp=2, microbatches=1, schedule="interleaved"), "give a multiple of 2"),
        (Constraints(pp=4, schedule="interleaved"), "more than the model's 6 segments"),
        (Constraints(pp=2, params={"layers.0.weight": "S7/S0/S0"}), "nothing is left for layers.0.weight"),
        (Constraints(ep=2), "the model has no experts"),
        (Constraints(pp=9), "pp=9 does not divide"),
    ],
)
def test_pins_that_contradict_the_model_are_refused_as_over_one_group(pins: Constraints, said: str) -> None:
    for on in (cluster(group(2.0, 4)), cluster(group(4.0, 2), group(1.0, 2))):
        with pytest.raises(ConstraintError, match=said):
            search(job(on, chained()), pins)


def test_stages_that_end_beyond_the_model_are_refused_by_the_mixed_search_itself() -> None:
    on = job(cluster(group(4.0), group(1.0)), chained())
    with pytest.raises(ConstraintError, match="stage 1 is 2:9"):
        find_mixed(on, Constraints(pp=2, stages=((0, 2), (2, 9))))


def test_positions_need_not_divide_all_devices() -> None:
    """Three of a pair of devices and two single ones; what groups cannot be divided into is refused at once."""
    on, pins = cluster(group(4.0, 2), group(1.0, 2)), Constraints(pp=3, microbatches=4, schedule="1f1b")
    check_on_cluster(pins, on)
    for pp, other in ((3, cluster(group(1.0, 4))), (5, on)):
        with pytest.raises(ConstraintError, match=f"pp={pp} does not divide"):
            check_on_cluster(Constraints(pp=pp), other)
    plan = search(job(on, chained()), pins).plan
    assert sorted(stage.mesh.size for stage in plan.stages) == [1, 1, 2]
    assert account(plan, chain(), rows(), steps=1).error <= 1e-9


@pytest.mark.parametrize("batch_rows", [256, 192])
def test_the_free_plan_is_no_slower_than_with_microbatches_pinned(batch_rows: int) -> None:
    """Few of them do best here: a call takes long to launch."""
    slow = msgspec.structs.replace(group(1.0).device, launch_s=2e-5)
    groups = (msgspec.structs.replace(group(2.5), device=slow), msgspec.structs.replace(group(1.0, 3), device=slow))
    given = {"x": torch.randn(batch_rows, WIDTHS[0])}
    of = job(cluster(*groups, between=1e10), capture(chain().float(), given, precision="fp32"))
    free_s = step_s(search_mixed(of, Constraints(), Deadline(60.0), lambda _: None))
    for count in (2, 4, 8, 16):
        pinned = search_mixed(of, Constraints(microbatches=count), Deadline(60.0), lambda _: None)
        assert free_s <= step_s(pinned) * (1 + 1e-9)


def test_what_time_leaves_loses_to_no_group_as_one_mesh() -> None:
    """Every search for more than one mesh finds nothing, as one that time cuts short."""
    on = job(cluster(group(4.0, 2), group(3.0, 2), between=1e8), chained())

    def late(part: Job, pins: Constraints, *more: Any) -> BestPlan:
        if pins.pp == 1:
            return find(part, pins, *more)
        raise SolverLimitError("time ran out")

    found = among_groups((late, late), on, Constraints(), 30.0, lambda _: None, True)
    alone = [job(cluster(each), chained()) for each in on.cluster.groups]
    one_mesh = [find(each, Constraints(pp=1)).step_s for each in (on, *alone)]
    assert found.step_s == min(one_mesh)
    assert found.plan.certificate is not None and 0 < found.plan.certificate.bound_s <= found.step_s
