"""What a partition into stages with data and tensor degrees costs (Piper's problem).

Stages are convex, in order, i = 1 …; stage i has a data degree d_i, which divides the N microbatches, a tensor degree
t_i, and one variant of each of its nodes. With y_i = ⌈Σ_(j≥i) d_j / d_i⌉ microbatches in flight,

    memory_i = Σ_v (per_microbatch_v · y_i + always_v) ≤ the memory of a device
    time_i   = Σ_v time_v / d_i + (2 · Σ (bytes + sync bytes of edges that cross the stage's boundary) / d_i
               + Σ_v 4 (d_i − 1) / d_i · params_v / N) / bandwidth

and Σ d_i t_i ≤ devices, Σ d_i ≤ N. Minimise the largest time.
Source: Tarnawski et al. 2021 (Piper), section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paraplan.planner.partition.variants import VariantChoice, choose_variants

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class TensorDegree:
    """Variants of all nodes under one tensor degree.

    Attributes:
        time_s: [node, variant] of a sample; infinite where a node has no such variant.
        param_bytes: [node, variant].
        per_microbatch_bytes: [node, variant] for each microbatch in flight.
        always_bytes: [node, variant].
        entering_bytes: [edge, variant of its target] where it comes from another stage, the edge's own included.
        leaving_bytes: [edge, variant of its source] where it goes to another stage, likewise.
    """

    degree: int
    time_s: Floats
    param_bytes: Floats
    per_microbatch_bytes: Floats
    always_bytes: Floats
    entering_bytes: Floats
    leaving_bytes: Floats


@dataclass(frozen=True)
class HybridStage:
    """A stage: its nodes, degrees, and a variant for each node."""

    nodes: tuple[int, ...]
    data_degree: int
    tensor_degree: int
    variants: tuple[int, ...]


@dataclass(frozen=True)
class HybridProblem:
    """Nodes are numbered; edges are pairs of them without cycles."""

    num_nodes: int
    edges: tuple[tuple[int, int], ...]
    degrees: tuple[TensorDegree, ...]
    devices: int
    memory_bytes: float
    bytes_per_s: float
    microbatches: int

    @cached_property
    def data_degrees(self) -> list[int]:
        """What a stage's data degree may be."""
        return [d for d in range(1, min(self.devices, self.microbatches) + 1) if self.microbatches % d == 0]

    @cached_property
    def sources(self) -> Ints:
        """[edge]."""
        return np.array([source for source, _ in self.edges], dtype=np.int64)

    @cached_property
    def targets(self) -> Ints:
        """[edge]."""
        return np.array([target for _, target in self.edges], dtype=np.int64)

    @cached_property
    def device_seconds(self) -> Floats:
        """[node] the least that a sample takes, over variants, of all devices' time together."""
        best = np.stack([degree.degree * degree.time_s.min(axis=1) for degree in self.degrees])
        return np.asarray(best.min(axis=0))

    def sync_share(self, data_degree: int) -> float:
        """Seconds a byte of parameters takes to be reduced, per sample."""
        return 4 * (data_degree - 1) / data_degree / self.microbatches / self.bytes_per_s

    def stage_costs(self, inside: Bools, degree: TensorDegree, data_degree: int) -> Floats:
        """[node of the stage, variant] what it adds to the stage's time.

        Args:
            inside: [node] whether it is the stage's.
            degree: costs at the stage's tensor parallelism.
            data_degree: replicas of the stage.
        """
        moved = np.zeros_like(degree.time_s)
        if self.edges:
            entering = inside[self.targets] & ~inside[self.sources]
            leaving = inside[self.sources] & ~inside[self.targets]
            np.add.at(moved, self.targets[entering], degree.entering_bytes[entering])
            np.add.at(moved, self.sources[leaving], degree.leaving_bytes[leaving])
        nodes = np.flatnonzero(inside)
        cost = degree.time_s[nodes] / data_degree + 2 * moved[nodes] / data_degree / self.bytes_per_s
        return np.asarray(cost + self.sync_share(data_degree) * degree.param_bytes[nodes])

    def stage(
        self, inside: Bools, degree: TensorDegree, data_degree: int, in_flight: int, enough: float | None = None
    ) -> VariantChoice | None:
        """The fastest choice of variants that fits (`choose_variants`).

        Args:
            inside, degree, data_degree: as of `stage_costs`.
            in_flight: microbatches that the stage holds at once.
            enough: seconds that are good enough; None for the least.
        """
        nodes = np.flatnonzero(inside)
        memory = degree.per_microbatch_bytes[nodes] * in_flight + degree.always_bytes[nodes]
        return choose_variants(self.stage_costs(inside, degree, data_degree), memory, self.memory_bytes, enough)


def microbatches_in_flight(data_degree: int, later_degrees: int) -> int:
    """y of a stage, whose later stages have data degrees with a given sum."""
    return 1 + math.ceil(later_degrees / data_degree)
