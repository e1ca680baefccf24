"""What a microbatch takes from a position to the next: over the links of both, in the layouts that each has it in."""

from __future__ import annotations

from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.planner.mixed.positions import Position
from paraplan.planner.pipeline.links import message_s, rank_bytes, ways


class Handing:
    """What stages hand on.

    Args:
        cluster: of all positions.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster

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
            both = (source, target)
            held = max(rank_bytes(each.prices, stop - 1, microbatches, each.mesh.shape) for each in both)
        ends = [(each.mesh.devices[0], each.mesh.devices[-1]) for each in (source, target)]
        return message_s(held, ways(self.cluster, *ends))
