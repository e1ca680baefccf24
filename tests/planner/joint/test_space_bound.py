"""The bound of a space against every plan in it, and its formula against every cut."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import nn

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.execution.schedule import ActionKind
from paraplan.ir.profile import Profile
from paraplan.planner.assemble import Job
from paraplan.planner.certificate import certified_in_space
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint.bounding import relaxations
from paraplan.planner.joint.bounding.in_flight import fullest, spread_of
from paraplan.planner.joint.bounding.relaxations import RelaxedPosition
from paraplan.planner.joint.bounding.space_bound import Least, SpaceBound
from paraplan.planner.joint.combinations import Combination, combinations
from paraplan.planner.joint.search_joint import JointSearch
from paraplan.planner.one_stage import solved_meshes
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.schedules.named import NAMED, named_orders
from paraplan.planner.schedules.order_memory import instants_of
from paraplan.planner.schedules.order_times import ended
from paraplan.planner.schedules.schedule_problem import StageCosts, stages_of
from paraplan.planner.search import search
from paraplan.planner.sharding.solve import problem_of
from tests.captures import zoo_job
from tests.runtime.pipelines import job_of

LONG = Deadline(600.0)


def _bound(name: str, devices: int, pins: Constraints) -> tuple[list[Combination], float]:
    job = zoo_job(name, devices)
    listed = combinations(job, pins)
    found = JointSearch(job, pins, Shardings(lambda *_: pytest.fail("no sharding is needed")), lambda _: None, LONG)
    bound = SpaceBound(job, pins, found.budget, found.pricing.position, found.pricing.way_of)
    return listed, bound.bound_s(listed, float("inf"), time.perf_counter() + 60.0)


@pytest.mark.parametrize(
    ("name", "devices", "pins"),
    [
        ("gpt2", 2, Constraints(microbatches=4)),
        ("llama", 4, Constraints(schedule="1f1b", microbatches=2)),
        ("mlp", 4, Constraints(tp=2, microbatches=2)),
        ("mixtral", 2, Constraints(microbatches=2)),  # its last segment runs once, on the whole batch
        ("clip", 2, Constraints(microbatches=4)),
        ("clip", 2, Constraints(microbatches=4, memory_bytes=68_500)),
    ],
)
def test_no_plan_of_a_space_is_below_its_bound(name: str, devices: int, pins: Constraints) -> None:
    job = zoo_job(name, devices)
    listed, bound_s = _bound(name, devices, pins)
    assert bound_s > 0.0
    steps, _ = _fastest(job, listed, pins)
    assert len(steps) > (pins.memory_bytes is None) and bound_s <= min(steps)
    assert bound_s >= 0.2 * min(steps)  # of messages between processes, most of a step here, it knows nothing


def test_nor_is_one_that_fits_below_the_bound_of_less_memory() -> None:
    job, pins = zoo_job("llama", 2), Constraints(microbatches=1)
    listed, loose_s = _bound("llama", 2, pins)
    tight = msgspec.structs.replace(pins, memory_bytes=int(0.65 * min(_fastest(job, listed, pins)[1])))
    _, bound_s = _bound("llama", 2, tight)
    assert loose_s < bound_s <= min(_fastest(job, listed, tight)[0])


def test_parameters_too_many_to_be_whole_raise_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hardly anything is saved for a backward, what parameters keep is priced all the same."""
    monkeypatch.setattr(solved_meshes, "all_alike", lambda *_: [])  # of plans that are divided
    job, pins = zoo_job("mlp", 4), Constraints(microbatches=2, pp=1, recompute="none")
    listed, loose_s = _bound("mlp", 4, pins)
    tight = msgspec.structs.replace(pins, memory_bytes=int(0.4 * max(_fastest(job, listed, pins)[1])))
    _, bound_s = _bound("mlp", 4, tight)
    assert loose_s < bound_s <= min(_fastest(job, listed, tight)[0])


