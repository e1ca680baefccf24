"""What solving the meshes of one stage came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paraplan.ir.machine.mesh import Mesh
from paraplan.planner.interrupts import found_until
from paraplan.planner.one_stage.failures import Failure
from paraplan.planner.sharding.solve import Candidate, Skipped


@dataclass
class SolvedMeshes:
    """Plans of one stage on some meshes, and why there are no others.

    Attributes:
        meshes: all candidates.
        found: plans, of any of them.
        skipped, late: meshes that were not solved: all their plans take more work than one found, or time ran out.
        failures: why others have no plan.
        is_interrupted: whether more would have been solved, or the best made faster, had nobody interrupted it.
    """

    meshes: Sequence[Mesh]
    found: list[Candidate] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    late: list[Mesh] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    is_interrupted: bool = False

    def interrupted(self, fault: KeyboardInterrupt) -> None:
        """End with the plans found so far.

        Raises:
            KeyboardInterrupt: there are none.
        """
        self.found += found_until(fault, Candidate)
        if not self.found:
            raise fault
        self.is_interrupted = True
