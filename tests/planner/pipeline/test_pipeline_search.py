"""Pipelines with pinned stages: the even cut against brute force, and what cannot be divided is said."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import predict, simulate_plan
from paraplan.ir.errors import ConstraintError, CostModelError, SolverLimitError
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Plan
from paraplan.ir.process.memo import release_caches
from paraplan.lowering.blocks import bundle
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.pipeline import pipeline_search
from paraplan.planner.pipeline.cuts.stage_cuts import chain_memory, cut_chain
from paraplan.planner.pipeline.pipeline import rescheduled
from paraplan.planner.pipeline.pipeline_case import PipelineCase
from paraplan.planner.pipeline.searched_schedule import stage_costs
from paraplan.planner.recompute.stage_memory import in_flight
from paraplan.planner.recompute.stage_recompute import options_of
from paraplan.planner.schedules.complete import complete, orders_of
from paraplan.planner.schedules.event_simulation import evaluate
from paraplan.planner.schedules.named import named_schedule
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.captures import zoo_job
from tests.runtime.pipelines import cut, job_of, pipeline_of, run
from tests.runtime.web import batch, one_stage, program, web


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_slowest_stage_is_as_fast_as_any_cut_makes_it(num_stages: int) -> None:
    draw = random.Random(num_stages)
    seconds = [draw.uniform(0.1, 1.0) for _ in one_stage().program.segments]

    def slowest(inner: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *inner, len(seconds))))

    found = cut_chain(seconds, num_stages)
    assert found is not None
    assert [first for first, _ in found[1:]] == [stop for _, stop in found[:-1]]
    best = min(map(slowest, itertools.combinations(range(1, len(seconds)), num_stages - 1)))
    assert slowest(tuple(first for first, _ in found[1:])) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(6))
def test_a_cut_that_has_to_fit_is_the_best_that_does(seed: int) -> None:
    """Against every cut; some budgets leave none."""
    draw = random.Random(seed)
    n, num_stages = draw.randint(5, 8), draw.randint(2, 4)
    seconds = [draw.random() for _ in range(n)]
    nbytes = [draw.randint(1, 9) for _ in range(n)]
    flying = list(range(num_stages, 0, -1))
    outcomes = set()
    for budget in (0, *sorted(draw.randint(5, 60) for _ in range(6)), 1000):

        def fits(stage: int, first: int, stop: int, budget: int = budget) -> bool:
            return flying[stage] * sum(nbytes[first:stop]) <= budget

        cuts = [
            list(itertools.pairwise((0, *inner, n))) for inner in itertools.combinations(range(1, n), num_stages - 1)
        ]
        slowest = [
            max(sum(seconds[a:b]) for a, b in cut)
            for cut in cuts
            if all(fits(stage, *bound) for stage, bound in enumerate(cut))
        ]
        found = cut_chain(seconds, num_stages, fits)
        outcomes.add(found is None)
        assert (found is None) == (not slowest)
        if found is not None:
            assert list(found) in cuts and all(fits(stage, *bound) for stage, bound in enumerate(found))
            assert max(sum(seconds[a:b]) for a, b in found) == pytest.approx(min(slowest))
    assert outcomes == {True, False}


def test_what_a_stage_holds_is_counted_once() -> None:
    """The tied embedding is used by the first segment and the last."""
    one = one_stage()
    memory = chain_memory(one, [options[0].saved_bytes for options in options_of(one)])
    n = len(one.program.segments)
    apart = memory.kept_bytes(0, 1) + memory.kept_bytes(1, n)
    assert apart - memory.kept_bytes(0, n) == memory.param_bytes["embed.weight"]
    assert memory.stage_bytes(0, n, 3) - memory.stage_bytes(0, n, 1) == 2 * sum(memory.saved_bytes) > 0
    assert in_flight(pipeline_of(one, "1f1b", 2, cut(n, 2)).schedule, (0,)) == 2
    assert in_flight(pipeline_of(one, "gpipe", 2, cut(n, 2)).schedule, (1,)) == 4


def deep() -> Program:
    """Equal layers that save much beside what they keep."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(8, 1))

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output.pow(2).mean()

    return capture(model, {"input": torch.randn(64, 8)}, precision="fp64", loss_fn=loss)


