"""What passes over a finished plan may use."""

from __future__ import annotations

from dataclasses import dataclass

from paraplan.cost_models.realised_plan import Budget, Realised
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline


@dataclass(frozen=True)
class PassContext:
    """What a pass is given beside the plan.

    Attributes:
        budget: bytes that devices may hold.
        constraints: what is pinned stays.
        times: how much longer a step is that has all microbatches, where the plan has the first of them.
        deadline: after which nothing is tried; None for none.
    """

    budget: Budget
    constraints: Constraints
    times: float = 1.0
    deadline: Deadline | None = None

    @property
    def is_late(self) -> bool:
        """Whether the deadline is over."""
        return self.deadline is not None and self.deadline.is_over

    def fits(self, tried: Realised, made: Realised) -> bool:
        """Whether a plan has room on its devices, and no tier holds more than it does for the plan it came of."""
        return tried.left_bytes(self.budget) >= 0 and tried.over_bytes == made.over_bytes
