"""What a planner of memory hands back: a schedule, what it costs, and what is proved about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paraplan.ir.execution.memory_actions import Actions
from paraplan.planner.memory.memory_schedule import ScheduleCost


class MemoryStatus(Enum):
    """How an answer stands to the best one.

    OPTIMAL: no schedule within the budget is shorter, among those `MemoryAnswer.notes` says it is proved of.
    FEASIBLE: not proved the shortest.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"


@dataclass(frozen=True)
class MemoryAnswer:
    """A schedule.

    Attributes:
        actions: what runs, in order.
        evaluation: what `schedule.evaluate` says it costs, never the method's own count.
        bound_s: no schedule within the budget (of the class named in the notes) has a shorter step; None where the
            method proves nothing.
        status: how it ended.
        notes: what the method needed and what its claims are about, for people.
    """

    actions: Actions
    evaluation: ScheduleCost
    bound_s: float | None
    status: MemoryStatus
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float | None:
        """(step - bound) / step; None without a bound."""
        if self.bound_s is None:
            return None
        step = self.evaluation.step_s
        return (step - self.bound_s) / step if step else 0.0