def wide() -> Program:
    """Layers that keep much beside what a batch makes of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())), nn.Linear(64, 1))

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output.pow(2).mean()

    return capture(model, {"input": torch.randn(8, 64)}, precision="fp64", loss_fn=loss)


def test_every_stage_recomputes_as_little_as_its_memory_needs() -> None:
    job = job_of(deep(), 4)
    pins = Constraints(pp=4, dp=1, microbatches=8, schedule="zb-h1")
    free = search(job, pins, certify=False).plan
    assert free.prediction is not None
    peaks = free.prediction.peak_bytes
    assert peaks[0] == max(peaks) > peaks[-1]
    budget, bounds = (peaks[0] + peaks[1]) // 2, tuple((stage.first, stage.stop) for stage in free.stages)
    tight = msgspec.structs.replace(pins, stages=bounds, memory_bytes=budget)
    plan = search(job, tight, certify=False).plan
    assert plan.prediction is not None and max(plan.prediction.peak_bytes) <= budget
    made_again = [sum(len(stage.choices[at].activations) for at in stage.segment_choice) for stage in plan.stages]
    assert made_again[0] > 0 and not any(made_again[1:])
    full = search(job, msgspec.structs.replace(tight, recompute="full"), certify=False).plan
    assert full.prediction is not None
    assert free.prediction.step_s < plan.prediction.step_s < full.prediction.step_s


def test_stages_are_cut_by_memory_where_that_is_fastest() -> None:
    job = job_of(deep(), 4)
    pins = Constraints(pp=4, dp=1, microbatches=8)
    free = search(job, pins, certify=False).plan
    assert free.prediction is not None
    budget = max(free.prediction.peak_bytes) - 1
    plan = search(job, msgspec.structs.replace(pins, memory_bytes=budget, recompute="none"), certify=False).plan
    assert plan.prediction is not None and max(plan.prediction.peak_bytes) <= budget
    bounds = [(stage.first, stage.stop) for stage in plan.stages]
    assert bounds != [(stage.first, stage.stop) for stage in free.stages]
    either = search(job, msgspec.structs.replace(pins, memory_bytes=budget), certify=False).plan
    assert either.prediction is not None and either.prediction.step_s <= 1.02 * plan.prediction.step_s


def test_a_stage_that_keeps_too_much_is_sharded_more() -> None:
    """Everything kept, nothing recomputed: what gives is where parameters, gradients and states lie."""
    job = job_of(wide(), 4)
    pins = Constraints(pp=2, recompute="none", microbatches=2)
    free = search(job, pins, certify=False).plan
    assert free.prediction is not None
    budget = round(0.85 * max(free.prediction.peak_bytes))
    plan = search(job, msgspec.structs.replace(pins, memory_bytes=budget), certify=False).plan
    assert plan.prediction is not None and max(plan.prediction.peak_bytes) <= budget
    bounds = tuple((stage.first, stage.stop) for stage in free.stages)
    same = search(job, msgspec.structs.replace(pins, memory_bytes=budget, stages=bounds), certify=False).plan
    assert same.stages[0].params != free.stages[0].params


def test_degrees_and_schedules_are_searched() -> None:
    job = job_of(program(), 2)
    found = search(job, Constraints(microbatches=4), certify=False).plan
    assert found.prediction is not None
    for degree, schedule in ((1, None), (2, "1f1b"), (2, "zb-v")):
        pinned = search(job, Constraints(pp=degree, schedule=schedule, microbatches=4), certify=False).plan
        assert pinned.prediction is not None
        assert found.prediction.step_s <= pinned.prediction.step_s
    assert any("one stage" in note and "pp=2 " in note for note in found.notes)
    four = job_of(program(), 4)
    one = search(four, Constraints(schedule="1f1b", microbatches=4, tp=2), certify=False).plan
    assert (len(one.stages), one.stages[0].mesh.size) == (2, 2)  # one stage has no schedule, four leave no tp=2
    with pytest.raises(ConstraintError, match=r"stages=.* without pp"):
        search(four, Constraints(pp="auto", stages=((0, 1), (1, 2))))
    with pytest.raises(ConstraintError, match="no schedule 'nothing'"):
        search(job, Constraints(schedule="nothing"))


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


@pytest.mark.parametrize("memory_share", [1.0, 0.8])
def test_a_searched_schedule_is_never_longer_than_a_named_one_and_runs(memory_share: float) -> None:
    n = len(program().segments)
    pins = Constraints(pp=3, stages=((0, 1), (1, n - 1), (n - 1, n)), microbatches=4, recompute="none", dp=1)
    job = job_of(program(), 3)
    free = search(job, msgspec.structs.replace(pins, schedule="gpipe"), certify=False).plan
    assert free.prediction is not None
    budget = round(memory_share * max(free.prediction.peak_bytes))
    pins = msgspec.structs.replace(pins, memory_bytes=budget)
    found = search(job, msgspec.structs.replace(pins, schedule="searched")).plan
    assert found.prediction is not None and max(found.prediction.peak_bytes) <= budget
    assert found.prediction.step_s == simulate_plan(found, verify_plan(found)).step_s
    named = []
    for name in ("gpipe", "1f1b", "zb-h1", "gems", "chimera"):
        try:
            plan = search(job, msgspec.structs.replace(pins, schedule=name), certify=False).plan
        except (ConstraintError, SolverLimitError):
            continue
        assert plan.prediction is not None
        named.append(plan.prediction.step_s)
    assert found.prediction.step_s <= min(named)
    assert (found.schedule.name == "searched") == (found.prediction.step_s < min(named))
    assert any("best named one" in note for note in found.notes)
    assert run(found, web().double(), batch()) <= 1e-9


def test_a_searched_schedule_in_which_ranks_wait_for_each_other_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of values that skip stages, in messages that the search of a schedule does not know."""

    def deadlocks(plan: Plan) -> Plan:
        raise CostModelError(f"{plan.schedule.name} deadlocks")

    monkeypatch.setattr(pipeline_search, "_priced_alone", deadlocks)
    found = search(job_of(program(), 3), Constraints(pp=3, microbatches=4, schedule="searched", dp=1), certify=False)
    assert found.plan.schedule.name != "searched" and "(searched deadlocks)" in "".join(found.plan.notes)


