"""Other planners' own searches: against every choice of their spaces by their own costs, and what they then plan."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache

import msgspec
import pytest
import torch

import paraplan
from examples.models.mlp import factory
from paraplan.baselines.planners import PLANNERS, plan_by
from paraplan.baselines.planners.choosing import plan_answer
from paraplan.baselines.planners.layer_profile import GroupLinks
from paraplan.baselines.planners.searching.aceso import Config, Search, of_stages
from paraplan.baselines.planners.searching.alpa import least_latency
from paraplan.baselines.planners.searching.dapple import Latencies, StagePhase, latency_s
from paraplan.baselines.planners.searching.flexflow import data_parallel, task_graph, walked
from paraplan.baselines.planners.searching.galvatron import KEPT, SLOWDOWN, Branch, together_s
from paraplan.baselines.planners.searching.mist import StageOption, chain_of, step_of
from paraplan.baselines.planners.searching.nnscaler import fitting_stages
from paraplan.baselines.planners.searching.pipedream import equal_stages, published
from paraplan.baselines.planners.searching.piper import VARIANTS, bounds_of, stage_problem
from paraplan.baselines.planners.searching.whole_pipelines import chimera_s, varuna_s
from paraplan.baselines.planners.searching.workers import overlapped_stages, worker_stages
from paraplan.baselines.planners.task import Answer, Task
from paraplan.ir.errors import ConstraintError, NoPlanError, SolverLimitError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.partition.hybrid_stages import partition_hybrid
from tests.baselines.profiles import every_cut, made_profile
from tests.captures import zoo_job

SEARCHING = [name for name, planner in PLANNERS.items() if not planner.tries.__module__.endswith("fixed")]


@cache
def task_of(devices: int) -> Task:
    """One whose profiles all planners share."""
    return Task(zoo_job("gpt2", devices))


@pytest.mark.parametrize("name", SEARCHING)
def test_answers_make_sense_and_one_fits(name: str) -> None:
    task = Task(zoo_job("mlp", 4), deadline=Deadline(16.0))
    tries = list(PLANNERS[name].tries(task))
    assert tries and len(set(map(str, tries))) == len(tries)
    for answer in tries:
        check_constraints(answer.pins if isinstance(answer, Answer) else answer, 4)
    for answer in tries:
        try:
            plan = plan_answer(task, answer).plan
        except (NoPlanError, ConstraintError):
            continue
        assert plan.prediction is not None and max(plan.prediction.peak_bytes) <= task.budget
        pins = answer.pins if isinstance(answer, Answer) else answer
        assert len({stage.mesh.devices for stage in plan.stages}) == pins.pp
        assert plan.num_microbatches == pins.microbatches
        return
    raise AssertionError(f"{name}: nothing fits")


@pytest.mark.parametrize("seed", range(4))
def test_pipedream_s_stages_are_the_best_replicated_alike(seed: int) -> None:
    profile, bytes_per_s = made_profile(6, seed), 5e8
    (best, *_) = equal_stages(profile, 4, bytes_per_s)

    def time_s(bounds: tuple[tuple[int, int], ...], m: int) -> float:
        work = [
            (sum(profile.seconds[a:b]) + 4 * (m - 1) / m * sum(profile.stored_bytes[a:b]) / bytes_per_s) / m
            for a, b in bounds
        ]
        return max([*work, *(2 * profile.output_bytes[b - 1] / bytes_per_s / m for _, b in bounds[:-1])])

    every = [time_s(bounds, m) for m in (1, 2, 4) for bounds in every_cut(6, 4 // m)]
    assert math.isclose(best.time_s, min(every)) and math.isclose(best.time_s, time_s(best.bounds, best.replicas))
    assert published(profile, 4, bytes_per_s).time_s <= best.time_s * (1 + 1e-12)


def test_dapple_s_latency() -> None:
    stages = (StagePhase(1.0, 2.0, 5.0), StagePhase(2.0, 4.0, 1.0), StagePhase(1.0, 2.0, 0.5))
    assert latency_s(stages[:1], 3) == 1.0 + 2 * 3.0 + 2.0 + 5.0
    # the middle one is the pivot: its three rounds, before them two forwards, after them its and the first's backward
    assert latency_s(stages, 4) == (1.0 + 2.0) + 3 * 6.0 + (4.0 + 2.0 + 5.0)


@pytest.mark.parametrize("seed", range(4))
def test_dapple_s_stages_are_near_the_least_latency(seed: int) -> None:
    latencies = Latencies(made_profile(6, seed), GroupLinks(ClusterSpec.local(4)), 4, 8, "none")
    for replicas in (1, 2):
        found = latencies.best(replicas)
        assert found is not None
        every = [latencies.latency_s(bounds, replicas) for bounds in every_cut(6, 4 // replicas)]
        assert math.isclose(found[0], latencies.latency_s(found[1], replicas))
        assert min(every) * (1 - 1e-12) <= found[0] <= min(every) * (1.2 if replicas == 1 else 1 + 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_piper_s_stages_and_recomputation_are_the_best(seed: int) -> None:
    profile, links = made_profile(5, seed), GroupLinks(ClusterSpec.local(4))
    budget = profile.stage_bytes((0, 3), 1)
    problem = stage_problem(profile, links, 2, 2, 1, 4, budget)
    found = partition_hybrid(problem)
    stages = bounds_of(found)
    assert stages is not None
    reduce_s = [links.all_reduce_s(each, 2) / 4 for each in profile.grad_bytes]

    def slowest_s(bounds: tuple[tuple[int, int], ...], remade: tuple[str, ...]) -> float:
        times = []
        for at, (a, b) in enumerate(bounds):
            flying, kept = len(bounds) - at, profile.kept_bytes()
            held = sum(flying * profile.remade_bytes[remade[i]][i] + kept[i] for i in range(a, b))
            if held > budget - profile.workspace_bytes:
                return math.inf
            sent = sum(profile.output_bytes[end - 1] for end in (a, b) if 0 < end < 5)
            work = sum(profile.seconds_with(remade[i])[i] + reduce_s[i] for i in range(a, b))
            times.append(work + sent / links.message_bytes_per_s(2))
        return max(times)

    cuts = [*every_cut(5, 1), *every_cut(5, 2)]
    every = [slowest_s(c, v) for c in cuts for v in itertools.product(VARIANTS, repeat=5)]
    assert math.isclose(found.time_s, min(every), rel_tol=1e-6)
    assert math.isclose(slowest_s(*stages), min(every), rel_tol=1e-6) and "full" in stages[1]


@pytest.mark.parametrize("seed", range(4))
def test_alpa_s_stages_are_of_least_latency(seed: int) -> None:
    profile = made_profile(7, seed)
    budget = profile.stage_bytes((0, 3), 3)

    def stage_s(first: int, stop: int) -> float:
        return sum(profile.seconds[first:stop]) + 1e-3 * (stop - first) ** 2

    def fits(first: int, stop: int, later: int) -> bool:
        return profile.stage_bytes((first, stop), later + 1) <= budget

    found = least_latency(stage_s, fits, 7, 3, 8)
    every = [
        sum(times) + 7 * max(times)
        for bounds in every_cut(7, 3)
        if all(fits(*bound, 2 - at) for at, bound in enumerate(bounds))
        for times in [[stage_s(*bound) for bound in bounds]]
    ]
    assert found is not None and math.isclose(found[0], min(every))
    assert least_latency(stage_s, lambda *_: False, 7, 3, 8) is None


def test_galvatron_s_layers_are_the_best_within_memory() -> None:
    profile, links = made_profile(5), GroupLinks(ClusterSpec.local(4))
    room = profile.stage_bytes((0, 5), 1, "full") + sum(profile.saved_bytes[:2])
    branch = Branch(profile, links, 1, 4, 1, False, 4, room)
    found = branch.stage(0, 5, 0)
    assert found is not None and set(found[2]) == set(KEPT)

    def cost_s(remade: tuple[str, ...]) -> float:
        held = sum(
            math.ceil((profile.kept_bytes()[i] + profile.remade_bytes[n][i]) * 512 / room) for i, n in enumerate(remade)
        )
        if held > math.floor((room - profile.workspace_bytes - max(profile.saved_bytes)) * 512 / room):
            return math.inf
        return sum(branch.layer_s(i, n, True) + 3 * branch.layer_s(i, n, False) for i, n in enumerate(remade))

    every = [cost_s(remade) for remade in itertools.product(KEPT, repeat=5)]
    assert math.isclose(found[0] + 3 * found[1], min(every)) and math.isclose(cost_s(found[2]), min(every))
    assert together_s(3.0, 1.0) == SLOWDOWN + 2.0 and together_s(3.0, 0.0) == 3.0


def test_chimera_s_and_varuna_s_steps() -> None:
    task, profile = task_of(4), made_profile(4, output_bytes=4)
    bounds = ((0, 2), (2, 4))
    forward_s = max(sum(profile.forward_s[:2]), sum(profile.forward_s[2:]))
    message_s = task.links.message_s(profile.output_bytes[1], 2)
    reduce_s = max(task.links.all_reduce_s(sum(profile.grad_bytes[a:b]), 4) for a, b in bounds)
    wanted = 4 * (forward_s + message_s) + (4 + 2 - 2) * (2 * forward_s + message_s) + reduce_s
    assert math.isclose(chimera_s(task, profile, bounds, 2, 4, "none"), wanted)
    whole = varuna_s(task, profile, ((0, 4),), 4, 4)  # one stage recomputes nothing in Varuna's simulation
    assert math.isclose(whole, 4 * sum(profile.seconds) + task.links.all_reduce_s(sum(profile.grad_bytes), 4))


@pytest.mark.parametrize("seed", range(3))
def test_mist_s_stages_are_the_best_of_its_program(seed: int) -> None:
    draw = random.Random(seed)
    options = {
        (s, *bound): StageOption(draw.uniform(1, 2) * (bound[1] - bound[0]), draw.uniform(0, 9), frozenset())
        for bounds in every_cut(6, 3)
        for s, bound in enumerate(bounds)
        if draw.random() < 0.9
    }
    every = [
        step_of(stages, 5)
        for bounds in every_cut(6, 3)
        for stages in [[options[s, *bound] for s, bound in enumerate(bounds) if (s, *bound) in options]]
        if len(stages) == 3
    ]
    chosen = chain_of(options, 3, 6, 5)
    assert chosen is not None and math.isclose(step_of([options[each] for each in chosen], 5), min(every))
    assert step_of([StageOption(1.0, 0.5, frozenset()), StageOption(2.0, 4.0, frozenset())], 5) == 4 * 2.0 + 3.0 + 3.0


def test_a_state_of_flexflow_s_is_no_worse_than_where_it_began() -> None:
    task = task_of(4)
    _, parallel = task.profiles.decisions(Constraints(pp=1, dp=4, zero=0, microbatches=1))
    graph = task_graph(task, (2, 2))
    state = data_parallel(graph, parallel)
    assert walked(graph, state, 0, 60.0, 300)[0] <= graph.step_s(state)
    whole = [0] * len(state)  # every op on every device
    best_s, best = walked(graph, whole, 0, 60.0, 300)
    assert best_s < graph.step_s(whole) and all(math.isfinite(each) for each in graph.network.work(best))
    afresh = task_graph(task, (2, 2))
    assert afresh.step_s(best) == best_s
    # nothing is waited for less than it computes, and no link less than it carries
    assert best_s >= float(graph.network.work(best).max()) * (1 - 1e-9)


def test_aceso_comes_near_the_best_of_its_space() -> None:
    task = Task(zoo_job("gpt2", 4), Constraints(memory_bytes=3 << 20, reserve_bytes=0))
    ((score, found), *_) = of_stages(task, 2, 60.0)
    search = Search(task)
    every = [
        search.score(Config(2, dp, 2 // dp, samples, bounds, remade))
        for dp in (1, 2)
        for samples in (1, 2, 4)
        for bounds in every_cut(4, 2)
        for remade in itertools.product((False, True), repeat=4)
    ]
    assert score == search.score(found) and score[0] == 0
    assert min(every) <= score and score[1] <= 1.05 * min(every)[1]


@pytest.mark.parametrize("seed", range(3))
def test_stages_of_workers_are_the_best_within_memory(seed: int) -> None:
    profile, links = made_profile(6, seed, output_bytes=1 << 23), GroupLinks(ClusterSpec.local(4))
    budget = profile.stage_bytes((0, 4), 2)
    task = Task(zoo_job("gpt2", 4), Constraints(memory_bytes=budget, reserve_bytes=0))
    cuts = [
        bounds
        for bounds in every_cut(6, 2)
        if all(profile.stage_bytes(bound, 2 - at) <= budget for at, bound in enumerate(bounds))
    ]
    reached = [links.message_s(each, 2) for each in profile.output_bytes]
    reduced = [links.all_reduce_s(each, 2) for each in profile.grad_bytes]

    def worker_s(bounds: tuple[tuple[int, int], ...]) -> float:
        return max(sum(profile.seconds[a:b]) + (reached[a - 1] if a else 0.0) for a, b in bounds)

    def overlapped_s(bounds: tuple[tuple[int, int], ...]) -> float:
        work = [max(sum(profile.seconds[a:b]), sum(reduced[a:b])) for a, b in bounds]
        return max([*work, *(reached[b - 1] for _, b in bounds[:-1])])

    found = worker_stages(task, profile, 2, 2, 8)
    assert found is not None and math.isclose(worker_s(found), min(map(worker_s, cuts)))
    cut = overlapped_stages(task, profile, 2, 2)
    assert cut is not None and math.isclose(cut[1], min(map(overlapped_s, cuts))) and overlapped_s(cut[0]) == cut[1]
    seconds = [max(sum(profile.seconds[a:b]) for a, b in bounds) for bounds in cuts]
    stages = fitting_stages(task, profile, 2, 8, "none")
    assert stages is not None and math.isclose(max(sum(profile.seconds[a:b]) for a, b in stages), min(seconds))


def test_mist_puts_states_on_the_host_where_that_is_allowed() -> None:
    job = zoo_job("gpt2", 2)
    tight = Constraints(memory_bytes=900_000, reserve_bytes=0)
    with pytest.raises(SolverLimitError, match="strategy 'mist': its own search finds nothing that fits"):
        plan_by("mist", job, tight, 30.0)
    plan = plan_by("mist", job, msgspec.structs.replace(tight, offload="host"), 30.0).plan
    assert plan.prediction is not None and max(plan.prediction.peak_bytes) <= 900_000
    assert {layouts.state_tier for stage in plan.stages for layouts in stage.params.values()} == {"host"}


def test_what_the_user_pins_is_kept_in_answers() -> None:
    plan = plan_by("piper", zoo_job("gpt2", 2), Constraints(pp=2, microbatches=4, memory_bytes=1 << 30), 30.0).plan
    assert plan.num_microbatches == 4 and len(plan.stages) == 2
    assert "chosen as piper does" in plan.notes[-1]


def test_recomputation_is_as_the_user_pins_it() -> None:
    job, pins = zoo_job("gpt2", 2), Constraints(pp=2, microbatches=2)
    for recompute, any_is in (("none", False), ("full", True)):
        plan = plan_by("piper", job, msgspec.structs.replace(pins, recompute=recompute), 30.0).plan
        assert any(choice.activations for stage in plan.stages for choice in stage.choices) is any_is


@pytest.mark.parametrize("name", SEARCHING)
def test_their_plans_train_as_one_device_does(name: str) -> None:
    torch.manual_seed(0)
    model, batch = factory(batch=8)
    pp = 1 if name == "flexflow" else 2
    plan = paraplan.compile(model, "local:2", example_inputs=batch, precision="fp64", strategy=name, pp=pp)
    assert "largest error" in plan.check(model, [batch])
