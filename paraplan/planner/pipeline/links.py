"""What messages between positions of a pipeline travel over."""

from __future__ import annotations

from typing import NamedTuple

from paraplan.cost_models.communication.collectives import p2p_s
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Link

Ends = tuple[int, int]
"""A position's first and last device."""


class Way(NamedTuple):
    """A link, the torch device type at its ends, and its level ("in_node", "between_nodes")."""

    link: Link
    backend: str
    level: str


def ways(cluster: ClusterSpec, source: Ends, target: Ends) -> tuple[Way, ...]:
    """What ranks of one position reach those of another over: the links of the first and of the last, those alike once.

    Args:
        cluster: of both.
        source, target: the positions.
    """
    found = dict[Way, None]()
    for pair in zip(source, target, strict=True):
        level = cluster.span(pair)
        link = cluster.link(level, pair[0]) if level == "in_node" else cluster.network(pair)
        found[Way(link, cluster.group_of(pair[0]).device.backend, level)] = None
    return tuple(found)


def message_s(nbytes: int, over: tuple[Way, ...]) -> float:
    """Seconds of a message, rank to rank, over the slowest of some ways.

    Args:
        nbytes: of the message.
        over: the ways.
    """
    return max(p2p_s(nbytes, *way) for way in over)