def test_what_stages_cost_is_read_off_simulated_pipelines() -> None:
    """The costs, timed by the schedules' own evaluation, come to what is simulated, up to the last backward."""
    n = len(program().segments)
    bounds = [(0, 1), (1, n - 1), (n - 1, n)]
    one = search(job_of(program(), 1), Constraints(microbatches=4), certify=False).plan
    plan, split = (priced(pipeline_of(one, name, 3, bounds)) for name in ("1f1b", "zb-h1"))
    costs = stage_costs(plan, (split,))
    orders = orders_of(named_schedule("1f1b", 3, 4))
    timed = rescheduled(plan, complete("timed", orders, costs), [(0,), (1,), (2,)])
    programs = verify_plan(timed)
    last_s = max(
        point.end_s
        for made, trace in zip(programs, simulate_plan(timed, programs).traces, strict=True)
        for point in trace.memory
        if made.steps[point.step].action[1] in "FB"
    )
    assert evaluate(orders, costs).step_s == pytest.approx(last_s, rel=0.1)
    assert all(each.input_grad_s + each.weight_grad_s >= 0.9 * each.backward_s > 0 for each in costs)
    assert all(each.activation_bytes > 0 and each.fixed_bytes > 0 for each in costs)


def priced(plan: Plan) -> Plan:
    programs = verify_plan(plan)
    return msgspec.structs.replace(plan, prediction=predict(plan, programs, simulate_plan(plan, programs)))


