"""The joint search's parts against the same done otherwise: cuts, shardings, whole simulated steps."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.realised_plan import realised
from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.mesh import make_mesh
from paraplan.ir.plan import Plan
from paraplan.jobs.inputs import hf_batch
from paraplan.jobs.models import hf_model
from paraplan.planner.assemble import Decisions, Job, assemble
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline, SolveLimits
from paraplan.planner.joint import combinations as combinations_module
from paraplan.planner.joint.combinations import Combination, combinations
from paraplan.planner.joint.drafting import EASY, WHOLE, PlanningEffort
from paraplan.planner.joint.prices import sharding_front
from paraplan.planner.joint.prices.sharding_front import AS_QUICK, front, with_price
from paraplan.planner.one_stage.one_stage_plans import is_piped
from paraplan.planner.pipeline.cuts.stage_cuts import chain_memory, cut_chain, cut_evenly
from paraplan.planner.pipeline.prices.shorten import KEPT, runs_of, shortened
from paraplan.planner.pipeline.prices.stage_prices import Sharding
from paraplan.planner.search import search
from paraplan.planner.sharding.formulate import formulate
from paraplan.planner.sharding.network.cost_network import Network, Row
from paraplan.planner.sharding.network.optimise import optimise
from paraplan.planner.sharding.solve import decisions_of, problem_of
from paraplan.planner.sharding.space import Space
from tests.captures import zoo_job
from tests.planner.sharding.networks import every_choice, random_network
from tests.runtime.pipelines import job_of

LIMITS = SolveLimits(time_s=60.0, memory_bytes=1 << 60, relative_gap=1e-6, certify=False)
FREE = Constraints(recompute="none", reserve_bytes=0)


def test_even_cuts_are_those_of_the_dynamic_program() -> None:
    draw = random.Random(3)
    for _ in range(400):
        n = draw.randint(1, 12)
        stages, tail = draw.randint(1, n), draw.randint(0, n)
        seconds = [draw.choice([0.0, 1.0, draw.random()]) for _ in range(n)]
        last = stages - 1
        exact = cut_chain(seconds, stages, lambda stage, _, stop, t=tail, z=last: stop <= t or stage == z)  # type: ignore[misc]
        found = cut_evenly(seconds, stages, tail)
        assert (exact is None) == (found is None)
        if exact is None or found is None:
            continue
        slowest = [max(sum(seconds[a:b]) for a, b in cut) for cut in (exact, found)]
        assert slowest[1] == pytest.approx(slowest[0], abs=1e-9)
        assert len(found) == stages and all(a < b for a, b in found) and (found[0][0], found[-1][1]) == (0, n)
        assert all(stop <= tail or stage == last for stage, (_, stop) in enumerate(found))


def _kept(job: Job, plan: Plan) -> int:
    memory = chain_memory(plan, [0] * len(job.program.kinds))
    return memory.kept_bytes(0, len(job.program.segments))


def test_shardings_of_the_front_keep_less_and_less_from_that_of_least_work_on(monkeypatch: pytest.MonkeyPatch) -> None:
    job = zoo_job("gpt2", 4)
    mesh = make_mesh((2, 2), ("axis0", "axis1"))
    pinned = msgspec.structs.replace(FREE, mesh=(2, 2))
    chosen: list[tuple[int, ...]] = []

    def recorded(job: Job, space: Space, *args: Any) -> Decisions:
        chosen.append(tuple(args[2]))
        return decisions_of(job, space, *args)

    monkeypatch.setattr(sharding_front, "decisions_of", recorded)
    found = list(front(job, mesh, 1, pinned, LIMITS, (0.05, 0.5, 5.0)))
    kept = [_kept(job, assemble(job, decisions)) for decisions in found]
    assert len(found) > 1 and kept == sorted(kept, reverse=True)
    space = problem_of(job, mesh, 1, pinned)
    least = optimise(formulate(space).network, relative_gap=1e-6)
    first = next(each for each in chosen if decisions_of(job, space, mesh, 1, each, False) == found[0])
    assert _work(space, first) <= (1 + AS_QUICK) * least.objective * (1 + LIMITS.relative_gap)


def _work(space: Space, chosen: Sequence[int]) -> float:
    """What the solver makes of options chosen."""
    network = formulate(space).network
    fixed = [np.array([option]) for option in chosen]
    kept = [*fixed, *(np.arange(len(prices)) for prices in network.prices[len(fixed) :])]
    return optimise(network.restricted(kept)).objective


@pytest.mark.parametrize("seed", range(40))
def test_a_price_on_what_is_held_gives_the_lower_hull(seed: int) -> None:
    network = random_network(seed, rows=1)
    (row,) = network.rows
    held = Row(row.name, 1e9, row.held)
    free = Network(network.prices, network.factors)
    choices = every_choice(free)
    for price in (0.0, 0.3, 3.0):
        found = optimise(with_price(free, held, price))
        if not choices:
            assert found.choices is None
            continue
        amounts = [sum(float(held.held[v][each[v]]) for v in held.held) for each, _ in choices]
        least = min(float(work.sum()) + price * amount for (_, work), amount in zip(choices, amounts, strict=True))
        assert found.objective == pytest.approx(least, rel=1e-6, abs=1e-9)


def _sharding(job: Job, shape: tuple[int, ...], microbatches: int) -> Sharding:
    mesh = make_mesh(shape, tuple(f"axis{i}" for i in range(len(shape))))
    pinned = msgspec.structs.replace(FREE, mesh=shape, microbatches=microbatches)
    return Sharding(job, next(front(job, mesh, microbatches, pinned, LIMITS, ())))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_prices_make_up_the_step_of_one_stage(microbatches: int) -> None:
    """But for what is reduced, which the backward hides or not."""
    job = zoo_job("gpt2", 2)
    sharding = _sharding(job, (2,), microbatches)
    prices, whole = sharding.prices, realised(sharding.whole).simulation.step_s
    least_s = microbatches * sum(prices.seconds) + prices.update_s
    assert 0.95 * least_s <= whole <= 1.05 * (least_s + prices.reduce_s + prices.gather_s)
    assert prices.kept_bytes((2,)) == _kept(job, sharding.whole)
    assert prices.kept_bytes((1,)) >= prices.kept_bytes((2,))


@pytest.mark.parametrize("layers", [8, 13])
def test_few_layers_are_priced_like_all(layers: int) -> None:
    """Against the plan of all layers, segment by segment."""
    settings = {
        "n_embd": 16,
        "n_head": 2,
        "vocab_size": 32,
        "n_positions": 8,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = hf_model("gpt2", {**settings, **drops, "n_layer": layers}, meta=True)
    job = job_of(capture(model, hf_batch(model, 4, 8), precision="fp32"), 2)
    sharding = _sharding(job, (2,), 4)
    runs = runs_of(sharding.whole)
    short = shortened(sharding.whole, runs)
    assert runs and len(short.plan.program.segments) < len(job.program.segments)
    assert [job.program.segments[i].kind for i in range(len(short.stands_for))] == [
        short.plan.program.segments[i].kind for i in short.stands_for
    ]
    step_s, few = realised(sharding.whole).simulation.step_s, realised(short.plan).simulation.step_s
    longer = realised(shortened(sharding.whole, runs, runs[0]).plan).simulation.step_s
    assert few + (runs[0].repeats - KEPT) * (longer - few) == pytest.approx(step_s, rel=1e-3)


def test_combinations_are_what_pins_leave() -> None:
    job = zoo_job("gpt2", 4)
    every = combinations(job, FREE)
    assert {each.pp for each in every} == {1, 2, 4} and {each.mesh for each in every if each.pp == 2} >= {(2,)}
    assert all(each.num_stages <= len(job.program.segments) for each in every)
    pinned = combinations(job, msgspec.structs.replace(FREE, tp=2, schedule="1f1b", microbatches=2))
    assert {(each.pp, each.mesh, each.schedule, each.microbatches) for each in pinned} == {(2, (), "1f1b", 2)}
    with pytest.raises(ConstraintError):
        combinations(job, msgspec.structs.replace(FREE, tp=3))


def test_ranks_may_outnumber_samples_and_nodes_need_be_no_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(zoo_job("gpt2", 4), cluster=parse_cluster("6xV100-32:2"))
    assert few.program.batch_size == 8
    assert {each.mesh for each in combinations(few, FREE) if each.pp == 1} == {(12,), (6, 2), (4, 3), (2, 6)}
    assert combinations(few, msgspec.structs.replace(FREE, mesh=(6,), pp=2)), "as where nothing is pinned"
    monkeypatch.setattr(combinations_module, "APART", 8)
    assert {each.mesh for each in combinations(few, FREE) if each.pp == 1} == {(4, 3), (2, 6)}
    many = replace(few, cluster=parse_cluster("8xH100:16"))
    assert {each.mesh for each in combinations(many, FREE) if each.pp == 1} == {(128,), (64, 2), (32, 4), (16, 8)}


def test_a_mesh_of_a_part_of_the_devices_is_a_stages() -> None:
    job = replace(zoo_job("gpt2", 4), cluster=parse_cluster("3xRTX4090:2"))
    plan = search(job, Constraints(mesh=(3,)), certify=False).plan
    assert len(plan.stages) == 2 and {stage.mesh.shape for stage in plan.stages} == {(3,)}
    piped = Constraints(mesh=(3,)), Constraints(pp=1), Constraints(schedule="1f1b"), Constraints(tp=4)
    assert all(is_piped(each, 6) for each in piped)
    assert not any(is_piped(each, 6) for each in (Constraints(), Constraints(mesh=(2, 3)), Constraints(tp=3, zero=1)))


def test_the_pipeline_found_is_about_as_fast_as_the_best_pinned_one() -> None:
    job = zoo_job("gpt2", 4)
    pins = msgspec.structs.replace(FREE, schedule="1f1b", microbatches=4)
    found = search(job, pins, certify=False).plan
    pinned = [search(job, msgspec.structs.replace(pins, pp=pp), certify=False).plan for pp in (2, 4)]
    assert found.prediction is not None and any("were estimated" in note for note in found.notes)
    assert found.prediction.step_s <= 1.02 * min(p.prediction.step_s for p in pinned if p.prediction is not None)


def test_what_pipelines_take_to_plan_is_learned() -> None:
    effort, one, few = PlanningEffort(100), Combination(4, (2,), 64, "1f1b", 1), Combination(4, (2,), 8, "1f1b", 1)
    first, more = effort.seconds(one), effort.seconds(Combination(4, (2,), 128, "1f1b", 1))
    assert 0 < effort.seconds(few) < first == more, "full rounds are carried on"
    assert effort.seconds(Combination(1, (8,), 64, "1f1b", 1)) == 0
    effort.took(one, 3 * first / WHOLE)
    assert effort.seconds(one) == pytest.approx(2 * first)
    little = PlanningEffort(10)
    little.took(few, 30 * little.seconds(few) / WHOLE)  # what takes long of few calls is not their number
    assert little.seconds(one) < 2 * little.seconds(few)


def test_what_is_planned_in_a_small_part_of_the_time_left_is_tried_as_if_all_were_left() -> None:
    effort, few, long = PlanningEffort(10), Combination(4, (2,), 8, "1f1b", 1), Deadline(6000.0)

    def left(passed: float) -> float:
        long._started = time.perf_counter() - passed * long.limit_s
        return effort.left(few, long)

    effort.took(few, 60.0)
    assert left(0.1) == pytest.approx(1.0)
    assert left(0.8) == pytest.approx(1200.0 / (EASY * effort.seconds(few)), rel=1e-2) and 0.5 < left(0.8) < 1
    effort.took(few, 600.0)
    assert left(0.6) == pytest.approx(0.4 - effort.seconds(few) / 6000.0, rel=1e-2)
    assert left(0.999) < 0
