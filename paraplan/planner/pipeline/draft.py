"""A pipeline that was planned for its first microbatches, and is made whole when it is asked for.

Lowering and simulating all microbatches of a pipeline takes several times what deciding on it takes. Which of some
pipelines is the fastest does not need it: once a pipeline is full it goes on as it does (`schedules.full_rounds`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from paraplan.ir.plan import Plan, Prediction, Tried


@dataclass
class Draft:
    """A plan, or what is to become one.

    Attributes:
        step_s: of the plan; of one that is not made yet, of all its microbatches from the first ones, or, where that is
            not known, what it hardly takes less than.
        make: the plan, with its prediction.
        sample: the plan of the first microbatches, which holds as much; that of all where there is no other.
        peak_bytes: the most a rank holds of it.
        plan: once it is made.
    """

    step_s: float
    make: Callable[[], Plan]
    sample: Plan
    peak_bytes: int
    plan: Plan | None = None

    @staticmethod
    def of(plan: Plan) -> Draft:
        """One that is made."""
        found = _predicted(plan)
        return Draft(found.step_s, lambda: plan, plan, max(found.peak_bytes), plan=plan)

    @property
    def cut(self) -> list[tuple[int, int]]:
        """Per stage, its segments [first, stop)."""
        return [(stage.first, stage.stop) for stage in self.sample.stages]

    def made(self) -> Plan:
        """The plan.

        Raises:
            ConstraintError, NoPlanError: all microbatches do not fit where the first ones do.
        """
        if self.plan is None:
            self.plan = self.make()
            self.step_s = _predicted(self.plan).step_s
        return self.plan

    def noted(self, notes: tuple[str, ...], tried: tuple[Tried, ...]) -> Draft:
        """The same with more notes, and what a search tried, for its plan."""

        def noted(plan: Plan) -> Plan:
            return msgspec.structs.replace(plan, notes=(*plan.notes, *notes), tried=tried or plan.tried)

        plan = None if self.plan is None else noted(self.plan)
        return replace(self, make=lambda: noted(self.made()), plan=plan)


def step_s(draft: Draft) -> float:
    """The step of a draft, to order some by."""
    return draft.step_s


def _predicted(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction
