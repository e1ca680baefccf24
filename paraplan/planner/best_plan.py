"""What a search gives back, and how it says what it is doing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paraplan.ir.plan import Plan
from paraplan.planner.pipeline.draft import Draft

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BestPlan:
    """The best plan and how long it took to find.

    Attributes:
        plan: the best.
        solve_s, total_s: solver seconds, and all seconds.
        others: what else was found on the way, the fastest first.
        is_interrupted: whether the search was ended by an interrupt.
    """

    plan: Plan
    solve_s: float
    total_s: float
    others: tuple[Draft, ...] = ()
    is_interrupted: bool = False

    @property
    def step_s(self) -> float:
        """Of its simulated step."""
        assert self.plan.prediction is not None
        return self.plan.prediction.step_s
