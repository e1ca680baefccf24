"""Messages between positions of a pipeline: what they travel over, and what ranks hold of what is handed on."""

from __future__ import annotations

import math
from typing import NamedTuple

from paraplan.cost_models.communication.collectives import p2p_s
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Link
from paraplan.ir.machine.mesh import Shard
from paraplan.planner.pipeline.prices.stage_prices import StagePrices

Ends = tuple[int, int]
"""A position's first and last device."""


class LinkWay(NamedTuple):
    """A link, the torch device type at its ends, and its level ("in_node", "between_nodes")."""

    link: Link
    backend: str
    level: str


def ways(cluster: ClusterSpec, source: Ends, target: Ends) -> tuple[LinkWay, ...]:
    """What ranks of one position reach those of another over: the links of the first and of the last, those alike once.

    Args:
        cluster: of both.
        source, target: the positions.
    """
    found = dict[LinkWay, None]()
    for pair in zip(source, target, strict=True):
        level = cluster.span(pair)
        link = cluster.link(level, pair[0]) if level == "in_node" else cluster.network(pair)
        found[LinkWay(link, cluster.group_of(pair[0]).device.backend, level)] = None
    return tuple(found)


def message_s(nbytes: int, over: tuple[LinkWay, ...]) -> float:
    """Seconds of a message, rank to rank, over the slowest of some ways.

    Args:
        nbytes: of the message.
        over: the ways.
    """
    return max(p2p_s(nbytes, *way) for way in over)


def rank_bytes(prices: StagePrices, segment: int, microbatches: int, shape: tuple[int, ...]) -> int:
    """What a rank holds of a microbatch of a segment's outputs, in the layouts that a priced sharding gives them.

    Args:
        prices: of the sharding.
        segment: which.
        microbatches: of the step.
        shape: of the mesh.
    """
    program = prices.sharding.job.program
    outer, found = program.segments[segment], 0
    kind = program.kinds[outer.kind]
    for name, handed in zip(kind.outputs, outer.outputs, strict=True):
        layout = prices.sharding.boundary.get(handed, ())
        ranks = math.prod(shape[axis] for axis, place in enumerate(layout[1:]) if isinstance(place, Shard))
        found += kind.graph.values[name].nbytes // (microbatches * ranks)
    return found
