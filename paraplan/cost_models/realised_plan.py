"""A plan with what becomes of it: its programs, and what the simulator says of them."""

from __future__ import annotations

from dataclasses import dataclass

from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.plan import Plan
from paraplan.lowering import lower

Budget = int | tuple[int, ...]
"""Bytes that any device may hold; or, per device, what each may where they differ."""


@dataclass(frozen=True)
class Realised:
    """A plan, its programs per rank class, and what the simulator says of them. Of a pipeline whose full rounds were
    carried on, the programs are those of its first microbatches, and the simulation is without spans and points."""

    plan: Plan
    programs: tuple[RankProgram, ...]
    simulation: Simulation

    @property
    def peak_bytes(self) -> int:
        """The most any rank holds."""
        return max(self.simulation.peak_bytes)

    def over_budget_bytes(self, budget: Budget) -> tuple[int, ...]:
        """Per rank class, what its ranks hold over what the smallest of their devices may; below 0 where they have
        room."""
        return over_budget_bytes(self.plan, self.simulation.peak_bytes, budget)

    def left_bytes(self, budget: Budget) -> int:
        """What the fullest device leaves of its budget; below 0 where it holds more."""
        return -max(self.over_budget_bytes(budget))

    @property
    def over_bytes(self) -> dict[str, int]:
        """Per tier that holds more than there is room for on it, by how much."""
        devices = tuple(device for stage in self.plan.stages for mesh in stage.meshes for device in mesh.devices)
        over = {t: n - self.plan.cluster.room_bytes(t, devices) for t, n in self.simulation.tier_peak_bytes.items()}
        return {tier: nbytes for tier, nbytes in over.items() if nbytes > 0}


def over_budget_bytes(plan: Plan, held_bytes: tuple[int, ...], budget: Budget) -> tuple[int, ...]:
    """Per rank class, what its ranks hold over what the smallest of their devices may.

    Args:
        plan: whose schedule has the classes.
        held_bytes: per class.
        budget: of the devices.
    """
    if isinstance(budget, int):
        return tuple(held - budget for held in held_bytes)
    least = [max(budget)] * len(held_bytes)
    for of, nbytes in zip(plan.schedule.rank_class, budget, strict=True):
        least[of] = min(least[of], nbytes)
    return tuple(held - nbytes for held, nbytes in zip(held_bytes, least, strict=True))


def realised(plan: Plan) -> Realised:
    """A plan, lowered and simulated."""
    programs = lower(plan)
    return Realised(plan, programs, simulate_plan(plan, programs))
