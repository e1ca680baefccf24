"""The same as an integer program with intervals, for shops small enough.

Operations are tasks of fixed length, positions and links do one task at a time, what needs what are rows, queues are
in order, memory is a capacity over intervals from F to B (or to I, and from there to W). Durations are rounded down
to whole ticks: the bound then holds for the true ones, and sequences are timed afresh. Messages may go over a link in
any order here, in that of their making when timed; so a schedule with unequal messages may take longer than its
objective.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from paraplan.ir.execution.schedule import ActionKind
from paraplan.planner.schedules.schedule_problem import at
from paraplan.planner.schedules.searching.job_shop import Shop
from paraplan.planner.schedules.searching.timing import timing
from paraplan.planner.solvers.milp_intervals import IntervalBuilder, solve_intervals
from paraplan.planner.solvers.milp_problem import Status

_TICKS = 1_000_000


@dataclass(frozen=True)
class Exact:
    """What the solver gave.

    Attributes:
        sequences: per position; None where it found nothing within the step to beat.
        bound_s: no schedule of the shop is shorter.
        proved: whether it came to an end.
    """

    sequences: list[list[int]] | None
    bound_s: float
    proved: bool


def solve_exactly(
    shop: Shop, sequences: list[list[int]], step_s: float, bound_s: float, *, effort: float, time_limit_s: float
) -> Exact:
    """Look for a shorter step than one known.

    Args:
        shop: operations.
        sequences: known ones.
        step_s: their step.
        bound_s: a lower bound known.
        effort: limit of the solver's own count of work, the same on every machine.
        time_limit_s: limit of wall time.
    """
    model = _Model(shop, step_s, bound_s)
    known = timing(shop, sequences)
    assert known is not None, "the known sequences deadlock"
    hint = {model.start[op]: min(model.horizon, int(start * model.scale)) for op, start in enumerate(known.start_s)}
    found = solve_intervals(model.builder, time_limit_s=time_limit_s, work_limit=effort, warm_start=hint)
    if found.status is Status.INFEASIBLE:  # nothing is shorter than what is known, in ticks
        return Exact(None, max(bound_s, min(step_s, model.horizon / model.scale)), True)
    least = bound_s if found.bound is None else max(bound_s, found.bound / model.scale)
    if not found.values:
        return Exact(None, least, False)
    orders = [
        sorted((op for queue in own for op in queue), key=lambda op: (found.values[model.start[op]], op))
        for own in shop.queues
    ]
    return Exact(orders, least, found.status is Status.OPTIMAL)


class _Model:
    """Columns: the start of every operation, the end of every stretch of memory, the step."""

    def __init__(self, shop: Shop, step_s: float, bound_s: float) -> None:
        self.shop = shop
        self.scale = _TICKS / step_s
        self.horizon = int(step_s * self.scale)
        self.builder = IntervalBuilder()
        self.ticks = [int(seconds * self.scale) for seconds in shop.seconds]
        self.start = [self.builder.ranged(0, self.horizon - ticks) for ticks in self.ticks]
        self.step = self.builder.ranged(int(bound_s * self.scale * (1 - 1e-12)), self.horizon)
        self._machines()
        self._rows()
        if shop.limit_bytes is not None:
            self._memory(shop.limit_bytes)
        self.builder.minimise({self.step: 1})

    def _machines(self) -> None:
        shop, builder = self.shop, self.builder
        for own in shop.queues:
            builder.disjoint([builder.task(self.start[op], self.ticks[op]) for queue in own for op in queue])
        links: dict[tuple[int, int], list[int]] = {}
        for op, needs in enumerate(shop.needs):
            for need in needs:
                way = int(need.seconds * self.scale)
                if need.link is None or not way:
                    builder.row({self.start[need.op]: 1, self.start[op]: -1}, -self.ticks[need.op])
                    continue
                sent = builder.ranged(0, self.horizon)
                builder.row({self.start[need.op]: 1, sent: -1}, -self.ticks[need.op])
                builder.row({sent: 1, self.start[op]: -1}, -way)
                links.setdefault(need.link, []).append(builder.task(sent, way))
        for messages in links.values():
            builder.disjoint(messages)

    def _rows(self) -> None:
        for own in self.shop.queues:
            for queue in own:
                for first, second in pairwise(queue):
                    self.builder.row({self.start[first]: 1, self.start[second]: -1}, -self.ticks[first])
                last = queue[-1]
                self.builder.row({self.start[last]: 1, self.step: -1}, -self.ticks[last])

    def _memory(self, limits: tuple[int, ...]) -> None:
        shop, builder = self.shop, self.builder
        for position, limit in enumerate(limits):
            demands: dict[int, int] = {}
            for op in (op for queue in shop.queues[position] for op in queue):
                action = shop.actions[op]
                if action.kind is ActionKind.F and shop.before_bytes[op]:
                    whole = at(action.stage, ActionKind.B, action.microbatch)
                    half = at(action.stage, ActionKind.I, action.microbatch)
                    until = shop.number[whole if whole in shop.number else half]
                    demands[self._stretch(self.start[op], until)] = shop.before_bytes[op]
                elif action.kind is ActionKind.I:
                    kept = at(action.stage, ActionKind.W, action.microbatch)
                    if kept_bytes := -shop.after_bytes[shop.number[kept]]:
                        ended = builder.ranged(0, self.horizon)
                        builder.row({self.start[op]: 1, ended: -1}, -self.ticks[op])
                        builder.row({self.start[op]: -1, ended: 1}, self.ticks[op])
                        demands[self._stretch(ended, shop.number[kept])] = kept_bytes
            if demands:
                builder.capacity(demands, limit - shop.start_bytes[position])

    def _stretch(self, begin: int, until: int) -> int:
        """The interval from a column to the end of an operation."""
        end = self.builder.ranged(0, self.horizon)
        self.builder.row({self.start[until]: 1, end: -1}, -self.ticks[until])
        self.builder.row({self.start[until]: -1, end: 1}, self.ticks[until])
        return self.builder.stretch(begin, end)
