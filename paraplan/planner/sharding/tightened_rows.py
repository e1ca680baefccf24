"""The rows of memory of a sharding problem, tightened where its plans need more than the rows knew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paraplan.cost_models.realised_plan import Realised
from paraplan.planner.assemble import Job
from paraplan.planner.sharding.formulate import Formulation, memory_rows, tier_rows, with_rows
from paraplan.planner.sharding.instants import Instant, instant_row, peak_instant
from paraplan.planner.sharding.network.cost_network import Row
from paraplan.planner.sharding.objective import held_bytes
from paraplan.planner.sharding.space import Space


class MemoryRows:
    """The rows of memory of a problem, made tighter where its plans needed more than the rows knew.

    Attributes:
        base: the rows at the loss and at the update, as they are first.
    """

    def __init__(self, job: Job, space: Space, problem: Formulation, memory_bytes: float) -> None:
        self._job, self._space, self._problem, self._limit = job, space, problem, memory_bytes
        self.base = self._totals = memory_rows(space, memory_bytes)
        self._instants = dict[Instant, Row]()
        self._over = dict[str, int]()

    @property
    def rows(self) -> tuple[Row, ...]:
        """On the device, at the instants where plans peaked, and on every tier."""
        return (*self._totals, *tier_rows(self._space, self._over), *self._instants.values())

    @property
    def is_lowered(self) -> bool:
        """Whether a plan was found that needs more on the device than the first rows knew."""
        return bool(self._instants) or self._totals is not self.base

    @property
    def is_tightened(self) -> bool:
        """Likewise, on the device or on a tier: what has no choice then may have had one."""
        return self.is_lowered or bool(self._over)

    def tighten(self, made: Realised, choices: Sequence[int]) -> None:
        """Rows that a plan which does not fit, made of these choices, breaks."""
        over = made.over_bytes
        self._over = {tier: self._over.get(tier, 0) + over.get(tier, 0) for tier in {*self._over, *over}}
        if made.peak_bytes <= self._limit:
            return
        peak = made.peak_bytes / self._limit
        at = peak_instant(made)
        if at is None:  # outside of segments: every row pays
            held = held_bytes(self._space, choices[: len(self._space.deciders)])
            least = min(self._totals[0].limit, max(held) / self._limit)
            limit = max(least - (peak - 1), 1e-9)
            self._totals = tuple(replace(row, limit=limit) for row in self.base)
        else:
            row = instant_row(self._space, self._job.program, self._problem, at, self._limit)
            self._instants[at] = _at_peak(self._problem, row, choices, peak, self._instants.get(at))


def _at_peak(problem: Formulation, row: Row, choices: Sequence[int], peak: float, known: Row | None) -> Row:
    """The row of an instant, its limit lowered by what the simulation found above the row."""
    counted = float(with_rows(problem.network, (row,)).activity(choices)[0])
    limit = min(1.0, counted - (peak - 1.0))
    return replace(row, limit=max(min(limit, known.limit if known is not None else 1.0), 1e-9))
