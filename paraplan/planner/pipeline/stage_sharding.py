"""Shardings of one stage's devices, each chosen once however many schedules ask for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import msgspec

from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Decisions, Job, assemble
from paraplan.planner.constraints import Constraints
from paraplan.planner.pipeline.stage_cuts import segment_seconds
from paraplan.planner.recompute.kind_options import RematOption
from paraplan.planner.recompute.stage_recompute import options_of


class Choose(Protocol):
    """Chooses a sharding."""

    def __call__(self, job: Job, constraints: Constraints, kept_bytes: float | None, mesh: Mesh | None) -> Decisions:
        """The sharding of least work, activations left out.

        Args:
            job: on one stage's devices, of the whole model.
            constraints: what is pinned.
            kept_bytes: what parameters, gradients and states may take; None for no limit.
            mesh: where it is known.
        Raises:
            InfeasibleError, SolverLimitError: there is none, or none was found.
        """


@dataclass(frozen=True)
class Sharding:
    """A sharding of the whole model on one stage's devices, and what follows from it.

    Attributes:
        job: on these devices.
        decisions: the sharding.
    """

    job: Job
    decisions: Decisions

    @cached_property
    def whole(self) -> Plan:
        """The plan of one stage."""
        return assemble(self.job, self.decisions)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """What every segment takes."""
        return tuple(segment_seconds(self.whole))

    @cached_property
    def options(self) -> tuple[tuple[RematOption, ...], ...]:
        """Per kind, what an instance may recompute."""
        return options_of(self.whole)


@dataclass
class Shardings:
    """Chooses shardings, and remembers them.

    Attributes:
        choose: makes one.
    """

    choose: Choose
    _found: dict[tuple[int, bytes, float | None], Sharding] = field(default_factory=dict)

    def get(self, job: Job, constraints: Constraints, kept_bytes: float | None = None) -> Sharding:
        """The sharding of a stage's devices (see `Choose`); one that keeps less lies on the mesh of the first."""
        devices, pins = job.cluster.num_devices, msgspec.json.encode(constraints)
        key = (devices, pins, kept_bytes)
        if key not in self._found:
            first = self._found.get((devices, pins, None))
            mesh = None if first is None else first.decisions.mesh
            self._found[key] = Sharding(job, self.choose(job, constraints, kept_bytes, mesh))
        return self._found[key]
