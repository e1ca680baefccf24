"""Pipelines take about what they are estimated to, over links that differ from hop to hop."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import pytest

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.realised_plan import realised
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.jobs.models import hf_batch, hf_model
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.estimate import Pricer
from paraplan.planner.joint.prices.pricing import Pricing
from paraplan.planner.pipeline.pipeline_case import case_of
from paraplan.planner.schedules.named import NAMED

BUDGET = 1 << 40
LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 8}


def _apart(bytes_per_s: float) -> ClusterSpec:
    """Two nodes of two devices so far apart."""
    cluster = parse_cluster("2xH100:2")
    assert cluster.between_nodes is not None
    link = msgspec.structs.replace(cluster.between_nodes, bytes_per_s=bytes_per_s)
    return msgspec.structs.replace(cluster, between_nodes=link)


def _slow() -> ClusterSpec:
    """A node of four devices with links so slow that positions' devices do all of the work each."""
    cluster = parse_cluster("4xH100")
    (group,) = cluster.groups
    link = msgspec.structs.replace(group.in_node, bytes_per_s=5e9)
    return msgspec.structs.replace(cluster, groups=(msgspec.structs.replace(group, in_node=link),))


CASES = {
    "far nodes": (_apart(2e9), 4, {}),
    "near nodes": (_apart(4e11), 4, {}),
    "slow node": (_slow(), 2, {}),
    "tied": (_slow(), 4, {"tie_word_embeddings": True, "vocab_size": 16384}),
}
"""Clusters, positions, and settings of the model."""


@cache
def _job(case: str) -> Job:
    cluster, _, settings = CASES[case]
    model = hf_model("llama", {**LLAMA, "num_key_value_heads": 4, "vocab_size": 2048, **settings}, meta=True)
    program = capture(model, hf_batch(model, 16, 1024), precision="bf16")
    return Job(program, cluster, OPTIMIZERS["sgd"], ModelRef(display="llama"), {})


@pytest.mark.parametrize("of", CASES)
@pytest.mark.parametrize("schedule", [name for name in NAMED if name != "gems"])
def test_steps_over_slow_and_fast_links(schedule: str, of: str) -> None:
    job, pp, count, each = _job(of), CASES[of][1], 8, NAMED[schedule].stages
    shape = (4 // pp,)
    pins = Constraints(memory_bytes=BUDGET)
    pricing = Pricing(job, pins, BUDGET, lambda _: None, Deadline(600.0))
    combination = Combination(pp, shape, count, schedule, each)
    prices = pricing.priced(combination, [combination])[0]
    found = Pricer(job.cluster, BUDGET).estimate(combination, prices, shape)
    assert found is not None
    pinned = msgspec.structs.replace(combination.pinned(pins), stages=found.bounds if each > 1 else None)
    case = replace(case_of(job, pinned), budget=BUDGET)
    made = realised(case._plan(prices.sharding, found.bounds, ({},) * len(job.program.segments), 1))
    assert 0.8 <= found.step_s / made.simulation.step_s <= 1.15