def _fastest(job: Job, listed: list[Combination], pins: Constraints) -> tuple[list[float], list[int]]:
    """Steps and peaks of every combination that has a plan."""
    steps, peaks = [], []
    for combination in listed:
        try:
            plan = search(job, combination.pinned(pins), certify=False).plan
        except (ConstraintError, NoPlanError):
            continue
        assert plan.prediction is not None
        steps.append(plan.prediction.step_s)
        peaks.append(max(plan.prediction.peak_bytes))
    return steps, peaks


def _nothing_known(pp: int) -> SpaceBound:
    return SpaceBound(
        zoo_job("gpt2", pp), Constraints(), 1, lambda _: pytest.fail("nothing to solve"), lambda _: ("", 1.0)
    )


def _alike(segments: int) -> Least:
    """Segments of a second's forward and two seconds' backward, of which one is handed on."""
    each = {n: (float(n),) * segments for n in (1, 2, 3)}
    return Least(3.0 * segments, each[3], each[1], each[2], each[2])


def test_one_stage_a_position_is_bounded_by_every_cut() -> None:
    """Segments of equal seconds, as finely cut as can be: the best cut of 1f1b comes near the formula, none below."""
    for pp, m, segments in ((2, 2, 12), (2, 6, 12), (3, 4, 12), (4, 3, 10)):
        combination = Combination(pp, (1,), m, "1f1b", 1)
        bound_s = _nothing_known(pp).combination_s(combination, _alike(segments))
        best_s = min(
            ended(combination.orders(), tuple(StageCosts(forward_s=n, backward_s=2.0 * n) for n in cut)).step_s
            for cut in itertools.product(range(1, segments), repeat=pp)
            if sum(cut) == segments
        )
        assert 0.8 * best_s <= bound_s <= best_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("schedule", "each"),
    [
        ("interleaved", 2),
        ("hanayo", 2),
        ("zb-v", 2),
        ("interleaved-zb", 2),
        ("zb-v-lean", 2),
        ("chimera", 1),
        ("gems", 1),
    ],
)
def test_no_order_is_below_what_its_idle_positions_leave(schedule: str, each: int) -> None:
    pp, m, segments = 2, 4, 8
    combination = Combination(pp, (1,), m, schedule, each)
    bound_s = _nothing_known(pp).combination_s(combination, _alike(segments))
    steps = [
        ended(
            combination.orders(),
            tuple(StageCosts(forward_s=n, backward_s=2.0 * n, input_grad_s=n, weight_grad_s=n) for n in cut),
        ).step_s
        for cut in itertools.product(range(1, segments), repeat=pp * each)
        if sum(cut) == segments
    ]
    assert bound_s <= min(steps) * (1 + 1e-9) and bound_s >= 0.6 * min(steps)


@pytest.mark.parametrize(
    ("schedule", "each", "idle_s"),
    [("interleaved", 2, 3.0 * 19 / 4), ("hanayo", 2, 3.0 * 19 / 4), ("zb-v", 2, 19 / 4), ("chimera", 1, 3.0 * 2 / 4)],
)
def test_nor_of_many_stages_cut_evenly_but_for_one(schedule: str, each: int, idle_s: float) -> None:
    """Six segments a stage: of four positions the third surely has a stage before it, the last two."""
    pp, m, segments, draw = 4, 4, 24 * each, random.Random(4)
    combination, least = Combination(pp, (1,), m, schedule, each), _alike(segments)
    bound_s = _nothing_known(pp).combination_s(combination, least)
    ends = [6 * stage for stage in range(pp * each + 1)]
    steps, spreads = [], set()
    for moved in range(60):
        inner = sorted(end + draw.randint(-5, 5) * (moved > 0) for end in ends[1:-1])
        bounds = list(itertools.pairwise((0, *inner, segments)))
        if min(stop - first for first, stop in bounds) < 1 or spread_of(bounds, least.each_s) > 1:
            continue
        spreads.add(spread_of(bounds, least.each_s))
        costs = (
            StageCosts(forward_s=n, backward_s=2.0 * n, input_grad_s=n, weight_grad_s=n)
            for n in (stop - first for first, stop in bounds)
        )
        steps.append(ended(combination.orders(), tuple(costs)).step_s)
    assert spreads == {0, 1} and len(steps) > 10
    assert 0.7 * min(steps) <= bound_s <= min(steps) * (1 + 1e-9)
    assert bound_s == pytest.approx(m * least.whole_s / pp + idle_s)


