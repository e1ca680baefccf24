"""Plans whose allocators have room: what devices keep from a plan; planning for less where more would be reserved."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import Tensor, nn

import paraplan as pp
from paraplan.baselines.planners import plan_by
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.machine.device_catalog import CATALOG
from paraplan.cost_models.predict import reserved_of, simulate_plan, with_reserved
from paraplan.ir.errors import ClusterError, ConstraintError, InfeasibleError, NoPlanError, SolverLimitError
from paraplan.ir.machine.cluster import ClusterSpec, check_cluster
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.machine.reserves import Reserve
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower
from paraplan.planner import fits as room_module
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.fits import search_room
from paraplan.planner.interrupts import NOTE, Interrupted
from paraplan.planner.one_stage import nearest_plan, roomier, solved_meshes
from paraplan.planner.one_stage.roomier import needed_bytes
from paraplan.planner.pipeline.draft import Draft
from paraplan.planner.schedules.full_rounds import programs_of
from paraplan.planner.search import find, search
from paraplan.report.explain import verdict
from paraplan.rules.device_kernels import cuda_sums

MIB = 1 << 20


class Wide(nn.Module):
    """Products of unequal sizes, so that freed pieces seldom fit what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(512, width) for width in (1536, 1792, 640))
        self.down = nn.ModuleList(nn.Linear(width, 512) for width in (1536, 1792, 640))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return x.square().mean()


@pytest.fixture(autouse=True)
def no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is reserved beyond what is alive is freed pieces here, and not what sums of biases hold at the peak."""
    monkeypatch.setattr(cuda_sums, "buffer_bytes", lambda rows, columns: 0)


PINS = {"dp": 2, "recompute": "none", "microbatches": 1}


@cache
def program() -> Program:
    with torch.device("meta"):
        return capture(Wide(), {"x": torch.randn(2048, 512)})


def job(memory_bytes: int, reserves: tuple[Reserve, ...] = (), devices: int = 2) -> Job:
    """Planning `Wide` on GPUs of so much memory."""
    cluster = cluster_of(memory_bytes, reserves, devices)
    return Job(program(), cluster, OPTIMIZERS["adamw"], ModelRef(display="wide"), {})


def cluster_of(memory_bytes: int, reserves: tuple[Reserve, ...] = (), devices: int = 2) -> ClusterSpec:
    cluster = parse_cluster(f"{devices}xH100")
    (group,) = cluster.groups
    device = msgspec.structs.replace(group.device, memory_bytes=memory_bytes, reserves=reserves)
    return msgspec.structs.replace(cluster, groups=(msgspec.structs.replace(group, device=device),))


@cache
def roomy_peak() -> int:
    """Bytes alive of the plan with memory for anything."""
    return max(search(job(1 << 40), Constraints(**PINS), certify=False).plan.prediction.peak_bytes)


def told(plan: Plan) -> dict[str, str]:
    return dict(verdict(plan, simulate_plan(plan, lower(plan))))


KEPT = (Reserve(what="context", nbytes=3 * MIB), Reserve(what="buffers", nbytes=5 * MIB, joined=True))


def test_what_devices_keep() -> None:
    joined, alone = cluster_of(100 * MIB, KEPT), cluster_of(100 * MIB, KEPT, devices=1)
    assert (joined.plan_bytes(), alone.plan_bytes(), joined.plan_bytes(MIB)) == (92 * MIB, 97 * MIB, 99 * MIB)
    less = msgspec.structs.replace(alone.groups[0].device, memory_bytes=95 * MIB)
    mixed = msgspec.structs.replace(
        joined,
        groups=(*joined.groups, msgspec.structs.replace(alone.groups[0], device=less)),
    )
    assert mixed.plan_bytes() == 87 * MIB
    for memory, reserve, budget in (
        (None, None, 92),
        (90, None, 90),
        (95, None, 92),
        (95, 0, 95),
        (None, 10 * MIB, 90),
    ):
        allowed = None if memory is None else memory * MIB
        assert device_budget(joined, Constraints(memory_bytes=allowed, reserve_bytes=reserve)) == budget * MIB
    with pytest.raises(ClusterError, match=r"reserves\[0\]\.nbytes is negative"):
        check_cluster(cluster_of(MIB, (Reserve(what="context", nbytes=-1),)))


def test_every_device_of_the_catalog_names_what_it_keeps() -> None:
    for entry in CATALOG.values():
        kept = entry.device.reserves
        assert all(each.source and each.nbytes > 0 for each in kept), entry.device.kind
        assert {each.what for each in kept} == (
            {"process", "allocator"} if entry.vendor == "CPU" else {"CUDA context", "NCCL buffers", "allocator"}
        )
        assert sum(each.nbytes for each in kept) < entry.device.memory_bytes / 6
    assert ClusterSpec.local(2, 12345).plan_bytes() == 12345


def test_what_is_reserved_fits() -> None:
    """The fastest plan by the bytes alive does not fit as the allocator holds it: another one is found, that does."""
    memory = roomy_peak() + 8 * MIB
    tight = job(memory, KEPT)
    constraints = Constraints(**PINS)
    alone = search_room(job(memory - 8 * MIB), Constraints(**PINS, reserve_bytes=0)).plan
    assert max(alone.prediction.peak_bytes) <= memory - 8 * MIB < needed_bytes(alone)
    assert "more than there is" in told(alone)["reserved"]
    found = search_room(tight, constraints).plan
    assert max(found.prediction.peak_bytes) < needed_bytes(found) <= memory - 8 * MIB
    assert "more than there is" not in told(found)["reserved"]
    assert "3.00 MiB for the context, 5.00 MiB for the buffers" in told(found)["left free"]
    assert "less than that" not in told(found)["left free"]
    assert any("would be reserved, of this one" in note for note in found.notes)
    assert found.certificate.bound_s == alone.certificate.bound_s <= alone.prediction.step_s < found.prediction.step_s
    assert found.certificate.gap == pytest.approx(1 - alone.certificate.bound_s / found.prediction.step_s)


def test_the_first_plan_s_microbatches_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for fewer bytes that leaves them open may stop at others, which are slower."""
    asked: list[int | None] = []

    def searched(job: Job, constraints: Constraints, time_limit_s: float, *rest: object, **more: object) -> BestPlan:
        asked.append(constraints.microbatches)
        usual = 1 if len(asked) == 1 else 4
        pins = msgspec.structs.replace(constraints, microbatches=constraints.microbatches or usual)
        return search(job, pins, time_limit_s, certify=False)

    monkeypatch.setattr(room_module, "find", searched)
    found = search_room(job(roomy_peak()), Constraints(dp=2, recompute="none")).plan
    assert asked[0] is None and 1 in asked and None in asked[1:]
    assert found.num_microbatches == 1 and needed_bytes(found) <= roomy_peak()


