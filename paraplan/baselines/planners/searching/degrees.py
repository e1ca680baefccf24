"""The degrees, microbatches and cuts that planners enumerate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paraplan.baselines.planners.layer_profile import LayerProfile
from paraplan.baselines.planners.task import Task
from paraplan.planner.constraints import Constraints
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds, cut_chain
from paraplan.planner.pipeline.open_choices import usual_schedule
from paraplan.rules.time_axis import splittable


def divisors(n: int) -> list[int]:
    """Of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def counts(task: Task, dp: int) -> list[tuple[int, int]]:
    """(samples of a microbatch on a rank, microbatches) that a batch over some data-parallel ranks divides into."""
    program = task.job.program
    rows, left = divmod(program.batch_size, dp)
    if left:
        return []
    found = [(samples, rows // samples) for samples in task.samples if rows % samples == 0]
    return [(samples, count) for samples, count in found if splittable(program, count)]


def grids(task: Task, most_tp: int | None = None) -> Iterator[tuple[int, int, int]]:
    """(pp, dp, tp) of all devices, tensor parallelism inside a node, and a layer a stage at least."""
    n, layers = task.num_devices, len(task.profiles.repeated)
    for tp in divisors(min(n, task.per_node)):
        if task.per_node % tp or n % tp or (most_tp is not None and tp > most_tp):
            continue
        for pp in divisors(n // tp):
            if pp <= layers and _along_nodes(task, n // pp):
                yield pp, n // tp // pp, tp


def _along_nodes(task: Task, size: int) -> bool:
    """Whether positions of so many devices are whole nodes, or equal parts of one."""
    return size % task.per_node == 0 or task.per_node % size == 0


def pinned(task: Task, pp: int, dp: int, tp: int, count: int, zero: int = 0) -> Constraints:
    """Degrees and microbatches, under 1F1B (GPipe where a loss reads all microbatches).

    Args:
        task: what is planned.
        pp, dp, tp: degrees.
        count: microbatches.
        zero: ZeRO's stage, where there are several data-parallel ranks.
    """
    pins = Constraints(pp=pp, dp=dp, tp=tp, sp=tp > 1, zero=zero if dp > 1 else 0, microbatches=count)
    if pp == 1:
        return pins
    return replaced(pins, schedule=usual_schedule(task.job.program, pins))


def replaced(pins: Constraints, **fields: object) -> Constraints:
    """Constraints with other fields."""
    every = {name: getattr(pins, name) for name in pins.__struct_fields__}
    return Constraints(**{**every, **fields})


def cut_below_messages(
    seconds: Sequence[float], num_stages: int, message_s: Sequence[float], fits: Callable[[int, int, int], bool]
) -> tuple[Bounds, float] | None:
    """The cut whose slowest stage or message takes least, and how long that is; exact.

    Args:
        seconds: per layer.
        num_stages: how many.
        message_s: per layer, what handing its output on takes.
        fits: which stages may be, as for `cut_chain`.
    """
    best: tuple[Bounds, float] | None = None
    for limit in sorted({*message_s, 0.0} if num_stages == 1 else set(message_s)):
        if best is not None and limit >= best[1]:
            break

        def allowed(stage: int, first: int, stop: int, limit: float = limit) -> bool:
            sends = stop < len(seconds) and message_s[stop - 1] > limit
            return not sends and fits(stage, first, stop)

        bounds = cut_chain(seconds, num_stages, allowed)
        if bounds is None:
            continue
        slowest = max(sum(seconds[first:stop]) for first, stop in bounds)
        slowest = max([slowest, *(message_s[stop - 1] for _, stop in bounds[:-1])])
        if best is None or slowest < best[1]:
            best = bounds, slowest
    return best


def always(stage: int, first: int, stop: int) -> bool:
    """Every stage may be.

    Args:
        stage, first, stop: not looked at.
    """
    return True


def cut_by_layers(task: Task, profile: LayerProfile, num_stages: int) -> Bounds | None:
    """Stages of equally many of the repeated layers, what comes before and after them beside the first and last.

    Args:
        task: what is planned.
        profile: of its layers.
        num_stages: to cut into.
    """
    weights = [1.0 if equal else 1e-3 for equal in task.profiles.repeated[: profile.num_layers]]
    return cut_chain(weights, num_stages)
