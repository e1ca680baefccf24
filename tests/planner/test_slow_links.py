"""Where links make every plan slower than one device, one device's plan is given, and that it is one is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.megatron_gpt import GPTSettings, MegatronGPT
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Link
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.fits import search_room

NOTE = "each of the 4 devices does all of the work"


def slow(cluster: ClusterSpec) -> ClusterSpec:
    (group,) = cluster.groups
    link = group.in_node
    assert link is not None
    slower = msgspec.structs.replace(link, bytes_per_s=link.bytes_per_s / 1e6, latency_s=link.latency_s * 1e4)
    return msgspec.structs.replace(cluster, groups=(msgspec.structs.replace(group, in_node=slower),))


LINK = Link(bytes_per_s=1e8, latency_s=1e-3, source="a slow network")
SLOW_NODES = msgspec.structs.replace(parse_cluster("2xH100:2"), between_nodes=LINK)


def planned_small(cluster: ClusterSpec, progress: Callable[[str], None] = lambda text: None, **pins: Any) -> Plan:
    with torch.device("meta"):
        model = MegatronGPT(GPTSettings(256, 2, 4, 1024, 512, tied=True, flash=True))
        batch = {name: torch.zeros(16, 512, dtype=torch.int64) for name in ("input_ids", "labels")}
    program = capture(model, batch, precision="bf16")
    job = Job(program, cluster, OPTIMIZERS["adamw"], ModelRef(display="gpt"), {})
    return search_room(job, Constraints(**pins), 20.0, progress, certify=False).plan


@pytest.mark.parametrize("is_slow", [False, True])
def test_slow_links(is_slow: bool) -> None:
    with torch.device("meta"):
        model = MegatronGPT(GPTSettings(128, 2, 4, 256, 512, tied=True, flash=True))
        batch = {name: torch.zeros(64, 512, dtype=torch.int64) for name in ("input_ids", "labels")}
    program = capture(model, batch, precision="bf16")

    def planned(cluster: ClusterSpec):  # type: ignore[no-untyped-def]
        job = Job(program, cluster, OPTIMIZERS["adamw"], ModelRef(display="gpt"), {})
        return search_room(job, Constraints(), 20.0, certify=False).plan

    four = parse_cluster("4xH100")
    plan, alone = planned(slow(four) if is_slow else four), planned(parse_cluster("1xH100"))
    assert any(NOTE in note for note in plan.notes) is is_slow
    if is_slow:
        assert plan.prediction.step_s == pytest.approx(alone.prediction.step_s, rel=0.02)
    else:
        assert plan.prediction.step_s < 0.9 * alone.prediction.step_s


def test_a_slow_link_between_nodes() -> None:
    plan, alone = planned_small(SLOW_NODES, mesh=(2, 2)), planned_small(parse_cluster("2xH100"))
    assert plan.prediction is not None and alone.prediction is not None
    assert plan.prediction.step_s <= 1.02 * alone.prediction.step_s
    assert any("each of the 2 sets of 2 devices does all of the work" in note for note in plan.notes)


def test_what_divides_nothing_over_slow_links_is_known_before_anything_is_priced() -> None:
    """So an interrupt gives it, and what takes longer is not looked into."""

    def interrupt(text: str) -> None:
        if text.startswith("prices of stages"):
            raise KeyboardInterrupt

    alone = planned_small(parse_cluster("2xH100"))
    plan = planned_small(SLOW_NODES, interrupt)
    assert plan.prediction is not None and alone.prediction is not None
    assert plan.prediction.step_s <= 1.02 * alone.prediction.step_s
    assert "one stage on mesh 2x2" in {each.what for each in plan.tried}
    quick = planned_small(parse_cluster("2xH100:2"))
    assert "one stage on mesh 2x2" not in {each.what for each in quick.tried}
