"""Piper: stages with a data and a tensor degree, and recomputation where memory asks for it, by dynamic programming.

`partition.hybrid_stages` is its problem, exactly: time of the slowest stage per sample under a device's memory, 1F1B's
microbatches in flight included. Here stages have equal degrees: for every (data d, tensor t) the layers are cut into as
many stages as that leaves positions, d sharing a stage's samples out, each layer keeping its activations or only its
input; the best degrees are taken. Limits: recomputation is chosen by layer, not by stage, which contains the paper's.
Source: Tarnawski et al. 2021, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paraplan.baselines.planners.layer_profile import GroupLinks, LayerProfile
from paraplan.baselines.planners.searching.degrees import counts, grids, pinned, replaced
from paraplan.baselines.planners.task import Answer, Task
from paraplan.planner.partition.hybrid_problem import HybridProblem, TensorDegree
from paraplan.planner.partition.hybrid_stages import HybridPartition, partition_hybrid
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds

VARIANTS = ("none", "full")
"""What a layer may recompute."""
SOLVED_S = 5.0
"""For one choice of degrees."""


@dataclass(frozen=True)
class EqualDegrees(HybridProblem):
    """The problem in which a device stands for a position: every stage has one."""

    @cached_property
    def data_degrees(self) -> list[int]:
        """One: what replicas share is in the layers' costs."""
        return [1]


def stage_problem(
    profile: LayerProfile, links: GroupLinks, pp: int, dp: int, tp: int, count: int, budget: int
) -> EqualDegrees:
    """Piper's problem under given degrees.

    Times are of a microbatch on every replica; a layer's gradients are reduced once in `count` of them, and a message
    is paid twice, forward and backward.

    Args:
        profile: of the layers.
        links: between devices.
        pp, dp, tp: degrees.
        count: microbatches.
        budget: bytes that a device may hold.
    """
    layers = range(profile.num_layers)
    bytes_per_s = links.message_bytes_per_s(dp * tp)
    reduce_s = np.array([links.all_reduce_s(profile.grad_bytes[i], dp, tp) / count for i in layers])
    edges = tuple((i, i + 1) for i in layers[:-1])
    sent = np.array([[profile.output_bytes[i] / 2] * len(VARIANTS) for i in layers[:-1]]).reshape(-1, len(VARIANTS))
    degree = TensorDegree(
        degree=1,
        time_s=np.stack([np.array(profile.seconds_with(name)) + reduce_s for name in VARIANTS], axis=1),
        param_bytes=np.zeros((len(layers), len(VARIANTS))),
        per_microbatch_bytes=np.stack([np.array(profile.remade_bytes[name], float) for name in VARIANTS], axis=1),
        always_bytes=np.stack([np.array(profile.kept_bytes(), float)] * len(VARIANTS), axis=1),
        entering_bytes=sent,
        leaving_bytes=sent,
    )
    room = float(budget - profile.workspace_bytes)
    return EqualDegrees(len(layers), edges, (degree,), pp, room, bytes_per_s, count)


def bounds_of(found: HybridPartition) -> tuple[Bounds, tuple[str, ...]] | None:
    """Stages of layers, and what each layer recomputes."""
    if found.stages is None:
        return None
    bounds = tuple((min(stage.nodes), max(stage.nodes) + 1) for stage in found.stages)
    return bounds, tuple(VARIANTS[variant] for stage in found.stages for variant in stage.variants)


def piper(task: Task) -> Iterator[Answer]:
    """The least time per sample first."""
    found = []
    for pp, dp, tp in grids(task):
        for samples, count in counts(task, dp):
            profile = task.profiles.of(tp, samples)
            if profile is None or count < pp or task.deadline.passed_s > task.deadline.limit_s / 2:
                continue
            problem = stage_problem(profile, task.links, pp, dp, tp, count, task.budget)
            partition = partition_hybrid(problem, SOLVED_S)
            stages = bounds_of(partition)
            if stages is not None and len(stages[0]) == pp:
                found.append((partition.time_s / (samples * dp), pp, dp, tp, count, stages))
    for _, pp, dp, tp, count, (bounds, remade) in sorted(found, key=lambda each: each[0]):
        pins = replaced(pinned(task, pp, dp, tp, count), stages=bounds if pp > 1 else None)
        yield Answer(pins, remade)
