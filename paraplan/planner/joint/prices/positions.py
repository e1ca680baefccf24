"""The devices of a pipeline's position: the job on them, their mesh, and which combinations' positions are alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from paraplan.ir.errors import ParaplanError
from paraplan.ir.machine.mesh import Mesh
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.prices.pricing_order import ANY, Kind, way_of
from paraplan.planner.joint.prices.sharding_front import least_work_s
from paraplan.planner.pipeline.first_devices import first_devices
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.rules.time_axis import splittable

USUAL = 16
"""Microbatches, or near as many, at which shardings are chosen: what a step does once does not count for more than in
a pipeline, where it goes on beside other microbatches."""
EASE = 0.02
"""How much more work dividing samples may be than what is the least of all."""
NARROW = 16
"""Devices up to which widths differ little where dividing samples is at ease, and are few enough to be priced each
where it is not; and one stage is solved on every mesh."""


@dataclass
class Positions:
    """Positions of pipelines.

    Attributes:
        job, constraints: what is planned, what is pinned of any plan.
    """

    job: Job
    constraints: Constraints
    _parts: dict[int, Job] = field(default_factory=dict, init=False)

    def mesh_shape(self, combination: Combination, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The mesh of a position: the inner axes of the one priced, and the outer one as wide as devices are."""
        size = self.job.cluster.num_devices // combination.pp
        return combination.mesh or (size // math.prod(shape[1:]), *shape[1:])

    def kind(self, combination: Combination) -> Kind:
        """What prices depend on, but for what stages may keep: combinations alike in it share them."""
        outer = combination.mesh[0] if combination.mesh else 1
        samples = self.job.program.batch_size / (combination.microbatches * outer)
        inner = combination.mesh[1:] if combination.mesh else (combination.pp,)  # pinned: ranks of the batch follow pp
        is_own = outer == 1 or (self.job.cluster.num_devices <= NARROW and not self.divides_at_ease)
        is_own |= samples < 1 and outer > self._node  # what else is divided depends on how many ranks there are
        return inner, len(combination.mesh), outer if is_own else ANY, samples

    @cached_property
    def _node(self) -> int:
        """Devices of the smallest node."""
        return min(group.devices_per_node for group in self.job.cluster.groups)

    def is_wide(self, combination: Combination) -> bool:
        """Whether positions of much other widths share its prices: then all that carries samples is divided along the
        first axis, where every rank has some. A layer's tensors divided along it would take longer on more ranks."""
        _, axes, _, samples = self.kind(combination)
        return self.constraints.pp is None and axes > 0 and samples >= 1 and self.job.cluster.num_devices > NARROW

    @cached_property
    def divides_at_ease(self) -> bool:
        """Whether dividing all that carries samples along an axis is no more work than anything else is, or hardly: not
        where a table of embeddings is most of a model. On the devices of a node, in microbatches near `USUAL`."""
        job, node = self.job, self._node
        width = max(size for size in range(1, node + 1) if node % size == 0 and job.program.batch_size % size == 0)
        counts = [m for m in range(1, USUAL + 1) if job.program.batch_size % (m * width) == 0]
        count = next((m for m in reversed(counts) if splittable(job.program, m)), 1)
        try:
            part, inner, mesh = self.position(Combination(job.cluster.num_devices // width, (width,), count, "1f1b", 1))
            free_s, wide_s = (least_work_s(part, mesh, count, inner, is_wide) for is_wide in (False, True))
        except ParaplanError:
            return True
        return wide_s <= (1 + EASE) * free_s

    def way_of(self, combination: Combination) -> tuple[object, float]:
        """Of the kind, what it has in common with those of other samples, and its samples."""
        kind = self.kind(combination)
        return way_of(kind), kind[3]

    def position(self, combination: Combination) -> tuple[Job, Constraints, Mesh]:
        """The job on one position's devices, what is pinned there, and the mesh.

        Raises:
            ConstraintError: there is none.
        """
        pinned = combination.pinned(self.constraints)
        check_constraints(pinned, self.job.cluster.num_devices)
        inner = msgspec.structs.replace(
            pinned, pp=None, schedule=None, stages=None, memory_bytes=None, reserve_bytes=0, recompute="none"
        )
        part = self.part(combination.pp)
        return part, inner, candidate_meshes(part, inner)[0]

    def part(self, positions: int) -> Job:
        """The job on the devices of one of so many positions.

        Raises:
            ConstraintError: as of `first_devices`.
        """
        if positions not in self._parts:
            self._parts[positions] = replace(self.job, cluster=first_devices(self.job.cluster, positions))
        return self._parts[positions]
