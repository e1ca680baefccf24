"""Messages between positions of a pipeline: what they travel over, and what ranks hold of what is handed on."""

from __future__ import annotations

import math
from typing import NamedTuple

from paraplan.cost_models.communication.collectives import p2p_s
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Link
from paraplan.ir.machine.mesh import Shard
from paraplan.planner.passes.overlap_products import boundary_layouts
from paraplan.planner.pipeline.prices.stage_prices import StagePrices
from paraplan.rules.time_axis import program_micro

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


Outputs = tuple[tuple[int, tuple[int, ...]], ...]
"""Per output of a segment, bytes of it and the axes of the mesh that shard it."""


class Handed:
    """What segments hand on, in the layouts that priced shardings give it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[StagePrices, Outputs]] = {}

    def rank_bytes(self, prices: StagePrices, segment: int, microbatches: int, shape: tuple[int, ...]) -> int:
        """What a rank holds of a microbatch of a segment's outputs.

        Args:
            prices: of a sharding.
            segment: which.
            microbatches: of the step.
            shape: of the mesh.
        """
        return sum(
            nbytes // (microbatches * math.prod(shape[axis] for axis in axes))
            for nbytes, axes in self._outputs(prices, segment)
        )

    def _outputs(self, prices: StagePrices, segment: int) -> Outputs:
        """Per output of a segment, its bytes and the axes that shard it."""
        plan = prices.sharding.whole
        program = plan.program
        kind = program.kinds[program.segments[segment].kind]
        key = (id(prices), program.segments[segment].kind)
        if key not in self._known:
            layouts = boundary_layouts(plan, program_micro(program, plan.num_microbatches).segments)
            found = []
            for name, outer in zip(kind.outputs, program.segments[segment].outputs, strict=True):
                layout = layouts.get(outer, ())
                axes = tuple(axis for axis, place in enumerate(layout[1:]) if isinstance(place, Shard))
                found.append((kind.graph.values[name].nbytes, axes))
            self._known[key] = prices, tuple(found)  # with the prices, lest another's have their id
        return self._known[key][1]
