"""Clusters whose groups of nodes differ: the free plan against each group alone and one mesh for all positions.

Per case the free plan (`free_s`: any groups, each position on its own devices), the best plan on the groups alone
(`alone_s`, by group), the best in which all positions have one mesh and one sharding (`one_mesh_s`), the bound of work
(`bound_s`), and what the free plan is: per position its devices, mesh and segments. `worst` is the free step over the
best of the others: above 1 the free search lost.

    python -m benchmarks.mixed [--only A100] [--json FILE [--resume]]      LIMIT=60 seconds a search (environment)
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from benchmarks.joint import llama
from benchmarks.table import Row, main
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.errors import NoPlanError
from paraplan.ir.machine.cluster import ClusterSpec, NodeGroup, check_cluster
from paraplan.ir.machine.device import Link
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.mixed.group_sets import cluster_of
from paraplan.planner.mixed.work_bound import work_bound_s
from paraplan.planner.search import find, search

LIMIT = float(os.environ.get("LIMIT", "60"))
COLUMNS = (
    "case",
    "free_s",
    "alone_s",
    "one_mesh_s",
    "worst",
    "bound_s",
    "positions",
    "microbatches",
    "schedule",
    "cpu_s",
)


def with_link(name: str, bytes_per_s: float, latency_s: float = 1e-5) -> ClusterSpec:
    """A cluster of the catalog with a link between its groups, the groups' own networks kept."""
    cluster = parse_cluster(name)
    groups = tuple(
        msgspec.structs.replace(group, between_nodes=group.between_nodes or cluster.between_nodes)
        for group in cluster.groups
    )
    slow = Link(bytes_per_s=bytes_per_s, latency_s=latency_s, source="between groups: assumed")
    return check_cluster(msgspec.structs.replace(cluster, groups=groups, between_nodes=slow))


def small_groups(speeds: tuple[float, ...], link: float = 1e8) -> ClusterSpec:
    """Nodes of two CPU processes, each group so many times as fast as this machine's."""
    (local,) = ClusterSpec.local(2).groups

    def group(speed: float) -> NodeGroup:
        device = msgspec.structs.replace(
            local.device,
            kind=f"cpu x{speed:g}",
            memory_bytes_per_s=local.device.memory_bytes_per_s * speed,
            flops_per_s={dtype: rate * speed for dtype, rate in local.device.flops_per_s.items()},
        )
        return msgspec.structs.replace(local, device=device)

    between = Link(bytes_per_s=link, latency_s=1e-4, source="between groups: assumed")
    return check_cluster(ClusterSpec(name="cpus", groups=tuple(map(group, speeds)), between_nodes=between))


def links_differ() -> ClusterSpec:
    """Two nodes of 4 H100s with NVLink, and two whose devices talk over PCIe."""
    cluster = with_link("4xH100:2+4xH100:2", 12.5e9)
    pcie = Link(bytes_per_s=2.5e10, latency_s=1e-5, source="PCIe 4: assumed")
    fast, slow = cluster.groups
    return check_cluster(msgspec.structs.replace(cluster, groups=(fast, msgspec.structs.replace(slow, in_node=pcie))))


class Sizes(NamedTuple):
    """Of a Llama and its batch."""

    layers: int
    hidden: int
    inner: int
    heads: int
    batch: int
    sequence: int
    vocabulary: int = 128256


def program_of(sizes: Sizes) -> Program:
    """On the meta device."""
    tokens = torch.zeros(sizes.batch, sizes.sequence, dtype=torch.long, device="meta")
    model = llama(sizes.layers, sizes.hidden, sizes.inner, sizes.heads, sizes.vocabulary)
    return capture(model, {"input_ids": tokens, "labels": tokens}, precision="bf16")


def step_s(job: Job, pins: Constraints) -> float | None:
    """Of the best plan found; None where there is none."""
    try:
        return _step_s(search(job, pins, LIMIT, certify=False).plan)
    except NoPlanError:
        return None


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def positions_of(plan: Plan) -> list[str]:
    """Per position of a plan, in the order of its first stage: devices, mesh and segments."""
    found: dict[tuple[int, ...], list[str]] = {}
    for stage in plan.stages:
        kinds = dict.fromkeys(plan.cluster.group_of(device).device.kind for device in stage.mesh.devices)
        head = f"{stage.mesh.size} {'+'.join(kinds)} {'x'.join(map(str, stage.mesh.shape))}"
        found.setdefault(stage.mesh.devices, [head]).append(f"{stage.first}:{stage.stop}")
    return [" ".join(each) for each in found.values()]


def compared(sizes: Sizes, cluster: ClusterSpec) -> Row:
    """The free plan and what it is held against."""
    started, pins = time.process_time(), Constraints()
    job = Job(program_of(sizes), cluster, OPTIMIZERS["adamw"], ModelRef(display=cluster.name), {})
    plan = search(job, pins, LIMIT, certify=False).plan
    alone = [step_s(_on(job, (index,)), pins) for index in range(len(cluster.groups))]
    try:
        one_mesh = _step_s(find(job, pins, LIMIT, certify=False).plan)
    except NoPlanError:
        one_mesh = None
    others = [each for each in (*alone, one_mesh) if each is not None]
    free_s = _step_s(plan)
    return {
        "free_s": free_s,
        "alone_s": alone,
        "one_mesh_s": one_mesh,
        "worst": free_s / min(others) if others else 0.0,
        "bound_s": work_bound_s(job.program, cluster),
        "positions": positions_of(plan),
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule.name,
        "cpu_s": time.process_time() - started,
    }


def _on(job: Job, groups: tuple[int, ...]) -> Job:
    return Job(job.program, cluster_of(job.cluster, groups), job.optimizer, job.model, job.versions)


SMALL = Sizes(8, 256, 688, 8, 32, 128, vocabulary=2048)
B1 = Sizes(16, 2048, 8192, 32, 128, 4096)
B8 = Sizes(32, 4096, 14336, 32, 128, 8192)
CASES = {
    "small on CPUs x4 + x1": partial(compared, SMALL, small_groups((4.0, 1.0))),
    "small on CPUs x1 + x1, slow link": partial(compared, SMALL, small_groups((1.0, 1.0), 1e7)),
    "small on CPUs x3 + x2 + x1": partial(compared, SMALL, small_groups((3.0, 2.0, 1.0))),
    "1B on 8 A100 + 8 H100": partial(compared, B1, with_link("8xA100-80+8xH100", 3.1e9)),
    "8B on 16 A100 + 16 H100": partial(compared, B8, with_link("8xA100-80:2+8xH100:2", 3.1e9)),
    "8B on 8 A100-40 + 8 H100": partial(compared, B8, with_link("8xA100-40+8xH100", 3.1e9)),
    "8B on 8 H100 NVLink + 8 H100 PCIe": partial(compared, B8, links_differ()),
}

if __name__ == "__main__":
    raise SystemExit(main("mixed", CASES, COLUMNS))