def test_another_plan_of_the_search_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of those made on the way that allocators have room for is no worse for there being no time."""
    first, *others = (
        search_room(job(2 * roomy_peak()), Constraints(dp=2, zero=1, recompute="none", microbatches=count)).plan
        for count in (1, 4, 2)
    )
    two, memory = others[1], needed_bytes(others[1])
    assert needed_bytes(others[0]) < memory < needed_bytes(first) and _step_s(first) < _step_s(two) < _step_s(others[0])

    def searched(job: Job, constraints: Constraints, *_: object, **__: object) -> BestPlan:
        if constraints.memory_bytes is None:
            return BestPlan(first, 0.0, 0.0, tuple(map(Draft.of, (first, *sorted(others, key=_step_s)))))
        raise SolverLimitError("nothing fits")

    monkeypatch.setattr(room_module, "find", searched)
    monkeypatch.setattr(room_module, "WORSE", 2.0)
    found = search_room(job(memory), Constraints(dp=2, zero=1, recompute="none")).plan
    assert found.num_microbatches == 2 and needed_bytes(found) <= memory
    assert any("would be reserved, of this one" in note for note in found.notes)
    monkeypatch.setattr(roomier, "OTHERS", 1)  # the first, which does not fit: at last all are looked at
    assert search_room(job(memory), Constraints(dp=2, zero=1, recompute="none")).plan.num_microbatches == 2
    monkeypatch.setattr(room_module, "WORSE", 1.0)
    assert search_room(job(memory), Constraints(dp=2, zero=1, recompute="none")).plan.num_microbatches == 2, (
        "however slow"
    )
    with pytest.raises(SolverLimitError, match="plans fit by the bytes alive"):
        search_room(job(needed_bytes(others[0]) - 1), Constraints(dp=2, zero=1, recompute="none"))


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def test_pipelines_are_such_that_allocators_have_room() -> None:
    """What is more than there is is said; where others have room, those are planned."""
    pins = Constraints(schedule="1f1b", microbatches=8)
    roomy = Draft.of(find(job(1 << 40), pins, certify=False).plan)
    least = _reserved(roomy, 1 << 40)
    while _reserved(roomy, least - MIB) <= least - MIB:  # what is cached is given back before more is reserved
        least -= MIB
    room, tight = least - MIB, job(least - MIB)
    assert roomy.peak_bytes < least
    alone = Draft.of(find(tight, pins, certify=False).plan)
    assert alone.peak_bytes <= room < _reserved(alone, room)
    with pytest.raises(SolverLimitError, match=r"rank class 1 reserves .* expandable segments"):
        find(tight, pins, certify=False, reserves=True)
    found = Draft.of(find(tight, Constraints(microbatches=8), certify=False, reserves=True).plan)
    assert len(found.sample.stages) == 1 or _reserved(found, room) <= room


def _reserved(draft: Draft, room: int) -> int:
    return max(reserved_of(draft.sample, lower(draft.sample), room))


def test_an_interrupt_while_room_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plan of the first search is given, if allocators have room for it; else the first that fits is looked
    for, until another interrupt."""
    first, other = (
        search_room(job(2 * roomy_peak()), Constraints(dp=2, recompute="none", microbatches=count)).plan
        for count in (1, 2)
    )
    memory, pins = needed_bytes(other), Constraints(dp=2, recompute="none")
    assert memory < needed_bytes(first)
    asked: list[int | None] = []

    def searched(job: Job, constraints: Constraints, *_: object, **__: object) -> BestPlan:
        asked.append(constraints.memory_bytes)
        if len(asked) >= ends:
            raise Interrupted([BestPlan(first, 0.0, 0.0, tuple(map(Draft.of, others)))] * (ends == 1 == len(asked)))
        return BestPlan(first, 0.0, 0.0, tuple(map(Draft.of, others)))

    monkeypatch.setattr(room_module, "find", searched)
    monkeypatch.setattr(room_module, "ENOUGH", -1.0)
    for ends, others in ((1, [first, other]), (2, [first, other]), (1, [first]), (2, [first])):
        asked.clear()
        if other in others:
            found = search_room(job(memory), pins)
            assert found.is_interrupted and needed_bytes(found.plan) <= memory and NOTE in found.plan.notes
        else:
            with pytest.raises(KeyboardInterrupt):
                search_room(job(memory), pins)
        assert len(asked) == ends + (other not in others)