def test_microbatches_left_out_suit_the_ranks_and_the_schedule() -> None:
    n = program().batch_size
    plan = search(job_of(program(), 4), Constraints(pp=2, dp=2), certify=False).plan
    assert n % (2 * plan.num_microbatches) == 0
    for count in (1, n // 2):
        pinned = search(job_of(program(), 4), Constraints(pp=2, dp=2, microbatches=count), certify=False).plan
        assert plan.prediction and pinned.prediction
        assert plan.prediction.step_s <= pinned.prediction.step_s * (1 + 1e-9)
    with pytest.raises(ConstraintError, match=f"dp=3 does not divide a batch of {n}"):
        search(job_of(program(), 6), Constraints(pp=2, dp=3), certify=False)


def test_a_cluster_need_not_say_how_fast_its_host_updates() -> None:
    job = job_of(program(), 2)
    group = msgspec.structs.replace(job.cluster.groups[0], host_memory_bytes_per_s=0.0, host_memory_bytes=0)
    silent = replace(job, cluster=msgspec.structs.replace(job.cluster, groups=(group,)))
    pins = Constraints(dp=2, microbatches=1)
    assert search(silent, pins, certify=False).plan.stages == search(job, pins, certify=False).plan.stages


def test_a_stage_may_have_nothing_to_train() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = capture(model, {"input": x}, loss_fn=lambda out, _: torch.exp(out).std(), precision="fp64")
    plan = search(job_of(given, 2), Constraints(pp=2, microbatches=1, stages=((0, 1), (1, 3))), certify=False).plan
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(each) for each in programs], model.double())
    trainer.step({"input": x})
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2, groups=[{"match": "bias", "weight_decay": 0.0}])
    groups = [[(len(g["params"]), g["weight_decay"]) for g in each.param_groups] for each in trainer.optimizers]
    assert groups == [[(1, 0.0), (1, 0.01)], [(0, 0.0), (0, 0.01)]]  # as many on every rank, for schedulers


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"pp": 3}, "pp=3 does not divide the cluster's 4 devices; give one of 1, 2, 4"),
        ({"pp": 1, "schedule": "1f1b"}, "schedule='1f1b' without a pipeline"),
        ({"pp": 4, "schedule": "hanayo", "stages": tuple((i, i + 1) for i in range(16))}, "more than the model's"),
        ({"pp": 4, "stages": ((0, 1), (1, 2))}, "2 stages cannot lie on pp=4"),
        ({"pp": 2, "stages": ((0, 2), (3, 4))}, "stage 1 is 3:4; it starts at 2"),
        ({"pp": 2, "stages": ((0, 1), (1, 2))}, "stages end at segment 2"),
        ({"pp": 2, "schedule": "chimera", "microbatches": 1}, "1 microbatches; half of them go each way"),
        ({"pp": 2, "schedule": "nothing"}, "no schedule 'nothing'"),
        ({"pp": 2, "schedule": "interleaved", "microbatches": 1}, "1 microbatch"),
        ({"pp": 2, "microbatches": 3}, "microbatches=3 does not divide a batch of 4; give 2 or 4"),
    ],
)
def test_what_cannot_be_divided_is_said(pins: dict[str, object], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        search(job_of(program(), 4), msgspec.convert(pins, Constraints), certify=False)


def test_a_pipeline_that_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(
        SolverLimitError, match=r"for speed alone, rank class \d peaks at .* at best, of \d+ plans, rank"
    ):
        search(job_of(program(), 2), Constraints(pp=2, microbatches=2, memory_bytes=7000), certify=False)


@pytest.mark.parametrize(
    ("memory_bytes", "schedule", "advised"),
    [
        (7000, "1f1b", r"one segment keeps .* by itself: use a sharding that holds less"),
        (14000, "1f1b", r"use more stages, more microbatches, or a sharding"),
    ],
)
def test_only_what_can_help_is_advised(memory_bytes: int, schedule: str, advised: str) -> None:
    pins = Constraints(pp=2, schedule=schedule, microbatches=2, memory_bytes=memory_bytes)
    with pytest.raises(SolverLimitError, match=advised):
        search(job_of(program(), 2), pins, certify=False)


@pytest.mark.parametrize("schedule", ["zb-v", "chimera"])
def test_more_stages_are_no_advice_where_both_ends_are_on_one_position(schedule: str) -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 64))
    found = capture(model, {"input": torch.randn(4, 64)}, loss_fn=lambda x, _: x.square().mean())
    pins = Constraints(pp=2, schedule=schedule, microbatches=4, memory_bytes=12_000)
    words = rf"the first and the last segment keep .*, and {schedule} has both on one position: use another schedule"
    with pytest.raises(SolverLimitError, match=words):
        search(job_of(found, 2), pins, certify=False)


def test_schedules_of_both_directions_are_planned_with_many_microbatches() -> None:
    """More than fill the pipeline, which other schedules are compared by."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    found = capture(model, {"input": torch.randn(16, 8)}, loss_fn=lambda x, _: x.square().mean())
    for name in ("gems", "chimera"):
        plan = search(job_of(found, 2), Constraints(pp=2, schedule=name, microbatches=8), certify=False).plan
        assert plan.num_microbatches == 8 and plan.schedule.num_replicas == 2
        verify_plan(plan)


@pytest.mark.parametrize("small", [0, bundle.SMALL_BYTES])
def test_pipelines_are_planned_once_more_where_large_parameters_are_gathered_ahead(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones come in bundles either way."""
    seen: list[bool] = []

    def counted(case: PipelineCase, *more: object) -> object:
        seen.append(case.params_ahead)
        return fastest(case, *more)  # type: ignore[arg-type]

    fastest = pipeline_search._fastest
    monkeypatch.setattr(pipeline_search, "_fastest", counted)
    monkeypatch.setattr(bundle, "SMALL_BYTES", small)
    release_caches()
    pins = Constraints(pp=2, dp=2, zero=3, microbatches=4, schedule="1f1b", recompute="full", reserve_bytes=0)
    search(zoo_job("gpt2", 4), pins)
    release_caches()
    assert all(seen) == bool(small)


@pytest.mark.parametrize("name", ["clip", "mixtral"])
def test_a_model_that_reads_the_whole_batch_keeps_its_named_schedule(name: str) -> None:
    """No searched order has all forwards of the last stage first."""
    plan = search(zoo_job(name, 2), Constraints(pp=2, schedule="searched", microbatches=2), 60.0, certify=False).plan
    assert plan.schedule.name == "gpipe" and any("reads the whole batch" in note for note in plan.notes)
