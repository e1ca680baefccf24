"""Steps of many microbatches carried on from those of few are what lowering and simulating all of them finds."""

from __future__ import annotations

import itertools
from functools import cache

import msgspec
import pytest
import torch
from torch import nn

from paraplan.capture import capture
from paraplan.cost_models.predict import reserved_of
from paraplan.cost_models.realised_plan import realised
from paraplan.cost_models.simulator.rank_trace import RankTrace
from paraplan.cost_models.simulator.repeated_rounds import full_round
from paraplan.ir.execution.schedule import parse_action
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.pipeline.pipeline_case import case_of
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.schedules.full_rounds import as_a_whole, carried, programs_of
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.search import search
from paraplan.planner.sharding.solve import choose

LIMITS = SolveLimits(time_s=60.0, memory_bytes=1 << 60, certify=False)
CARRIED = [
    ("1f1b", 2, 1, 12, 2),
    ("1f1b", 4, 1, 26, 1),
    ("zb-h1", 3, 1, 18, 1),
    ("interleaved", 2, 2, 12, 2),
    ("interleaved", 2, 4, 16, 1),
    ("zb-v", 2, 2, 16, 1),
    ("hanayo", 2, 2, 16, 1),
    ("1f1b-zb", 2, 1, 12, 1),
    ("interleaved-zb", 2, 2, 12, 1),
    ("zb-v-lean", 2, 2, 16, 1),
]
"""Schedule, positions, stages a position, microbatches, devices a position."""


def _choose(job: Job, constraints: Constraints, kept: float | None, known: object) -> Decisions:
    mesh = candidate_meshes(job, constraints)[0]
    return choose(job, mesh, constraints.microbatches or 1, constraints, LIMITS, kept)


@cache
def _job(rows: int, devices: int) -> Job:
    widths = (128, 256, 64, 512, 256, 128, 64, 256)
    blocks = (nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64)) for width in widths)
    model = nn.Sequential(*blocks)
    program = capture(model, {"input": torch.zeros(rows, 64)}, loss_fn=lambda out, _: out.square().mean())
    cluster = ClusterSpec.local(devices)
    return Job(program, cluster, OPTIMIZERS["adamw"], ModelRef(display="blocks"), {})


def _plan(schedule: str, positions: int, each: int, count: int, width: int = 1) -> Plan:
    job = _job(count * width, positions * width)
    pins = Constraints(pp=positions, mesh=(width,), microbatches=count, schedule=schedule)
    if each > 1:
        bounds = [round(at * len(job.program.segments) / (positions * each)) for at in range(positions * each + 1)]
        pins = msgspec.structs.replace(pins, stages=tuple(itertools.pairwise(bounds)))
    case = case_of(job, pins)
    return case.begun(Shardings(_choose).get(case.part, case.inner), ()).plan


def _times(trace: RankTrace) -> dict[object, float]:
    each = {name: getattr(trace, name) for name in ("step_s", "compute_s", "exposed_comm_s", "bubble_s")}
    return {**each, **trace.comm_s, **{("stalled", stream): s for stream, s in trace.stalled_s.items()}}


@pytest.mark.parametrize(("schedule", "positions", "each", "count", "width"), CARRIED)
def test_what_is_carried_on_is_what_all_microbatches_take(
    schedule: str, positions: int, each: int, count: int, width: int
) -> None:
    _check_carried(_plan(schedule, positions, each, count, width))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [6, 24])
def test_so_it_is_of_one_stage(zero: int, count: int) -> None:
    pins = Constraints(dp=2, zero=zero, microbatches=count, pp=1)
    plan = search(_job(2 * count, 2), pins).plan
    _check_carried(msgspec.structs.replace(plan, reduce_every=1))
    late = msgspec.structs.replace(plan, reduce_every=count)
    assert as_a_whole(late).simulation.step_s == realised(late).simulation.step_s


def test_updates_alike_are_no_rounds() -> None:
    """States of equal layers come from the host and go there one after another, alike, for longer than a microbatch."""
    program = programs_of(_plan("1f1b", 2, 1, 24))[0]
    found = full_round(program, 2)
    assert found is not None
    update = next(step for step in program.steps if parse_action(step.action).microbatch < 0)
    longer = msgspec.structs.replace(program, steps=(*program.steps, *[update] * 3 * found.length))
    assert full_round(longer, 2) == found


def _check_carried(plan: Plan) -> None:
    found, whole = carried(plan), realised(plan)
    assert found is not None, "its rounds are alike"
    assert sum(len(each.steps) for each in found.sample.programs) < sum(len(each.steps) for each in whole.programs)
    assert found.simulation.rank_class == whole.simulation.rank_class
    for mine, other in zip(found.simulation.traces, whole.simulation.traces, strict=True):
        assert mine.peak_bytes == other.peak_bytes and mine.tier_peak_bytes == other.tier_peak_bytes
        expected = _times(other)
        assert _times(mine).keys() == expected.keys()
        for name, seconds in _times(mine).items():
            assert seconds == expected[name], name
    assert reserved_of(plan, found.sample.programs) == reserved_of(plan, whole.programs)
    assert programs_of(plan) is found.sample.programs and as_a_whole(plan).simulation is found.simulation


def test_what_has_no_full_rounds_is_simulated_as_a_whole() -> None:
    assert {name for name, *_ in CARRIED} == NAMED.keys() - {"gpipe", "gems", "chimera"}
    for plan in (_plan("gpipe", 2, 1, 24), _plan("chimera", 2, 1, 24), _plan("1f1b", 4, 1, 12)):
        assert carried(plan) is None
        assert as_a_whole(plan).simulation.step_s == realised(plan).simulation.step_s
