"""A closed form of a mixed pipeline: which share of the model each position takes, and how long a step then is.

With x_p the share of position p, T_p the seconds of a microbatch of the whole model there and R_p its room, a share is
limited by time and by memory:

    x_p(t) = max over ways k to recompute of min(t / (T_p + extra_k), R_p / (kept_p + in_flight_p . saved_k))

and t is the least with sum x_p(t) = 1. A step is m . t, or m messages over the slowest link, with fill and drain.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paraplan.planner.mixed.links import Handing
from paraplan.planner.mixed.positions import MixedPipeline, Position, PositionSpan
from paraplan.planner.schedules.named import NAMED

HALVINGS = 40


def shared_s(spans: Sequence[PositionSpan], seconds: Sequence[float]) -> float:
    """What a microbatch takes of every position where each does as much as it can in that time.

    Args:
        spans: of the pipeline.
        seconds: per span, of a microbatch of the whole model on one of its positions.
    """
    return 1.0 / sum(span.count / max(each, 1e-12) for span, each in zip(spans, seconds, strict=True))


def least_s(pipeline: MixedPipeline, share_s: float) -> float:
    """What a step takes where memory and links are free; `share_s`: see `shared_s`."""
    return pipeline.microbatches * share_s * (1.0 + _fill(pipeline))


def quick_s(pipeline: MixedPipeline, positions: Sequence[Position], handing: Handing) -> float:
    """The closed form; infinite where the model does not fit.

    Args:
        pipeline: spans, schedule and microbatches.
        positions: of it, priced, in order.
        handing: prices of messages between them.
    """
    share_s = _share_s(pipeline, positions)
    if math.isinf(share_s):
        return math.inf
    middle = max(len(positions[0].prices.seconds) // 2, 1)
    hops = [handing.hop_s(a, b, middle, pipeline.microbatches) for a, b in itertools.pairwise(positions)]
    if pipeline.each > 1:
        hops.append(handing.hop_s(positions[-1], positions[0], middle, pipeline.microbatches))
    busy_s = max(share_s, pipeline.each * max(hops)) * pipeline.microbatches * (1.0 + _fill(pipeline))
    once_s = max(
        (each.prices.totals.once_s / pipeline.each + each.prices.totals.update_s) * share_s / _seconds(each)
        for each in positions
    )
    return busy_s + 2 * pipeline.each * sum(hops) + once_s


def _seconds(position: Position) -> float:
    return max(position.prices.totals.seconds, 1e-12)


def _fill(pipeline: MixedPipeline) -> float:
    bubble = (pipeline.pp - 1) / (pipeline.microbatches * pipeline.each)
    return NAMED[pipeline.schedule].idle * bubble


def in_flight(pipeline: MixedPipeline, position: int) -> float:
    """About how many microbatches of all its stages a position has in flight at most."""
    most = NAMED[pipeline.schedule].flying(pipeline.pp, position, pipeline.each)
    return min(most, float(pipeline.microbatches))


def _share_s(pipeline: MixedPipeline, positions: Sequence[Position]) -> float:
    """The least t at which the shares sum up to 1; infinite where memory keeps them below it."""
    times, limits = _options(pipeline, positions)
    if limits.max(1).sum() < 1.0:
        return math.inf
    low, high = 0.0, float(times.max())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if np.minimum(limits, middle / times).max(1).sum() >= 1.0:
            high = middle
        else:
            low = middle
    return high


def _options(
    pipeline: MixedPipeline, positions: Sequence[Position]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """[positions, ways to recompute]: seconds of the whole model, and the share that fits."""
    ways = [each.prices.totals.recomputing or ((0.0, 0.0),) for each in positions]
    most = max(map(len, ways))
    times, limits = np.full((len(ways), most), np.inf), np.zeros((len(ways), most))
    for at, (position, each) in enumerate(zip(positions, ways, strict=True)):
        kept, flying = position.prices.kept_bytes(position.mesh.shape), in_flight(pipeline, at)
        own_s = _seconds(position) + pipeline.each * position.prices.totals.cut_s
        for way, (saved, extra_s) in enumerate(each):
            times[at, way] = own_s + extra_s
            limits[at, way] = max(position.least_room, 0) / max(kept + flying * saved, 1.0)
    times[np.isinf(times)] = times[np.isfinite(times)].max()
    return times, limits
