"""PipeDream's partition, and that of PipeDream-2BW; under synchronous 1F1B.

PipeDream cuts a chain of layers into stages, each replicated over m workers, so that the slowest of stages and messages
takes least (`partition.replicated_stages` is its recurrence, with c, w and a of computation, weights and outputs):

    stage(k, j, m) = (c + 4 (m - 1) / m · w / B) / m            message after layer j, m workers:  2 a_j / (B m)

Here stages are replicated alike: for every m that divides the workers, the chain is cut into workers / m stages,
exactly, and the best m taken. It takes the largest minibatch that fits, among those of which a step has as many as
stages, without which the pipeline would never be full.

PipeDream-2BW has stages of equally many layers and searches width w, depth d, microbatch b and whether to recompute
exhaustively, by the throughput b w / t of

    t = max(max_i (T_comp_i + T_message_i), T_all-reduce(w) / microbatches)

among those whose two versions of weights, activations in flight and workspace fit.
Sources: Narayanan et al. 2019 (PipeDream), section 3.1; Narayanan et al. 2021 (PipeDream-2BW), section 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paraplan.baselines.planners.layer_profile import LayerProfile
from paraplan.baselines.planners.searching.degrees import (
    always,
    counts,
    cut_below_messages,
    cut_by_layers,
    pinned,
    replaced,
)
from paraplan.baselines.planners.task import Task
from paraplan.planner.constraints import Constraints
from paraplan.planner.partition.replicated_stages import ReplicatedStages, States, partition_states
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds


@dataclass(frozen=True)
class EqualStages:
    """Stages replicated alike.

    Attributes:
        replicas: of each.
        bounds: their layers.
        time_s: the slowest stage or message, of one minibatch.
    """

    replicas: int
    bounds: Bounds
    time_s: float


def pipedream(task: Task) -> Iterator[Constraints]:
    """The best equal replication of every minibatch, of the best ranks the largest minibatch first."""
    found: dict[int, list[EqualStages]] = {}
    free: dict[int, ReplicatedStages] = {}
    for samples, _ in reversed(counts(task, 1)):
        profile = task.profiles.of(1, samples)
        if profile is not None:
            bytes_per_s = task.links.bytes_per_s(task.num_devices)
            found[samples] = equal_stages(profile, task.num_devices, bytes_per_s)
            free[samples] = published(profile, task.num_devices, bytes_per_s)
    if found:
        best = min(found, key=lambda samples: found[samples][0].time_s / samples)
        task.said.append(_unlike(free[best], found[best][0], best))
    ranked = [each for every in itertools.zip_longest(*found.values()) for each in zip(found, every, strict=True)]
    late = []
    for samples, each in ranked:
        count = None if each is None else dict(counts(task, each.replicas)).get(samples)
        if each is not None and count is not None:
            pins = _pinned(task, each.bounds, each.replicas, count, "none")
            if count >= len(each.bounds):
                yield pins
            else:
                late.append(pins)
    yield from late


def equal_stages(profile: LayerProfile, workers: int, bytes_per_s: float) -> list[EqualStages]:
    """For every replication that divides the workers, the best stages; the fastest first.

    Args:
        profile: of the layers.
        workers: devices.
        bytes_per_s: of the links between them.
    """
    found = []
    for m in (m for m in range(1, workers + 1) if workers % m == 0 and workers // m <= profile.num_layers):
        share = 4 * (m - 1) / m / bytes_per_s
        seconds = [(c + share * w) / m for c, w in zip(profile.seconds, profile.stored_bytes, strict=True)]
        messages = [2 * a / (bytes_per_s * m) for a in profile.output_bytes]
        cut = cut_below_messages(seconds, workers // m, messages, always)
        if cut is not None:
            found.append(EqualStages(m, *cut))
    return sorted(found, key=lambda each: each.time_s)


def published(profile: LayerProfile, workers: int, bytes_per_s: float) -> ReplicatedStages:
    """PipeDream's own answer, stages replicated as differently as pays.

    Args:
        profile, workers, bytes_per_s: as of `equal_stages`.
    """
    ops = np.zeros((profile.num_layers, -(-profile.num_layers // 64)), np.uint64)
    for state in range(profile.num_layers):
        for layer in range(state + 1):
            ops[state, layer // 64] |= np.uint64(1 << layer % 64)
    states = States(
        np.cumsum(profile.seconds),
        np.cumsum(np.array(profile.stored_bytes, float)),
        np.array(profile.output_bytes, float),
        ops,
    )
    return partition_states(states, workers, bytes_per_s)


def _unlike(free: ReplicatedStages, equal: EqualStages, samples: int) -> str:
    """What PipeDream's own answer is beside the one taken."""
    machines = "-".join(str(stage.machines) for stage in free.stages)
    return (
        f"of minibatches of {samples}, pipedream's own stages take {free.time_s:.4g} s on {machines} workers, those "
        f"replicated alike {equal.time_s:.4g} s on {len(equal.bounds)} times {equal.replicas}"
    )


def pipedream_2bw(task: Task) -> Iterator[Constraints]:
    """Every width, depth, microbatch and recomputation whose memory it says fits, of highest throughput first."""
    n, found = task.num_devices, []
    for width in (w for w in range(1, n + 1) if n % w == 0):
        for samples, count in counts(task, width):
            profile = task.profiles.of(1, samples)
            bounds = None if profile is None else cut_by_layers(task, profile, n // width)
            if profile is None or bounds is None or count < len(bounds):
                continue
            for recompute in ("none", "full"):
                if max(_versions_bytes(profile, bound, len(bounds), recompute) for bound in bounds) <= task.budget:
                    seconds = _round_s(task, profile, bounds, width, count, recompute)
                    found.append((seconds / (samples * width), width, count, bounds, recompute))
    for _, width, count, bounds, recompute in sorted(found, key=lambda each: each[0]):
        yield _pinned(task, bounds, width, count, recompute)


def _round_s(task: Task, profile: LayerProfile, bounds: Bounds, width: int, count: int, recompute: str) -> float:
    """Seconds from one microbatch to the next."""
    seconds, slowest, summed = profile.seconds_with(recompute), 0.0, 0.0
    for first, stop in bounds:
        message_s = task.links.message_s(profile.output_bytes[stop - 1], width) if stop < profile.num_layers else 0.0
        slowest = max(slowest, sum(seconds[first:stop]) + 2 * message_s)
        summed = max(summed, task.links.all_reduce_s(sum(profile.grad_bytes[first:stop]), width))
    return max(slowest, summed / count)


def _versions_bytes(profile: LayerProfile, bound: tuple[int, int], depth: int, recompute: str) -> int:
    """What a stage holds with two versions of its weights and as many microbatches as there are stages."""
    return profile.stage_bytes(bound, depth, recompute) + sum(profile.stored_bytes[slice(*bound)])


def _pinned(task: Task, bounds: Bounds, width: int, count: int, recompute: str) -> Constraints:
    pins = replaced(pinned(task, len(bounds), width, 1, count), recompute=recompute)
    return replaced(pins, stages=task.profiles.in_segments(bounds)) if len(bounds) > 1 else pins
