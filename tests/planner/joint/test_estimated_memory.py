"""What positions are estimated to hold is what their ranks hold as simulated, whatever they recompute."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import pytest
import torch

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.realised_plan import realised
from paraplan.ir.machine.rank_groups import group_of_class, holdings
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.jobs.models import hf_batch, hf_model
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.estimate import Estimate, Pricer
from paraplan.planner.joint.prices.pricing import Pricing
from paraplan.planner.pipeline.cuts.balanced_cuts import cut_balanced
from paraplan.planner.pipeline.pipeline_case import case_of
from paraplan.planner.schedules.order_times import named_times

BUDGET = 1 << 40
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = {"num_layers": 3, "num_decoder_layers": 3}
SETTINGS = {
    "llama": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, **HEADS},
    "t5": {"d_model": 256, "d_ff": 1024, "num_heads": 4, "d_kv": 64, "decoder_start_token_id": 0, **LAYERS},
}


@cache
def _job(name: str) -> Job:
    torch.manual_seed(0)
    model = hf_model(name, {**SETTINGS[name], "vocab_size": 512}, meta=False)
    program = capture(model, hf_batch(model, 32, 64), precision="bf16")
    return Job(program, parse_cluster("4xH100"), OPTIMIZERS["adamw"], ModelRef(display=name), {})


@pytest.mark.parametrize("takes", ["nothing", "all", "some"])
@pytest.mark.parametrize(
    ("schedule", "each", "count"),
    [
        *(("1f1b", 1, 8), ("gpipe", 1, 4), ("zb-h1", 1, 8), ("zb-v", 2, 8), ("interleaved", 2, 2)),
        *(("interleaved", 3, 8), ("interleaved-zb", 3, 8), ("zb-v-lean", 2, 8), ("1f1b-zb", 1, 8)),
    ],
)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_positions_hold_what_they_are_estimated_to(name: str, schedule: str, each: int, count: int, takes: str) -> None:
    job, pp = _job(name), 2
    pins = Constraints(pp=pp, mesh=(2,), microbatches=count, schedule=schedule, memory_bytes=BUDGET)
    pricing = Pricing(job, _free(pins), BUDGET, lambda _: None, Deadline(600.0))
    combination = Combination(pp, (2,), count, schedule, each)
    prices = pricing.priced(combination, [combination])[0]
    orders = named_times(schedule, pp, count, each)
    bounds = cut_balanced(prices.seconds, orders.held, len(prices.seconds), count)
    assert bounds is not None
    taken = [_taken(i, len(options), takes) for i, options in enumerate(prices.options)]

    case = replace(
        case_of(job, msgspec.structs.replace(combination.pinned(pins), stages=bounds if each > 1 else None)),
        budget=BUDGET,
    )
    kinds = [segment.kind for segment in job.program.segments]
    fates = tuple(prices.sharding.options[kinds[i]][option].activations for i, option in enumerate(taken))
    made = realised(case._plan(prices.sharding, bounds, fates, 1))
    peaks = dict[tuple[int, ...], int]()
    held = holdings(made.plan)
    for actions, peak in zip(made.plan.schedule.classes, made.simulation.peak_bytes, strict=True):
        mine = held[group_of_class(made.plan, held, actions)].stages
        peaks[mine] = max(peaks.get(mine, 0), peak)

    estimate = Estimate(combination, 0.0, 0, bounds, prices, tuple(taken))
    found = Pricer(job.cluster, BUDGET).held_bytes(estimate, (2,))
    for estimated, mine in zip(found, orders.held, strict=True):
        assert 0.96 <= estimated / peaks[mine] <= 1.1


def _free(pins: Constraints) -> Constraints:
    return msgspec.structs.replace(pins, pp=None, schedule=None)


def _taken(segment: int, options: int, takes: str) -> int:
    return {"nothing": 0, "all": options - 1, "some": segment % options}[takes]
