"""Shardings of one stage's devices, each chosen once however many schedules ask for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from paraplan.ir.machine.mesh import Mesh
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.pipeline.prices.stage_prices import Sharding


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


@dataclass
class Shardings:
    """Chooses shardings, and remembers them.

    Attributes:
        choose: makes one.
    """

    choose: Choose
    _found: dict[tuple[int, bytes, float | None], Sharding] = field(default_factory=dict)

    def get(self, job: Job, constraints: Constraints, kept_bytes: float | None = None) -> Sharding:
        """The sharding of a stage's devices (see `Choose`); one that keeps less lies on the mesh of the first.

        Args:
            job: on a stage's devices.
            constraints: pinned for it.
            kept_bytes: that it may keep all the time; None: as it likes.
        """
        devices, pins = job.cluster.num_devices, msgspec.json.encode(constraints)
        key = (devices, pins, kept_bytes)
        if key not in self._found:
            first = self._found.get((devices, pins, None))
            mesh = None if first is None else first.decisions.mesh
            self._found[key] = Sharding(job, self.choose(job, constraints, kept_bytes, mesh))
        return self._found[key]
