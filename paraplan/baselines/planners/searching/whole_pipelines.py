"""Planners of pipelines of stages alike: Chimera's and Varuna's choice of depth and width.

Chimera runs two pipelines in opposite directions over D positions, D even, W times side by side. Of every D it takes
the largest microbatch that fits, recomputing only where none does, and of all D the least

    T = C_f (F + message) + C_b (B + message) + max over stages of what is left of their all-reduce

with C_f = N forwards and C_b = N + D - 2 backwards on the critical path for N microbatches; a stage i, held twice, is
reduced beside the min(i, D - 1 - i) backwards that follow its last.

Varuna recomputes everything. It takes the smallest microbatch at which a sample is nearly as fast as in any larger one,
cuts layers evenly by time, and for every depth P with its width D = devices / P simulates the schedule over measured
times of stages and messages, then the all-reduce; the fastest whose inputs in flight fit is taken. The last stage,
whose backward follows its forward, recomputes nothing in that simulation. Here its schedule is 1F1B, from which its own
differs where messages are late.
Sources: Li and Hoefler 2021 (Chimera), sections 3.3 and 3.4; Athlur et al. 2022 (Varuna), sections 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from paraplan.baselines.planners.layer_profile import LayerProfile
from paraplan.baselines.planners.searching.degrees import counts, cut_by_layers, divisors, pinned, replaced
from paraplan.baselines.planners.task import Task
from paraplan.ir.errors import ConstraintError
from paraplan.planner.constraints import Constraints
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds, cut_chain
from paraplan.planner.schedules.named import named_orders
from paraplan.planner.schedules.order_times import ended
from paraplan.planner.schedules.schedule_problem import StageCosts

NEARLY = 0.05
"""By how much a sample may be slower in Varuna's microbatch than in a larger one."""


def chimera(task: Task) -> Iterator[Constraints]:
    """The least T first."""
    found = []
    for depth in (d for d in divisors(task.num_devices) if d % 2 == 0):
        best = _chimera_of(task, depth)
        if best is not None:
            found.append(best)
    for _, pins in sorted(found, key=lambda each: each[0]):
        yield pins


def _chimera_of(task: Task, depth: int) -> tuple[float, Constraints] | None:
    """T and constraints of the largest microbatch that fits; None where none does."""
    width = task.num_devices // depth
    for recompute in ("none", "full"):
        for samples, count in reversed(counts(task, width)):
            profile = task.profiles.of(1, samples)
            bounds = None if profile is None else cut_by_layers(task, profile, depth)
            if profile is None or bounds is None or not _takes("chimera", depth, count):
                continue
            if max(_both_bytes(profile, bounds, at, recompute) for at in range(depth)) > task.budget:
                continue
            pins = replaced(pinned(task, depth, width, 1, count), schedule="chimera", recompute=recompute)
            seconds = chimera_s(task, profile, bounds, width, count, recompute)
            return seconds, replaced(pins, stages=task.profiles.in_segments(bounds))
    return None


def chimera_s(task: Task, profile: LayerProfile, bounds: Bounds, width: int, count: int, recompute: str) -> float:
    """T of stages.

    Args:
        task: what is planned.
        profile: of its layers.
        bounds: of the stages.
        width: replicas of each of both pipelines.
        count: microbatches.
        recompute: preset of recomputation.
    """
    depth = len(bounds)
    forward_s = max(sum(profile.forward_s[slice(*bound)]) for bound in bounds)
    backward_s = max(
        sum(profile.backward_s[slice(*bound)]) + sum(profile.again_s[recompute][slice(*bound)]) for bound in bounds
    )
    message_s = max(task.links.message_s(profile.output_bytes[stop - 1], width) for _, stop in bounds[:-1])
    left_s = 0.0
    for at, bound in enumerate(bounds):
        reduce_s = task.links.all_reduce_s(sum(profile.grad_bytes[slice(*bound)]), 2 * width)
        left_s = max(left_s, reduce_s - min(at, depth - 1 - at) * backward_s)
    return count * (forward_s + message_s) + (count + depth - 2) * (backward_s + message_s) + left_s


def _both_bytes(profile: LayerProfile, bounds: Bounds, at: int, recompute: str) -> int:
    """What a position holds of its two stages: as many microbatches in flight as positions, shared out among them."""
    depth = len(bounds)
    mine = [profile.stage_bytes(bounds[each], -(-depth // 2), recompute) for each in (at, depth - 1 - at)]
    return sum(mine) - profile.workspace_bytes


def _takes(schedule: str, depth: int, count: int) -> bool:
    try:
        named_orders(schedule, depth, count)
    except ConstraintError:
        return False
    return True


def varuna(task: Task) -> Iterator[Constraints]:
    """The shortest simulated step first."""
    found, samples = [], varuna_samples(task)
    for depth in divisors(task.num_devices):
        width = task.num_devices // depth
        for count in [c for s, c in counts(task, width) if s == samples]:
            profile = task.profiles.of(1, samples)
            bounds = None if profile is None else cut_chain(profile.seconds, min(depth, profile.num_layers))
            if profile is None or bounds is None or len(bounds) != depth:
                continue
            flying = [min(depth - at, count) for at in range(depth)]
            held = [profile.stage_bytes(bound, n, "full") for bound, n in zip(bounds, flying, strict=True)]
            if max(held) <= task.budget:
                found.append((varuna_s(task, profile, bounds, width, count), width, count, bounds))
    for _, width, count, bounds in sorted(found):
        pins = replaced(pinned(task, len(bounds), width, 1, count), recompute="full")
        yield replaced(pins, stages=task.profiles.in_segments(bounds) if len(bounds) > 1 else None)


def varuna_samples(task: Task) -> int:
    """The smallest microbatch at which a sample is nearly as fast as in any larger one."""
    each_s = {}
    for samples in task.samples:
        profile = task.profiles.of(1, samples) if any(s == samples for s, _ in counts(task, 1)) else None
        if profile is not None:
            each_s[samples] = sum(profile.seconds) / samples
    least_s = min(each_s.values(), default=math.inf)
    return next((samples for samples, seconds in each_s.items() if seconds <= least_s * (1 + NEARLY)), 1)


def varuna_s(task: Task, profile: LayerProfile, bounds: Bounds, width: int, count: int) -> float:
    """The simulated step: the pipeline, then the slowest stage's all-reduce.

    Args:
        task, profile, bounds, count: as of `chimera_s`.
        width: data-parallel ranks.
    """
    depth, stages, reduce_s = len(bounds), [], 0.0
    for at, (first, stop) in enumerate(bounds):
        layers = slice(first, stop)
        again_s = sum(profile.again_s["full"][layers]) if at < depth - 1 else 0.0
        message_s = task.links.message_s(profile.output_bytes[stop - 1], width) if at < depth - 1 else 0.0
        stages.append(
            StageCosts(
                forward_s=sum(profile.forward_s[layers]),
                backward_s=sum(profile.backward_s[layers]) + again_s,
                send_forward_s=message_s,
                send_backward_s=message_s,
            )
        )
        reduce_s = max(reduce_s, task.links.all_reduce_s(sum(profile.grad_bytes[layers]), width))
    return ended(named_orders("1f1b", depth, count), tuple(stages)).step_s + reduce_s
