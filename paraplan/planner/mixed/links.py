"""What a microbatch takes from a position to the next: over the links of both, in the layouts that each has it in."""

from __future__ import annotations

import math

from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import Shard
from paraplan.planner.mixed.positions import Position
from paraplan.planner.passes.overlap_products import boundary_layouts
from paraplan.planner.pipeline.links import message_s, ways
from paraplan.planner.pipeline.stage_prices import StagePrices
from paraplan.rules.time_axis import program_micro

Outputs = tuple[tuple[int, tuple[int, ...]], ...]
"""Per output of a segment, bytes of it and the axes of the mesh that shard it."""


class Handing:
    """What stages hand on.

    Args:
        cluster: of all positions.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self._known: dict[tuple[int, int], tuple[StagePrices, Outputs]] = {}

    def hop_s(self, source: Position, target: Position, stop: int, microbatches: int) -> float:
        """Seconds of a microbatch of what the segments before `stop` make, from one position to another.

        Between meshes of one shape every rank sends a part; else a rank sends and receives what it holds.

        Args:
            source, target: positions.
            stop: the segment before which the pipeline is cut.
            microbatches: of the step.
        """
        program = source.prices.sharding.job.program
        if source.mesh == target.mesh or not 0 < stop < len(program.segments):
            return 0.0
        if source.mesh.shape == target.mesh.shape:
            kind = program.kinds[program.segments[stop - 1].kind]
            nbytes = sum(kind.graph.values[name].nbytes for name in kind.outputs)
            held = nbytes // (microbatches * source.mesh.size)
        else:
            held = max(self._held_bytes(each, stop - 1, microbatches) for each in (source, target))
        ends = [(each.mesh.devices[0], each.mesh.devices[-1]) for each in (source, target)]
        return message_s(held, ways(self.cluster, *ends))

    def _held_bytes(self, position: Position, segment: int, microbatches: int) -> int:
        """What a rank holds of a microbatch of a segment's outputs."""
        shape = position.mesh.shape
        return sum(
            nbytes // (microbatches * math.prod(shape[axis] for axis in axes))
            for nbytes, axes in self._outputs(position.prices, segment)
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
