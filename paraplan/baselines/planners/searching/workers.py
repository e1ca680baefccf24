"""Planners of pipelines side by side: HetPipe's virtual workers and Pipe-torch's partition with its GPU allocation.

HetPipe parts the devices into virtual workers of k devices, one a stage, which run a pipeline each and share parameters
with the others. Layers are parted so that a worker's slowest stage, computation and message received, takes least
within the memory of 1F1B's minibatches in flight (its integer program's objective; `cut_chain` is as exact). Of all k
that of most samples a second is taken, parameters being pushed and pulled once a step. Its policy here is "equal
distribution": a worker has one device of each position, whose devices lie next to each other.

Pipe-torch parts layers and gives stages devices at once, with links that differ: stages are replicated over devices of
one node where links are fast, and messages go where they are slow. Computation, a stage's reduction and its messages
overlap, so what counts is

    max over stages of max(T_compute / replicas, T_all-reduce(replicas), T_message)            of one minibatch

Both are asynchronous; here they run under 1F1B. HetPipe's workers are of equal devices; Pipe-torch's stages have
equally many devices, so that of its allocations those along nodes are left.
Sources: Park et al. 2020 (HetPipe), sections 4 and 7; Zhan and Zhang 2019 (Pipe-torch).
"""

from __future__ import annotations

from collections.abc import Iterator

from paraplan.baselines.planners.layer_profile import LayerProfile
from paraplan.baselines.planners.searching.degrees import counts, cut_below_messages, grids, pinned, replaced
from paraplan.baselines.planners.task import Task
from paraplan.planner.constraints import Constraints
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds, cut_chain


def hetpipe(task: Task) -> Iterator[Constraints]:
    """The most samples a second first."""
    found = []
    for pp, dp, _ in grids(task, most_tp=1):
        for samples, count in counts(task, dp):
            profile = task.profiles.of(1, samples)
            bounds = None if profile is None else worker_stages(task, profile, pp, dp, count)
            if profile is None or bounds is None or (count < pp and samples > 1):
                continue
            slowest_s = max(_with_message_s(task, profile, first, stop, dp) for first, stop in bounds)
            shared_s = max(task.links.all_reduce_s(sum(profile.grad_bytes[slice(*bound)]), dp) for bound in bounds)
            step_s = (count + pp - 1) * slowest_s + shared_s
            found.append((step_s, pp, dp, count, bounds))
    yield from _pinned(task, found)


def worker_stages(task: Task, profile: LayerProfile, pp: int, dp: int, count: int) -> Bounds | None:
    """A virtual worker's stages; None where none fit.

    Args:
        task: what is planned.
        profile: of its layers.
        pp, dp: degrees.
        count: microbatches.
    """

    def fits(stage: int, first: int, stop: int) -> bool:
        return profile.stage_bytes((first, stop), min(pp - stage, count)) <= task.budget

    message_s = [task.links.message_s(each, dp) for each in profile.output_bytes]
    received = [0.0, *message_s[:-1]]
    best: tuple[float, Bounds] | None = None
    for limit in sorted({*received}):  # a stage begins only after layers whose output takes no longer

        def allowed(stage: int, first: int, stop: int, limit: float = limit) -> bool:
            return received[first] <= limit and fits(stage, first, stop)

        bounds = cut_chain(profile.seconds, pp, allowed)
        if bounds is not None:
            slowest_s = max(_with_message_s(task, profile, *bound, dp) for bound in bounds)
            best = min(best or (slowest_s, bounds), (slowest_s, bounds))
    return None if best is None else best[1]


def _with_message_s(task: Task, profile: LayerProfile, first: int, stop: int, dp: int) -> float:
    received_s = task.links.message_s(profile.output_bytes[first - 1], dp) if first else 0.0
    return sum(profile.seconds[first:stop]) + received_s


def pipe_torch(task: Task) -> Iterator[Constraints]:
    """The least time of a sample first."""
    found = []
    for pp, dp, _ in grids(task, most_tp=1):
        for samples, count in counts(task, dp):
            profile = task.profiles.of(1, samples)
            if profile is None or count < pp:
                continue
            cut = overlapped_stages(task, profile, pp, dp)
            if cut is not None:
                found.append((cut[1] / (samples * dp), pp, dp, count, cut[0]))
    yield from _pinned(task, found)


def overlapped_stages(task: Task, profile: LayerProfile, pp: int, dp: int) -> tuple[Bounds, float] | None:
    """The stages whose slowest of computation, reduction and message takes least; None where none fit.

    Args:
        task, profile, pp, dp: as of `worker_stages`.
    """
    messages = [task.links.message_s(each, dp) for each in profile.output_bytes]
    each_s = [task.links.all_reduce_s(each, dp) for each in profile.grad_bytes]

    def fits(stage: int, first: int, stop: int) -> bool:
        return profile.stage_bytes((first, stop), pp - stage) <= task.budget

    best: tuple[Bounds, float] | None = None
    limit = float("inf")
    while True:  # fewer seconds of reduction allowed, until that costs more than it saves

        def allowed(stage: int, first: int, stop: int, limit: float = limit) -> bool:
            return fits(stage, first, stop) and sum(each_s[first:stop]) <= limit

        cut = cut_below_messages(profile.seconds, pp, messages, allowed)
        if cut is None or (best is not None and cut[1] >= best[1]):
            return best
        reduced_s = max(sum(each_s[first:stop]) for first, stop in cut[0])
        if best is None or max(cut[1], reduced_s) < best[1]:
            best = cut[0], max(cut[1], reduced_s)
        limit = reduced_s * (1 - 1e-9)


def _pinned(task: Task, found: list[tuple[float, int, int, int, Bounds]]) -> Iterator[Constraints]:
    for _, pp, dp, count, bounds in sorted(found):
        pins = replaced(pinned(task, pp, dp, 1, count), recompute="none")
        yield replaced(pins, stages=task.profiles.in_segments(bounds)) if pp > 1 else pins
