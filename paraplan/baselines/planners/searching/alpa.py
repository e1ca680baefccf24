"""Alpa: an integer program for the sharding of each mesh, and a dynamic program for stages on submeshes.

Submeshes are parts of a node of a power of two devices, or whole nodes; each is arranged in every logical shape of one
or two axes. The sharding of least work on one is ours (`sharding.solve`), as its ILP is. With t of stages so sharded,
and B microbatches, stages are chosen to minimise

    sum of t_i + (B - 1) max t_i        such that a stage's parameters, states and activations of as many microbatches
                                        as there are stages from it on fit

by enumerating t_max, the slowest stage: F[s, k] = least sum of t over s stages of the layers from k on, none above
t_max. Here all stages are on submeshes of one shape and equal layers take one sharding; microbatches are chosen among
few counts; messages between stages cost nothing, as in the paper; all layers are recomputed or none.
Source: Zheng et al. 2022, sections 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from paraplan.baselines.planners.layer_profile import LayerProfile
from paraplan.baselines.planners.searching.degrees import divisors, replaced
from paraplan.baselines.planners.task import Task
from paraplan.planner.constraints import Constraints
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds
from paraplan.planner.pipeline.open_choices import usual_schedule
from paraplan.rules.time_axis import splittable

PER_DEVICE = (1.0, 0.25, 4.0)
"""Samples of a microbatch for each device of a submesh, the usual first."""
NEAR = 1e-9
"""Of a time, what the slowest stages of two choices must differ by to be told apart."""
PRICED_SHARE = 0.4
"""Of the time limit, after which no other submesh is priced."""


def submeshes(task: Task) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(devices, logical shape) of every submesh that divides the cluster, largest last."""
    n, per_node = task.num_devices, task.per_node
    for size in divisors(n):
        if n // size > len(task.profiles.repeated) or (size % per_node and per_node % size):
            continue
        if size < per_node and size & (size - 1):
            continue
        yield size, (size,)
        for inner in divisors(size)[1:-1]:
            if inner <= per_node and inner & (inner - 1) == 0:
                yield size, (size // inner, inner)


def least_latency(
    stage_s: Callable[[int, int], float],
    fits: Callable[[int, int, int], bool],
    layers: int,
    stages: int,
    microbatches: int,
) -> tuple[float, Bounds] | None:
    """The stages whose sum of times and (microbatches - 1) slowest takes least; None where none fit.

    Args:
        stage_s: of layers [first, stop).
        fits: whether layers [first, stop) fit with so many stages after them.
        layers, stages: how many.
        microbatches: B.
    """
    every = {(i, j): stage_s(i, j) for i in range(layers) for j in range(i + 1, layers + 1)}
    free = _least_sum(every, fits, layers, stages, math.inf)
    if free is None:
        return None
    least_s, best = sum(every[bound] for bound in free), None  # type: float, tuple[float, Bounds] | None
    times = sorted(set(every.values()))
    for t_max, after in zip(times, [*times[1:], math.inf], strict=True):
        if best is not None and least_s + (microbatches - 1) * t_max >= best[0]:
            break
        if after <= t_max * (1 + NEAR) or t_max * stages < least_s * (1 - NEAR):
            continue
        found = _least_sum(every, fits, layers, stages, t_max)
        if found is None:
            continue
        slowest = max(every[bound] for bound in found)
        total = sum(every[bound] for bound in found) + (microbatches - 1) * slowest
        if best is None or total < best[0]:
            best = total, found
    return best


def _least_sum(
    every: dict[tuple[int, int], float], fits: Callable[[int, int, int], bool], layers: int, stages: int, t_max: float
) -> Bounds | None:
    """F of the first layer and all stages, and its stages."""
    least = [[math.inf] * (layers + 1) for _ in range(stages + 1)]
    ends = [[-1] * (layers + 1) for _ in range(stages + 1)]
    least[0][layers] = 0.0
    for s in range(1, stages + 1):
        for k in range(layers - s, stages - s - 1, -1):
            for stop in range(k + 1, layers - s + 2):
                seconds = every[k, stop]
                if seconds > t_max:
                    break
                total = seconds + least[s - 1][stop]
                if total < least[s][k] and fits(k, stop, s - 1):
                    least[s][k], ends[s][k] = total, stop
    if ends[stages][0] < 0:
        return None
    found, k = [], 0
    for s in range(stages, 0, -1):
        found.append((k, ends[s][k]))
        k = ends[s][k]
    return tuple(found)


def alpa(task: Task) -> Iterator[Constraints]:
    """The least latency first, with recomputation or without."""
    found = []
    for shape, count, profile in _priced(task):
        for recompute in ("none", "full"):
            stages = task.num_devices // profile.size
            seconds = _sums(profile.seconds_with(recompute))
            once = profile.reduce_s / sum(profile.seconds) / count

            def stage_s(first: int, stop: int, seconds: Sequence[float] = seconds, once: float = once) -> float:
                return (seconds[stop] - seconds[first]) * (1 + once)

            def fits(
                first: int, stop: int, later: int, profile: LayerProfile = profile, recompute: str = recompute
            ) -> bool:
                return profile.stage_bytes((first, stop), later + 1, recompute) <= task.budget

            best = least_latency(stage_s, fits, profile.num_layers, stages, count)
            if best is not None:
                found.append((best[0], shape, count, best[1], recompute))
    for _, shape, count, bounds, recompute in sorted(found):
        pins = Constraints(pp=len(bounds), mesh=shape, microbatches=count, recompute=recompute)
        if len(bounds) > 1:
            schedule, cuts = usual_schedule(task.job.program, pins), task.profiles.in_segments(bounds)
            pins = replaced(pins, schedule=schedule, stages=cuts)
        yield pins


def _priced(task: Task) -> Iterator[tuple[tuple[int, ...], int, LayerProfile]]:
    """(logical shape, microbatches, profile) of submeshes, usual microbatches first, as long as there is time."""
    program, seen = task.job.program, set[tuple[tuple[int, ...], int]]()
    for per_device in PER_DEVICE:
        for size, shape in submeshes(task):
            count, left = divmod(program.batch_size, max(round(size * per_device * task.samples[0]), 1))
            if left or not count or (shape, count) in seen or not splittable(program, count):
                continue
            seen.add((shape, count))
            if task.deadline.passed_s > PRICED_SHARE * task.deadline.limit_s:
                return
            pins = Constraints(pp=task.num_devices // size, mesh=shape, microbatches=count)
            profile = task.profiles.on(pins)
            if profile is not None:
                yield shape, count, profile


def _sums(seconds: Sequence[float]) -> list[float]:
    total = [0.0]
    for each in seconds:
        total.append(total[-1] + each)
    return total
