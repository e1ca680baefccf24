"""A plan of least memory, where a search found none that fits.

Of several devices the degrees that divide everything are tried (`all_sharded`), with everything made again and with
nothing: the faster of a degree's two is taken, in as few microbatches as fit. Of one device the ops are put in an order
of their own (`planner.passes.leanest`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan, Progress
from paraplan.planner.certificate import certified
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.deadline import Deadline
from paraplan.planner.interrupts import handing_on
from paraplan.planner.one_stage.all_sharded import all_sharded, divided
from paraplan.planner.one_stage.on_mesh import MOST_LATE
from paraplan.planner.one_stage.roomier import as_reserved, needed_bytes
from paraplan.planner.passes.leanest import lean_time_s, leanest, orders_freely
from paraplan.planner.pipeline.meshes import candidate_meshes

RESORTS = 4
"""Plans that are made however late it is."""
EACH = 0.2
"""Of the time left, what each has to be found; of the limit, beyond it, how long fewer microbatches are looked into."""

HARDLY = 0.3
"""Of the time for plans that keep everything, what they have where the leanest data parallelism does not fit."""


@dataclass(frozen=True)
class LeastMemory:
    """Plans of least memory.

    Attributes:
        find: a search (`planner.search.find`).
        job: what is planned, as the constraints have it run (`planner.search.prepared`).
        deadline: of the search that found nothing.
        progress: told what is being tried.
    """

    find: Callable[..., BestPlan]
    job: Job
    deadline: Deadline
    progress: Progress

    def plan(self, constraints: Constraints) -> BestPlan | None:
        """The plan; None where none fits.

        Args:
            constraints: what is pinned.
        Raises:
            Interrupted: with the best until then, or none.
        """
        self.progress("nothing found fits; planning for as little memory as can be")
        ways = list(all_sharded(self.job, constraints))
        ways += [each for each in divided(self.job, constraints) if each not in ways]
        tried = self._tried(ways)
        pins, found = next((each for each in tried if each[1] is not None), (constraints, None))
        if found is None:
            return self._in_an_order(constraints)
        with handing_on([found]):
            others, other = next(tried, (pins, None))  # the same with nothing made again, as a rule
        if other is not None and other.step_s < found.step_s:
            pins, found = others, other
        return found if constraints.microbatches else self._in_fewer(pins, found)

    def room(self, constraints: Constraints) -> float:
        """How much of the time that plans which keep everything may have is well spent on them: none where nothing
        sharded all over fits, little where that fits only with matrices divided, all where none is known."""
        nothing_known = 1.0
        for pins, found in self._tried(list(all_sharded(self.job, constraints))):
            if found is not None:
                return 1.0 if (pins.tp or 1) == (constraints.tp or 1) else HARDLY
            nothing_known = 0.0
        return nothing_known

    def _in_fewer(self, pins: Constraints, found: BestPlan) -> BestPlan:
        """The plan in half as many microbatches, as long as it fits so and gets faster."""
        late_s = (1 + EACH) * self.deadline.limit_s
        while (count := found.plan.num_microbatches // 2) and self.deadline.passed_s < late_s:
            fewer = msgspec.structs.replace(pins, microbatches=count)
            with handing_on([found]):
                _, other = next(self._tried([fewer]), (fewer, None))
            if other is None or other.step_s >= found.step_s:
                break
            found = other
        return found

    def _tried(self, ways: Sequence[Constraints]) -> Iterator[tuple[Constraints, BestPlan | None]]:
        """Each of the constraints that leaves plans, and one of them, None where it does not fit; late, of few."""
        for number, pins in enumerate(ways):
            if number >= RESORTS and self.deadline.passed_s > MOST_LATE * self.deadline.limit_s:
                return
            budget = device_budget(self.job.cluster, pins)
            with suppress(ConstraintError):
                found: BestPlan | None = None
                with suppress(NoPlanError):
                    share_s = self.deadline.share_s(EACH)
                    found = as_reserved(self.find(self.job, pins, share_s, self.progress, certify=False), budget)
                fits = found is not None and (pins.reserve_bytes == 0 or needed_bytes(found.plan) <= budget)
                yield pins, found if fits else None

    def _in_an_order(self, constraints: Constraints) -> BestPlan | None:
        """One device's plan whose ops run in the order that holds least; None where it does not fit either."""
        mesh, budget = candidate_meshes(self.job, constraints)[0], device_budget(self.job.cluster, constraints)
        if not orders_freely(mesh, constraints):
            return None
        lean = leanest(self.job, mesh, constraints, lean_time_s(self.deadline.limit_s), budget)
        if lean is None or lean.held_bytes > budget:
            return None
        seconds = self.deadline.passed_s
        return as_reserved(BestPlan(certified(lean.candidate, 0.0, 1), seconds, seconds), budget)