def test_no_plan_has_room_as_reserved() -> None:
    with pytest.raises(
        SolverLimitError, match=r"plans fit by the bytes alive, but .*reserve=0.*For less memory: no plan"
    ):
        search_room(job(int(0.85 * roomy_peak())), Constraints(**PINS))


def test_a_mesh_that_was_open_is_kept_where_it_can_be() -> None:
    told_of: list[str] = []
    memory = int(1.2 * roomy_peak())
    found = search_room(job(memory), Constraints(pp=1, recompute="none", microbatches=1), progress=told_of.append).plan
    assert needed_bytes(found) <= memory
    again = next(at for at, text in enumerate(told_of) if "planning for less" in text)
    assert {text for text in told_of[again:] if text.startswith("mesh")} == {"mesh axis0=2, 1 microbatch"}


def test_the_budget_that_an_error_advises_does() -> None:
    """It counts what allocators reserve, as plans do where a reserve is kept."""
    pins, roomy = Constraints(microbatches=1), job(1 << 40, devices=1)
    with pytest.raises(NoPlanError) as said:
        search_room(roomy, msgspec.structs.replace(pins, memory_bytes=40 * MIB), time_limit_s=2.0)
    found = re.search(r"found to do is [^(]*\((\d+) bytes\)", str(said.value))
    assert found is not None
    plan = search_room(roomy, msgspec.structs.replace(pins, memory_bytes=int(found[1])), time_limit_s=2.0).plan
    assert needed_bytes(plan) <= int(found[1])


