"""Planners that try a fixed list: data parallelism at a ZeRO level, GPipe, and Megatron-LM's degrees.

Sources: Li et al. 2020 (DDP); Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP); Huang et al. 2019 (GPipe);
Narayanan et al. 2021, section 3.4 (Megatron-LM: tensor parallelism up to a node, then a pipeline, as little of both as
fits, the rest data parallelism); Korthikanti et al. 2022 (sequence parallelism, selective recomputation).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from paraplan.baselines.planners.task import Task, Tries
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.schedules.named import NAMED
from paraplan.rules.time_axis import splittable

MICROBATCHES = (1, 2, 4, 8)
"""Samples of a microbatch on a rank."""
CHUNKS = (1, 2, 3, 4, 6, 8)
"""Stages a position."""


def data_parallel(zero: int) -> Tries:
    """All devices data-parallel at a ZeRO level: the fewest microbatches that fit, all layers recomputed if none do."""

    def tries(task: Task) -> Iterator[Constraints]:
        job = task.job
        n = job.cluster.num_devices
        for recompute in ("none", "full"):
            for count in _counts(job, n):
                yield Constraints(pp=1, dp=n, zero=zero, microbatches=count, recompute=recompute)

    return tries


def _counts(job: Job, ranks: int) -> list[int]:
    """Powers of two that a rank's samples divide into; 1 where they do not divide, to be told so."""
    rows, left = divmod(job.program.batch_size, ranks)
    counts = [2**power for power in range(rows.bit_length()) if rows and rows % 2**power == 0]
    return [1] if left else [count for count in counts if splittable(job.program, count)] or [1]


def gpipe(task: Task) -> Iterator[Constraints]:
    """As many stages as devices or layers allow, four microbatches each and more, every layer recomputed."""
    job = task.job
    n, segments = job.cluster.num_devices, len(job.program.segments)
    for pp in (d for d in range(min(n, segments), 1, -1) if n % d == 0):
        counts = _counts(job, n // pp)
        for count in [each for each in counts if each >= 4 * pp] or counts[-1:]:
            yield Constraints(pp=pp, dp=n // pp, zero=0, microbatches=count, recompute="full", schedule="gpipe")


def megatron(task: Task) -> Iterator[Constraints]:
    """Tensor parallelism up to a node, then stages, least first; of each all microbatches, chunks and recomputation."""
    job = task.job
    n, per_node = job.cluster.num_devices, min(group.devices_per_node for group in job.cluster.groups)
    tensor = [d for d in range(1, min(n, per_node) + 1) if per_node % d == 0 and n % d == 0]
    degrees = [(t, 1) for t in tensor] + [(tensor[-1], p) for p in range(2, n // tensor[-1] + 1)]
    for tp, pp in degrees:
        if n % (tp * pp) == 0:
            yield from _with_degrees(job, tp, pp)


def megatron_grid(task: Task) -> Iterator[Constraints]:
    """Every degree of tensor parallelism inside a node and of a pipeline, with all else; most likely degrees first."""
    job = task.job
    n, per_node = job.cluster.num_devices, min(group.devices_per_node for group in job.cluster.groups)
    every = [
        (tp * pp, tp, pp)
        for tp in range(1, min(n, per_node) + 1)
        for pp in range(1, n // tp + 1)
        if per_node % tp == 0 and n % (tp * pp) == 0
    ]
    for _, tp, pp in sorted(every):
        yield from _with_degrees(job, tp, pp)


def _with_degrees(job: Job, tp: int, pp: int) -> Iterator[Constraints]:
    """Degrees with every microbatch, number of stages a position and way to recompute; the optimizer sharded."""
    n, segments = job.cluster.num_devices, len(job.program.segments)
    dp = n // (tp * pp)
    rows, left = divmod(job.program.batch_size, dp)
    pins = Constraints(pp=pp, dp=dp, tp=tp, sp=tp > 1, zero=1 if dp > 1 else 0)
    for recompute in ("none", "selective", "full"):
        for samples in MICROBATCHES:
            count, rest = divmod(rows, samples)
            if left or rest or not count or not splittable(job.program, count):
                continue
            made = msgspec.structs.replace(pins, microbatches=count, recompute=recompute)
            if pp == 1:
                yield made
                continue
            for each in CHUNKS:
                if pp * each > segments or (each > 1 and count % pp):
                    continue
                name = "1f1b" if each == 1 else "interleaved"
                stages = _even(segments, pp * each) if each > NAMED[name].stages else None
                yield msgspec.structs.replace(made, schedule=name, stages=stages)


def _even(segments: int, count: int) -> tuple[tuple[int, int], ...]:
    """Stages of as many segments each as can be."""
    ends = [segments * at // count for at in range(count + 1)]
    return tuple(itertools.pairwise(ends))
