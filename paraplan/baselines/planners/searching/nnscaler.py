"""nnScaler: a space pruned by constraints, then searched exactly.

Its space is that of op-trans (what an op is cut along), op-assign (which devices) and op-order. Constraints leave of it

* stages of whole layers on equally many devices that lie next to each other, ordered as 1F1B;
* inside a stage k devices, a power of two in a node, over which any op may be cut along any of its dims, or not at all;
* the whole plan of pp · k devices scaled out by data parallelism over the rest, its batch shared and nothing else;
* a layer recomputed as a whole or not at all, in all stages alike.

The shardings inside are of least work (its dynamic program; ours is `sharding.solve`), profiled before the plan is
scaled out. Stages follow by a dynamic program over the slowest one within memory; of what remains, the least

    (m + pp - 1) · slowest stage + reduction over the scaled-out replicas

is taken. Limits: its co-shard, which runs parts of an op one after another on a device, is not tried.
Source: Lin et al. 2024 (nnScaler), sections 3 to 5.
"""

from __future__ import annotations

from collections.abc import Iterator

from paraplan.baselines.planners.layer_profile import LayerProfile
from paraplan.baselines.planners.searching.degrees import counts, grids, replaced
from paraplan.baselines.planners.task import Task
from paraplan.planner.constraints import Constraints
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds, cut_chain
from paraplan.planner.pipeline.open_choices import usual_schedule

SEARCHED_SHARE = 0.5
"""Of the time limit, after which nothing else is priced."""


def nnscaler(task: Task) -> Iterator[Constraints]:
    """The least step first."""
    found = []
    for pp, dp, inside in grids(task):
        if inside & (inside - 1):
            continue
        for samples, count in counts(task, dp):
            if count < pp or task.deadline.passed_s > SEARCHED_SHARE * task.deadline.limit_s:
                continue
            profile = _profile(task, inside, samples)
            if profile is None:
                continue
            for recompute in ("none", "full"):
                bounds = fitting_stages(task, profile, pp, count, recompute)
                if bounds is not None:
                    step_s = scaled_s(task, profile, bounds, dp, inside, count, recompute)
                    found.append((step_s, pp, dp, inside, count, recompute, bounds))
                    break
    for _, pp, dp, inside, count, recompute, bounds in sorted(found):
        pins = replaced(_scaled(pp, dp, inside, count), recompute=recompute)
        if pp > 1:
            schedule, stages = usual_schedule(task.job.program, pins), task.profiles.in_segments(bounds)
            pins = replaced(pins, schedule=schedule, stages=stages)
        yield pins


def _profile(task: Task, inside: int, samples: int) -> LayerProfile | None:
    """Layers on a stage's devices before the plan is scaled out."""
    count, left = divmod(task.job.program.batch_size, samples)
    if inside == 1 or left:
        return task.profiles.of(1, samples)
    return task.profiles.on(Constraints(pp=task.num_devices // inside, mesh=(inside,), microbatches=count))


def _scaled(pp: int, dp: int, inside: int, count: int) -> Constraints:
    """A plan scaled out: ops are free over the devices inside a stage, which are an axis of no name."""
    if inside == 1:
        return Constraints(pp=pp, dp=dp, zero=0, microbatches=count)
    if dp == 1:
        return Constraints(pp=pp, mesh=(inside,), microbatches=count)
    return Constraints(pp=pp, dp=dp, zero=0, microbatches=count)


def fitting_stages(task: Task, profile: LayerProfile, pp: int, count: int, recompute: str) -> Bounds | None:
    """The stages whose slowest takes least of those that fit; None where none do.

    Args:
        task: what is planned.
        profile: of its layers.
        pp: stages.
        count: microbatches.
        recompute: preset of recomputation.
    """

    def fits(stage: int, first: int, stop: int) -> bool:
        return profile.stage_bytes((first, stop), min(pp - stage, count), recompute) <= task.budget

    return cut_chain(profile.seconds_with(recompute), pp, fits)


def scaled_s(
    task: Task, profile: LayerProfile, bounds: Bounds, dp: int, inside: int, count: int, recompute: str
) -> float:
    """The step of stages.

    Args:
        task, profile, count, recompute: as of `fitting_stages`.
        bounds: of the stages.
        dp: data-parallel ranks.
        inside: devices of each of those.
    """
    seconds, pp = profile.seconds_with(recompute), len(bounds)
    slowest_s = max(sum(seconds[first:stop]) for first, stop in bounds)
    grads = max(sum(profile.grad_bytes[first:stop]) for first, stop in bounds)
    return (count + pp - 1) * slowest_s + task.links.all_reduce_s(grads, dp, inside)