def test_all_searches_share_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes six seconds: of ten, two begin in time, one for least memory after it, at most two short ones where
    that does not fit, and one to say by how much it does not. Where it does, it is the plan."""
    now, given = [0.0], list[float]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def searched(job: Job, constraints: Constraints, time_limit_s: float, *rest: object, **more: object) -> BestPlan:
        given.append(time_limit_s)
        now[0] += 6.0
        return search(job, constraints, time_limit_s, certify=False)

    monkeypatch.setattr(room_module, "find", searched)
    tight = job(int(0.85 * roomy_peak()))
    with pytest.raises(SolverLimitError, match=r"the time limit of 10 s ran out"):
        search_room(tight, Constraints(**PINS), time_limit_s=10.0)
    *searches, nearest = given
    assert searches[:4] == [7.0, 2.0, 1.0, 2.0] and len(searches) <= 5  # a fifth each at least, however late
    assert nearest == nearest_plan.TIME_S
    given.clear()
    with monkeypatch.context() as patched:
        lean = find(tight, msgspec.structs.replace(Constraints(**PINS), microbatches=2), 60.0, certify=False)
        patched.setattr(room_module, "_least_memory", lambda *_: SimpleNamespace(plan=lambda _: lean))
        least = search_room(tight, Constraints(**PINS), time_limit_s=10.0).plan
    assert given == [7.0, 2.0] and least.num_microbatches == 2
    given.clear()
    found = search_room(job(1 << 40), Constraints(**PINS), time_limit_s=10.0)
    assert given == [7.0] and not any("ran out" in note for note in found.plan.notes)
    for passed_s, left_s in ((4.0, 4.2), (9.5, 0.7), (60.0, 0.7)):  # a second is left in any case
        given.clear()
        search_room(job(1 << 40), Constraints(**PINS), 10.0, passed_s=passed_s)
        assert given == pytest.approx([left_s])


@pytest.mark.parametrize(
    ("asked_s", "says"), [(0.0, "as a time limit of 0 s asks for"), (0.5, "the time limit of 0.5 s ran out")]
)
def test_notes_have_the_time_limit_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked_s: float, says: str
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def searched(job: Job, constraints: Constraints, time_limit_s: float, *rest: object, **more: object) -> BestPlan:
        now[0] += 6.0
        return search(job, constraints, time_limit_s, certify=False)

    monkeypatch.setattr(room_module, "find", searched)
    alone = job(1 << 40)
    two = replace(alone, cluster=parse_cluster("2xH100+2xA100-80"))
    for on, pins in ((alone, Constraints(**PINS)), (two, Constraints(pp=1, microbatches=1))):
        said = [note for note in plan_by("paraplan", on, pins, asked_s).plan.notes if "plan may be found" in note]
        assert len(said) == 1 and says in said[0]


def test_meshes_share_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh has half of what is left while others wait; those that there is no time for are named."""
    now, given = [0.0], list[float]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    on_mesh = solved_meshes.plans_on_mesh

    def slow(job: Job, mesh: Mesh, constraints: Constraints, limits: SolveLimits, *rest: object) -> object:
        given.append(limits.time_s)
        found = on_mesh(job, mesh, constraints, limits, *rest)  # type: ignore[arg-type]
        now[0] += 4.0
        return found

    monkeypatch.setattr(solved_meshes, "plans_on_mesh", slow)
    pins = Constraints(pp=1, microbatches=1, recompute="none")
    assert any("meshes solved: 4, 2x2" in note for note in search(job(1 << 40, devices=4), pins, 60.0).plan.notes)
    assert given == [30.0, 56.0]
    given.clear()
    notes = search(job(1 << 40, devices=8), pins, 7.0).plan.notes
    assert given == [3.5, 1.5] and any("not solved, as time ran out: 4x2" in note for note in notes)


def test_sizes_that_are_none() -> None:
    batch = {"x": torch.randn(8, 512)}
    for reserve, kind, words in (
        ("lots", ConstraintError, "reserve='lots': give bytes, or a size"),
        (-1, ConstraintError, "reserve=-1: give bytes, or a size"),
        ("1TiB", InfeasibleError, "a reserve of 1024.00 GiB leaves a plan no device memory .* reserve=0"),
    ):
        with pytest.raises(kind, match=words):
            pp.compile(Wide(), "2xH100", example_inputs=batch, reserve=reserve)


def test_a_plan_read_back_has_the_room_that_was_pinned() -> None:
    """What allocators reserve is told of the room that a plan's pins leave, by the search and by whoever reads it."""
    memory = 2 * roomy_peak()
    for pins in ({"reserve_bytes": memory // 4}, {"memory_bytes": memory * 3 // 4}, {}):
        made = search_room(job(memory), Constraints(**PINS, **pins)).plan
        plan = msgspec.structs.replace(made, pins=Constraints(**PINS, **pins).as_data)
        room = device_budget(plan.cluster, Constraints(**PINS, **pins))
        assert set(plan.room_bytes) == {room} and room == (memory if not pins else memory - memory // 4)
        assert with_reserved(plan, programs_of(plan)).prediction == made.prediction


def test_more_memory_than_devices_have_is_said() -> None:
    on = job(1 << 30)
    room = on.cluster.plan_bytes()
    for memory_bytes, is_said in ((room + 1, True), (room, False), (None, False)):
        for pins in (Constraints(memory_bytes=memory_bytes), Constraints(memory_bytes=memory_bytes, pp=1)):
            notes = find(on, pins, 20.0, certify=False).plan.notes
            assert any("are allowed on a device, of which it has" in note for note in notes) == is_said
