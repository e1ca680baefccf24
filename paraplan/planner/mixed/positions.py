"""Pipelines whose positions lie on groups of differing devices: which devices, meshes and budgets each has.

A pipeline goes through the groups in some order, and through all positions of one group before the next. A position
has devices of one group alone, equal parts of it, so it has one kind of device and the links of its group; the mesh of
a position, its sharding, its stages' segments and what it may hold are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import Mesh
from paraplan.planner.joint.at_cut import PricedPosition
from paraplan.planner.pipeline.cuts.stage_cuts import ChainMemory
from paraplan.planner.schedules.named import NAMED


@dataclass(frozen=True)
class PositionSpan:
    """Positions that follow each other on the devices of one group.

    Attributes:
        group: its number in the cluster.
        count: positions.
        mesh: of each; () where the user's degrees say it.
    """

    group: int
    count: int
    mesh: tuple[int, ...]


@dataclass(frozen=True)
class MixedPipeline:
    """One pipeline over all groups, but for its shardings, cuts and recomputation.

    Attributes:
        spans: one per group, in the order of the pipeline.
        microbatches: of a step.
        schedule: a name of `NAMED`.
        each: stages a position.
    """

    spans: tuple[PositionSpan, ...]
    microbatches: int
    schedule: str
    each: int = 1

    @property
    def pp(self) -> int:
        """Positions."""
        return sum(span.count for span in self.spans)

    @property
    def num_stages(self) -> int:
        """Of all positions."""
        return self.pp * self.each

    def text(self, cluster: ClusterSpec) -> str:
        """For notes and progress: `pp=2 on A100-80 mesh 4x2, then pp=4 on H100 mesh 2, 16 microbatches, 1f1b`."""
        parts = []
        for span in self.spans:
            mesh = f" mesh {'x'.join(map(str, span.mesh))}" if span.mesh else ""
            parts.append(f"pp={span.count} on {cluster.groups[span.group].device.kind}{mesh}")
        each = f" with {self.each} stages a position" if self.each > NAMED[self.schedule].stages else ""
        return f"{', then '.join(parts)}, {self.microbatches} microbatches, {self.schedule}{each}"


@dataclass(frozen=True)
class Position(PricedPosition):
    """A position with what it lies on.

    Attributes:
        group: number of its group.
        mesh: on the cluster's devices.
        budget: bytes that each of its devices may hold.
    """

    group: int
    mesh: Mesh
    budget: int

    @property
    def memory(self) -> ChainMemory:
        """What runs of segments keep here."""
        return self.prices.memory(self.mesh.shape)

    def with_less(self, nbytes: int) -> Position:
        """The same with less room."""
        return replace(self, room=self.room - nbytes)


def group_devices(cluster: ClusterSpec, group: int) -> range:
    """The global numbers of a group's devices."""
    counts = [each.nodes * each.devices_per_node for each in cluster.groups]
    first = sum(counts[:group])
    return range(first, first + counts[group])


def span_meshes(cluster: ClusterSpec, span: PositionSpan, like: Mesh) -> tuple[Mesh, ...]:
    """The meshes of a span's positions, over the next devices of its group each.

    Args:
        cluster: of all groups.
        span: which.
        like: axes and shape of one.
    """
    devices = group_devices(cluster, span.group)
    size = len(devices) // span.count
    parts = [tuple(devices[at * size : (at + 1) * size]) for at in range(span.count)]
    return tuple(like.over(part) for part in parts)


def device_budgets(cluster: ClusterSpec, positions: Sequence[Position]) -> tuple[int, ...]:
    """Per device of the cluster, bytes that it may hold."""
    found = {device: position.budget for position in positions for device in position.mesh.devices}
    return tuple(found[device] for device in range(cluster.num_devices))