def test_a_bound_above_the_step_is_told_and_not_kept() -> None:
    plan = search(zoo_job("gpt2", 2), Constraints(pp=2, microbatches=2)).plan
    assert plan.prediction is not None
    step_s = plan.prediction.step_s
    inside = certified_in_space(plan, 0.5 * step_s, 7)
    assert inside.certificate is not None and inside.certificate.gap == pytest.approx(0.5)
    assert inside.certificate.bound_scope.startswith("7 combinations of pp")
    wider = certified_in_space(plan, 0.5 * step_s, 7, 3).certificate
    assert wider is not None and "evenly but for 3 stages" in wider.bound_scope
    above = certified_in_space(plan, 1.1 * step_s, 7)
    assert above.certificate == plan.certificate and "fault of the planner" in above.notes[-1]
    assert certified_in_space(plan, 0.0, 7) == plan


def test_a_free_search_is_certified_over_its_whole_space() -> None:
    job = zoo_job("mlp", 2)
    plan = search(job, Constraints(microbatches=4)).plan
    assert plan.certificate is not None and plan.prediction is not None
    assert "combinations of pp, mesh" in plan.certificate.bound_scope
    assert 0.0 < plan.certificate.bound_s <= plan.prediction.step_s
    pinned = search(job, msgspec.structs.replace(Constraints(microbatches=4), pp=2), certify=False).plan
    assert pinned.prediction is not None and plan.certificate.bound_s <= pinned.prediction.step_s


def test_a_schedule_splits_where_its_orders_do() -> None:
    for named in NAMED.values():
        actions = [action for order in named.make(2, 4, named.stages) for action in order]
        assert named.splits == any(action.kind is ActionKind.W for action in actions)


def test_a_hull_that_was_cut_short_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job, pins = zoo_job("llama", 2), Constraints(microbatches=1)
    found = JointSearch(job, pins, Shardings(lambda *_: pytest.fail("no sharding is needed")), lambda _: None, LONG)
    part, inner, mesh = found.pricing.position(Combination(1, (2,), 1, "1f1b", 1))
    space = problem_of(part, mesh, 1, inner)
    whole = RelaxedPosition(part, space, inner, 1, 10.0).recomputing
    longest = max(map(len, whole))
    assert longest > 1
    monkeypatch.setattr(relaxations, "MOST_OPTIONS", longest)
    short = RelaxedPosition(part, space, inner, 1, 10.0).recomputing
    assert all(b == (() if len(a) == longest else a) for a, b in zip(whole, short, strict=True))


SIZES = [(name, 4 if name == "chimera" else 3, count) for name in NAMED for count in (2, 3, 4, 6, 9)]


@pytest.mark.parametrize(("schedule", "pp", "count"), [each for each in SIZES if NAMED[each[0]].counts(*each[1:])])
def test_gradients_count_where_they_are_held_beside_most_microbatches(schedule: str, pp: int, count: int) -> None:
    """Not where all forwards come before the first backward, as gradients come and microbatches go; then beside as many
    as there are once they have come."""
    orders = named_orders(schedule, pp, count, NAMED[schedule].stages)
    found, *late = fullest(orders)
    seen = []
    for order, mine in zip(orders, stages_of(orders), strict=True):
        instants = instants_of(order, mine)
        flying = instants[:, 0].sum(1)
        most = instants[flying == flying.max()]
        seen.append(bool(most[:, 2].all(1).any()))
        assert sum(found.counts[stage] for stage in mine) >= flying.max()
        for each in late:
            held = flying[instants[:, 2].all(1)]
            assert each.have_grads and sum(each.counts[stage] for stage in mine) >= held.max(initial=0)
    assert found.have_grads <= all(seen) and len(late) == (not found.have_grads)
    if schedule == "gpipe" or (schedule == "interleaved" and count <= 3):
        assert not found.have_grads
    if schedule == "1f1b":
        assert found.have_grads == (count > 3)


