"""A link's latency and bandwidth from the times of collectives over it.

The pair that the cost model's own forms (`collectives`) need to come nearest to all measurements, by the mean absolute
logarithm of foretold over measured: a search on a grid of both, made finer around the best. One pair cannot say that
some collective's implementation is slower than its ring; a profile keeps each collective's own curve for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paraplan.cost_models.communication.collectives import AxisLink, collective_time_s
from paraplan.cost_models.constants import efficiency_of
from paraplan.ir.errors import CostModelError
from paraplan.ir.machine.device import Link
from paraplan.ir.profile import CollectiveTime

_STEPS, _ROUNDS = 12, 6


@dataclass(frozen=True)
class LinkFit:
    """A link, and how far the cost model with it is off what was measured.

    Attributes:
        bytes_per_s, latency_s: as a cluster file has them.
        median_error, worst_error: of |foretold / measured - 1|.
        points: measurements.
    """

    bytes_per_s: float
    latency_s: float
    median_error: float
    worst_error: float
    points: int


def fit_link(times: Sequence[CollectiveTime], backend: str, local: Link | None = None) -> LinkFit:
    """The link that explains collectives over groups within one node, or over several with `local` inside.

    Args:
        times: of collectives, measured.
        backend: of the devices: "cpu" or "cuda".
        local: the link within a node, where groups go over several.
    Raises:
        CostModelError: nothing was measured.
    """
    if not times:
        raise CostModelError("no collective was measured: a link is fitted to groups of at least 2 ranks")
    logs = [math.log(each.seconds) for each in times]
    rate, latency = 1e9, 1e-4
    width = math.log(1e4)
    for _ in range(_ROUNDS):
        steps = [width * (2 * index / _STEPS - 1) for index in range(_STEPS + 1)]
        _, rate, latency = min(
            (
                _miss(times, logs, _axis(backend, local, rate * math.exp(a), latency * math.exp(b))),
                rate * math.exp(a),
                latency * math.exp(b),
            )
            for a in steps
            for b in steps
        )
        width *= 3 / _STEPS
    link = _axis(backend, local, rate, latency)
    errors = [abs(_foretold_s(each, link) / each.seconds - 1) for each in times]
    return LinkFit(rate, latency, median(errors), max(errors), len(times))


def _axis(backend: str, local: Link | None, rate: float, latency: float) -> AxisLink:
    share = efficiency_of(backend)
    if local is None:
        return AxisLink(size=1, latency_s=latency, bytes_per_s=rate * share.in_node, start_s=share.collective_start_s)
    return AxisLink(
        size=1,
        latency_s=latency,
        bytes_per_s=rate * share.between_nodes,
        level="between_nodes",
        local_latency_s=local.latency_s,
        local_bytes_per_s=local.bytes_per_s * share.in_node,
        start_s=share.collective_start_s,
    )


def _foretold_s(each: CollectiveTime, link: AxisLink) -> float:
    sized = AxisLink(
        size=each.size,
        latency_s=link.latency_s,
        bytes_per_s=link.bytes_per_s,
        level=link.level,
        local_size=each.local_size,
        local_latency_s=link.local_latency_s,
        local_bytes_per_s=link.local_bytes_per_s,
        start_s=link.start_s,
    )
    return collective_time_s(each.target, each.input_bytes, sized)


def _miss(times: Sequence[CollectiveTime], logs: Sequence[float], link: AxisLink) -> float:
    return sum(abs(math.log(_foretold_s(each, link)) - known) for each, known in zip(times, logs, strict=True)) / len(
        times
    )
