"""What the positions of pipelines are estimated to hold, against the same pipelines lowered and simulated.

Models at their published sizes (`benchmarks.grid_jobs`) under pinned degrees, each in the sharding, the cut and with
the recomputation that the search estimates best; reductions under way are left out, and have room of their own.
`off` is the most that any position's peak differs by from its estimate, of the peak.

    python -m benchmarks.estimated_memory [--only 70B] [--json FILE [--resume]]
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial

import msgspec

from benchmarks.grid_jobs import JOBS
from benchmarks.table import Row, main
from paraplan.cost_models.realised_plan import realised
from paraplan.ir.machine.rank_groups import group_of_class, holdings
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint.combinations import combinations
from paraplan.planner.joint.drafting import Drafting
from paraplan.planner.joint.estimate import Estimate, Pricer
from paraplan.planner.joint.estimating import estimate_best
from paraplan.planner.joint.prices.pricing import Pricing
from paraplan.planner.joint.prices.pricing_rounds import PricingRounds
from paraplan.planner.pipeline.pipeline_case import case_of, of_few_microbatches
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.recompute.class_memory import ClassMemory

COLUMNS = ("case", "positions", "estimated_gib", "made_gib", "off")
PINS = {
    "Llama 8B, 64 H100": Constraints(pp=4, mesh=(4, 4), microbatches=16, schedule="zb-h1"),
    "Llama 70B, 256 H100": Constraints(pp=8, mesh=(4, 8), microbatches=64, schedule="zb-v"),
    "Llama 70B, 256 H100, 1f1b": Constraints(pp=8, mesh=(4, 8), microbatches=32, schedule="1f1b"),
    "Llama 70B, 256 H100, interleaved": Constraints(pp=8, mesh=(4, 8), microbatches=32, schedule="interleaved"),
    "GPT 18B, 256 A100": Constraints(pp=8, mesh=(4, 8), microbatches=32, schedule="1f1b"),
    "GPT 175B, 1024 A100": Constraints(pp=8, mesh=(32, 4), microbatches=24, schedule="interleaved"),
    "DeepSeek-V3, 2048 H100, zb-v-lean": Constraints(pp=16, mesh=(16, 8), microbatches=128, schedule="zb-v-lean"),
    "DeepSeek-V3, 2048 H100, 1f1b": Constraints(pp=16, mesh=(16, 8), microbatches=128, schedule="1f1b"),
    "Llama 405B, 16384 H100": Constraints(pp=8, mesh=(256, 8), microbatches=8, schedule="interleaved"),
}


@cache
def _job(name: str) -> Job:
    return JOBS[next(known for known in JOBS if name.startswith(known))].job()


def held(name: str) -> Row:
    """One pipeline, estimated and made."""
    job, pins = _job(name), PINS[name]
    budget = device_budget(job.cluster, pins)
    pricing = Pricing(job, msgspec.structs.replace(pins, pp=None), budget, lambda _: None, Deadline(600.0))
    estimate = estimate_best(PricingRounds(pricing, combinations(job, pins)), math.inf, [])[0]
    drafting = Drafting(pricing, Shardings(lambda *_: _unasked()), False, [])
    sharding = drafting.start(estimate, math.inf).sharding
    assert sharding is not None
    estimated = Pricer(job.cluster, budget).held_bytes(estimate, sharding.decisions.mesh.shape)
    made = _made(drafting, estimate)
    return {
        "positions": len(estimated),
        "estimated_gib": " ".join(f"{each / 2**30:.1f}" for each in estimated),
        "made_gib": " ".join(f"{each / 2**30:.1f}" for each in made),
        "off": max(abs(e - m) / m for e, m in zip(estimated, made, strict=True)),
    }


def _made(drafting: Drafting, estimate: Estimate) -> list[int]:
    """Per position, the peak of its ranks."""
    job, combination, start = drafting.pricing.job, estimate.combination, drafting.start(estimate, math.inf)
    assert start.sharding is not None
    pins = msgspec.structs.replace(combination.pinned(drafting.pricing.constraints), stages=estimate.bounds)
    case = replace(case_of(job, pins), memory=ClassMemory())
    made = realised((of_few_microbatches(case) or case).taking(start.sharding, estimate.taken))
    groups, peaks = holdings(made.plan), dict[tuple[int, ...], int]()
    for actions, peak in zip(made.plan.schedule.classes, made.simulation.peak_bytes, strict=True):
        stages = groups[group_of_class(made.plan, groups, actions)].stages
        peaks[stages] = max(peaks.get(stages, 0), peak)
    return [peaks[stages] for stages in sorted(peaks, key=min)]


def _unasked() -> None:
    raise AssertionError("the sharding is the one that was priced")


CASES = {name: partial(held, name) for name in PINS}

if __name__ == "__main__":
    raise SystemExit(main("estimated memory", CASES, COLUMNS))