def test_nothing_is_relaxed_where_time_for_all_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first position is, which says how long others take; what was known before them holds all the same."""
    job, pins, clock = zoo_job("gpt2", 4), Constraints(recompute="none"), [0.0]
    listed = combinations(job, pins)
    found = JointSearch(job, pins, Shardings(lambda *_: pytest.fail("no sharding is needed")), lambda _: None, LONG)
    relaxed = list[object]()

    def slow(bound: SpaceBound, combination: Combination) -> RelaxedPosition | None:
        relaxed.append(combination)
        clock[0] += 10.0
        return real(bound, combination)

    real = SpaceBound._made
    monkeypatch.setattr(SpaceBound, "_made", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    seconds: list[float] = []
    for stop in (-1.0, 25.0, 1e4):
        relaxed.clear()
        clock[0] = 0.0
        bound = SpaceBound(job, pins, found.budget, found.pricing.position, found.pricing.way_of)
        seconds.append(bound.bound_s(listed, 1.0, stop))
        assert len(relaxed) == 1 if stop == 25.0 else len(relaxed) > 3 if stop > 25.0 else not relaxed
    assert 0.0 < seconds[0] <= seconds[1] <= seconds[2]


def test_every_op_of_every_microbatch_is_launched() -> None:
    """Which is known at once, and not divided; nothing is where times were measured."""
    job, pins = zoo_job("gpt2", 2), Constraints()
    found = JointSearch(job, pins, Shardings(lambda *_: pytest.fail("no sharding is needed")), lambda _: None, LONG)
    both = [Combination(1, (2,), count, "1f1b", 1) for count in (1, 8)]

    def first_s(job: Job) -> list[float]:
        bound = SpaceBound(job, pins, found.budget, found.pricing.position, found.pricing.way_of)
        return [least_s for least_s, _, _ in sorted(bound.refining(both, math.inf)._queue, key=lambda each: each[2])]

    graphs = [job.program.kinds[segment.kind].graph for segment in job.program.segments]
    launched_s = sum(len(graph.ops) for graph in graphs) * min(each.device.launch_s for each in job.cluster.groups)
    few_s, many_s = first_s(job)
    assert 0.5 * launched_s * 7 <= many_s - few_s <= launched_s * 7
    measured = replace(job, profile=Profile(device="cpu", name="", torch="2"))
    few_s, many_s = first_s(measured)
    assert many_s == pytest.approx(few_s)


def test_ranks_may_have_all_samples_of_a_microbatch() -> None:
    """Of few samples what takes long is to read parameters: divided as far as devices are, they are read once."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4096, 12288), nn.Linear(12288, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.down(torch.relu(self.up(x)))).mean()

    program = capture(Wide(), {"x": torch.zeros(3, 4096)}, precision="fp32")
    job = replace(job_of(program, 1), cluster=parse_cluster("6xV100-32:2"))
    pins = Constraints(mesh=(3, 4), pp=1)
    step_s = search(job, pins, certify=False).plan.prediction.step_s
    listed = [Combination(1, (3, 4), 1, "1f1b", 1), Combination(2, (6,), 3, "gpipe", 1)]
    found = JointSearch(job, Constraints(), Shardings(lambda *_: pytest.fail("none")), lambda _: None, LONG)
    bound = SpaceBound(job, Constraints(), found.budget, found.pricing.position, found.pricing.way_of)
    for stop in (0.0, time.perf_counter() + 60.0):
        assert 0.0 < bound.bound_s(listed, math.inf, stop) <= step_s


def test_nor_are_a_loops_steps_divided() -> None:
    job, pins = replace(zoo_job("mamba", 2), cluster=parse_cluster("8xH100")), Constraints(pp=1, microbatches=1)
    step_s = search(job, pins, certify=False).plan.prediction.step_s
    found = JointSearch(job, pins, Shardings(lambda *_: pytest.fail("none")), lambda _: None, LONG)
    bound = SpaceBound(job, pins, found.budget, found.pricing.position, found.pricing.way_of)
    assert 0.7 * step_s <= bound.bound_s(combinations(job, pins), math.inf, stop=0.0) <= step_s
