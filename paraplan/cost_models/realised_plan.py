"""A plan with what becomes of it: its programs, and what the simulator says of them."""

from __future__ import annotations

from dataclasses import dataclass

from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.simulate import Simulation
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.plan import Plan
from paraplan.lowering import lower


@dataclass(frozen=True)
class Realised:
    """A plan, its programs per rank class, and what the simulator says of them."""

    plan: Plan
    programs: tuple[RankProgram, ...]
    simulation: Simulation

    @property
    def peak_bytes(self) -> int:
        """The most any rank holds."""
        return max(self.simulation.peak_bytes)

    @property
    def over_bytes(self) -> dict[str, int]:
        """Per tier that holds more than there is room for on it, by how much."""
        devices = tuple(device for stage in self.plan.stages for mesh in stage.meshes for device in mesh.devices)
        over = {t: n - self.plan.cluster.room_bytes(t, devices) for t, n in self.simulation.tier_peak_bytes.items()}
        return {tier: nbytes for tier, nbytes in over.items() if nbytes > 0}


def realised(plan: Plan) -> Realised:
    """A plan, lowered and simulated."""
    programs = lower(plan)
    return Realised(plan, programs, simulate_plan(plan, programs))
