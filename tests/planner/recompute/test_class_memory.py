"""What rank classes of pipelines need by their first microbatches, against programs of all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import msgspec
import pytest
import torch
from torch import nn

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import reserved_of
from paraplan.cost_models.realised_plan import realised
from paraplan.ir.execution.schedule import parse_action
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.ir.process.memo import release_caches
from paraplan.lowering import lower_alone, rank_classes
from paraplan.lowering.rank_classes import lower_anew
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.pipeline.pipeline import activations_of, with_activations
from paraplan.planner.pipeline.pipeline_case import PipelineCase, case_of
from paraplan.planner.pipeline.prices.stage_prices import Sharding
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.recompute import class_memory
from paraplan.planner.recompute.class_memory import ClassMemory, until_full
from paraplan.planner.recompute.presets import preset_activations
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.sharding.solve import choose

LIMITS = SolveLimits(time_s=60.0, memory_bytes=1 << 60, certify=False)
ROOM = 1 << 40
SCHEDULES = tuple(name for name in NAMED if name != "gems")


def _choose(job: Job, constraints: Constraints, kept: float | None, known: object) -> Decisions:
    mesh = candidate_meshes(job, constraints)[0]
    return choose(job, mesh, constraints.microbatches or 1, constraints, LIMITS, kept)


@cache
def _case(schedule: str, positions: int, count: int, seed: int = 0) -> tuple[PipelineCase, Sharding]:
    rng = random.Random(seed)
    widths = [rng.choice((128, 256, 512)) for _ in range(8)]
    blocks = (nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64)) for width in widths)
    program = capture(
        nn.Sequential(*blocks), {"input": torch.zeros(64 * count, 64)}, loss_fn=lambda out, _: out.square().mean()
    )
    job = Job(program, parse_cluster(f"{positions}xH100"), OPTIMIZERS["adamw"], ModelRef(display="blocks"), {})
    case = case_of(job, Constraints(pp=positions, mesh=(1,), microbatches=count, schedule=schedule))
    return case, Shardings(_choose).get(case.part, case.inner)


def _plan(schedule: str, positions: int, count: int, recompute: str = "none", seed: int = 0) -> Plan:
    case, sharding = _case(schedule, positions, count, seed)
    return case._plan(sharding, case._bounds(sharding), preset_activations(case.job.program, recompute), 1)


def test_actions_until_a_rank_is_full() -> None:
    ranks = _plan("1f1b", 4, 16).schedule.classes
    kept = [1 + max(parse_action(text).microbatch for text in until_full(actions)) for actions in ranks]
    assert kept == [6, 5, 4, 3], "as many as are in flight, the one whose backward is followed by a forward, one more"
    for actions in ranks:
        few = until_full(actions)
        assert [text for text in actions if text in set(few)] == list(few)
        assert few[-2:] == actions[-2:], "what is done once a step"
    (first, *_) = _plan("gpipe", 2, 8).schedule.classes
    assert until_full(first) == first


@pytest.mark.parametrize(("schedule", "seed"), [(name, seed) for name in SCHEDULES for seed in range(2)])
def test_what_is_needed_is_what_programs_of_all_microbatches_need(schedule: str, seed: int) -> None:
    """To the byte where no microbatch is left out; else at most a tenth below (with whole backwards what a receive
    that is posted early holds), and exactly once a plan was seen."""
    plan = _plan(schedule, 2 if schedule == "chimera" else 4, 16, "none", seed)
    made, memory = realised(plan), ClassMemory()
    found, peaks = memory.needed(plan, ROOM), made.simulation.peak_bytes
    if schedule in ("gpipe", "chimera"):
        assert found == peaks
    if schedule == "1f1b":
        assert {peak - each for each, peak in zip(found, peaks, strict=True)} == {0, 64 * 64 * 4}
    assert all(0.9 * peak <= each <= peak for each, peak in zip(found, peaks, strict=True))
    assert memory.seen(made, ROOM) == memory.needed(plan, ROOM) == peaks


def test_what_allocators_reserve_counts_where_it_is_to() -> None:
    plan = _plan("1f1b", 4, 16)
    made, memory = realised(plan), ClassMemory(reserves=True)
    reserved = reserved_of(plan, made.programs, ROOM)
    assert memory.needed(plan, ROOM) == reserved == memory.seen(made, ROOM)
    assert all(each > peak for each, peak in zip(reserved, made.simulation.peak_bytes, strict=True))


def test_what_was_seen_corrects_what_is_found_of_others() -> None:
    """Receives are posted earlier where other ranks send earlier."""
    plan, other = _plan("1f1b", 4, 16), _plan("1f1b", 4, 16, "full")
    memory, true = ClassMemory(), realised(plan)
    least = memory.needed(other, ROOM)
    short = [peak - each for peak, each in zip(true.simulation.peak_bytes, memory.needed(plan, ROOM), strict=True)]
    memory.seen(true, ROOM)
    assert any(short)
    assert memory.needed(other, ROOM) == tuple(map(sum, zip(least, short, strict=True)))


def test_what_is_known_is_not_lowered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[int] = []

    def counted(plan: Plan, classes: list[tuple[str, ...]]) -> object:
        lowered.append(len(classes))
        return lower_alone(plan, classes)

    monkeypatch.setattr(class_memory, "lower_alone", counted)
    memory, plan = ClassMemory(), _plan("1f1b", 4, 16)
    assert memory.needed(plan, ROOM) == memory.needed(plan, ROOM // 2) and lowered == [4, 0]
    memory.needed(_plan("1f1b", 4, 16, "full"), ROOM)
    assert lowered[2] > 0
    reserving = ClassMemory(reserves=True)
    reserving.needed(plan, ROOM)
    reserving.needed(plan, ROOM // 2)
    assert lowered[3:] == [4, 4], "of other room another amount may be reserved"


def test_what_all_microbatches_fill_is_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what it needs and to be realised."""
    lowered: list[Plan] = []

    def counted(plan: Plan) -> object:
        lowered.append(plan)
        return lower_anew(plan)

    memory, plan = ClassMemory(), _plan("gpipe", 4, 8)
    release_caches()
    monkeypatch.setattr(rank_classes, "lower_anew", counted)
    found = memory.needed(plan, ROOM)
    assert found == realised(plan).simulation.peak_bytes and len(lowered) == 1


def test_classes_that_need_too_much_make_more_again() -> None:
    """All else of the plan stays, its options too; of the others nothing changes."""
    plan = msgspec.structs.replace(_plan("1f1b", 4, 16), reducing_bytes=12345, parted_messages=True)
    case, sharding = _case("1f1b", 4, 16)
    memory = ClassMemory()
    needed = memory.needed(plan, ROOM)
    budget = max(needed) - (max(needed) - min(needed)) // 8
    over = [each > budget for each in needed]
    assert any(over) and not all(over)
    less = replace(case, budget=budget).lessened(sharding, plan, needed)
    assert less is not None
    again = memory.needed(less, ROOM)
    for was, now, is_over in zip(needed, again, over, strict=True):
        assert now < was if is_over else now == was
    assert (less.reducing_bytes, less.parted_messages) == (12345, True)
    assert [(each.first, each.stop) for each in less.stages] == [(each.first, each.stop) for each in plan.stages]
    assert sum(map(bool, activations_of(less))) > sum(map(bool, activations_of(plan))) == 0
    assert with_activations(less, activations_of(plan)).stages == plan.stages
    assert realised(less).simulation.step_s >= realised(plan).simulation.step_s
