"""When orders end and what they hold at most: `event_simulation.evaluate` without its events, in less time.

A link carries its messages in the order in which its sender makes them, so positions can be gone through one after
another, each until it waits for what is not made yet. Orders are read once, into numbers, however many costs they are
timed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from paraplan.ir.execution.schedule import ActionKind
from paraplan.ir.process.memo import SESSION, Lately
from paraplan.planner.schedules.event_simulation import evaluate
from paraplan.planner.schedules.named import named_orders
from paraplan.planner.schedules.order_memory import Instants, Waiting, at_fullest, instants_of
from paraplan.planner.schedules.schedule_problem import Orders, StageCosts, check_costs, runner_of, stages_of

_KINDS = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}
_NAMED: Lately[OrderTimes] = SESSION.lately("order_times.named", 200_000, lambda times: times.num_actions)


class Ended(NamedTuple):
    """When orders end.

    Attributes:
        step_s: the last computation.
        stage_s: per stage, its last backward.
        peak_bytes: per position, the most bytes held at once.
    """

    step_s: float
    stage_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]


_Computation = tuple[int, int, int, int, int]
"""An action in numbers, -1 for none: of its kind and stage together; what it waits for; what it makes for another
stage; the link over which that travels; its stage, of a backward."""


class OrderTimes:
    """Orders, read.

    Args:
        orders: per position, its computations.
        num_stages: of the pipeline.
    """

    def __init__(self, orders: Orders, num_stages: int) -> None:
        self.orders, self.num_stages = orders, num_stages
        self.held = stages_of(orders)
        self.num_actions: int = sum(len(order) for order in orders)
        self._micros = 1 + max((action.microbatch for order in orders for action in order), default=0)
        self._links: dict[tuple[int, int], int] = {}
        runner = runner_of(orders)
        self._computations = tuple(self._read(position, runner) for position in range(len(orders)))

    def _read(self, position: int, runner: dict[tuple[int, int], int]) -> tuple[_Computation, ...]:
        micros, last = self._micros, self.num_stages - 1
        found: list[_Computation] = []
        for action in self.orders[position]:
            stage, kind, m = action.stage, action.kind, action.microbatch
            code = _NUMBER[kind] * self.num_stages + stage
            if kind is ActionKind.W:
                found.append((code, -1, -1, -1, stage))
                continue
            forward = kind is ActionKind.F
            waits = stage if forward else last - stage
            need = (stage - 1) * micros + m if forward else (self.num_stages + stage + 1) * micros + m
            made = (0 if forward else self.num_stages * micros) + stage * micros + m
            reader, link = runner.get((stage + (1 if forward else -1), m)), -1
            if reader is not None and reader != position:
                link = self._links.setdefault((position, reader), len(self._links))
            found.append((code, need if waits else -1, made, link, -1 if forward else stage))
        return tuple(found)

    def ended(self, stages: tuple[StageCosts, ...]) -> Ended:
        """When they end under some costs, one per stage.

        Raises:
            InvalidPlanError, ConstraintError: as for `evaluate`.
        """
        check_costs(stages)
        took = [costs.seconds(kind) for kind in _KINDS for costs in stages]
        sends = [
            costs.send_forward_s if kind is ActionKind.F else costs.send_backward_s
            for kind in _KINDS
            for costs in stages
        ]
        count = len(self._computations)
        free, at = [0.0] * count, [0] * count
        arrived = [-1.0] * (2 * self.num_stages * self._micros)
        waiting: dict[int, int] = {}
        links, over = [0.0] * len(self._links), [0.0] * self.num_stages
        ready = list(range(count))
        while ready:
            position = ready.pop()
            computations, now, index = self._computations[position], free[position], at[position]
            while index < len(computations):
                code, need, made, link, of = computations[index]
                if need >= 0:
                    there = arrived[need]
                    if there < 0.0:
                        waiting[need] = position
                        break
                    if there > now:
                        now = there
                now += took[code]
                index += 1
                if of >= 0 and now > over[of]:
                    over[of] = now
                if made >= 0:
                    there = now
                    if link >= 0:
                        there = links[link] = max(now, links[link]) + sends[code]
                    arrived[made] = there
                    if made in waiting:
                        ready.append(waiting.pop(made))
            free[position], at[position] = now, index
        if any(index < len(each) for index, each in zip(at, self._computations, strict=True)):
            evaluate(self.orders, stages)  # says who waits for what
        return Ended(max(free), tuple(over), self.peak_bytes(stages))

    def peak_bytes(self, stages: tuple[StageCosts, ...]) -> tuple[int, ...]:
        """Per position, the most bytes held at once."""
        saved = [costs.activation_bytes for costs in stages]
        deferred = [costs.weight_grad_bytes for costs in stages]
        return tuple(
            sum(stages[stage].fixed_bytes for stage in held) + self.waiting_bytes(position, saved, deferred, stages)
            for position, held in enumerate(self.held)
        )

    def waiting_bytes(
        self, position: int, saved: Sequence[int], deferred: Sequence[int], stages: Sequence[StageCosts] = ()
    ) -> int:
        """As `waiting`, the bytes alone.

        Args:
            position, saved, deferred, stages: see there.
        """
        return self.waiting(position, saved, deferred, stages).nbytes

    def waiting(
        self, position: int, saved: Sequence[int], deferred: Sequence[int], stages: Sequence[StageCosts] = ()
    ) -> Waiting:
        """What a position holds of microbatches where it is fullest, less gradients and copies of parameters that are
        not there then.

        Args:
            position: which.
            saved: per stage of the pipeline, bytes a microbatch holds from its forward to its backward.
            deferred: per stage, bytes it holds between the halves of its backward.
            stages: per stage, of which these are known; () where they are always there.
        """
        held = self.held[position]
        mine, between = ([each[stage] for stage in held] for each in (saved, deferred))
        return at_fullest(self._instants[position], mine, between, [stages[stage] for stage in held] if stages else ())

    @cached_property
    def _instants(self) -> tuple[Instants, ...]:
        return tuple(map(instants_of, self.orders, self.held))


def ended(orders: Orders, stages: tuple[StageCosts, ...]) -> Ended:
    """When orders end under some costs (see `OrderTimes.ended`)."""
    return OrderTimes(orders, len(stages)).ended(stages)


def named_times(name: str, num_positions: int, num_microbatches: int, stages_per_position: int) -> OrderTimes:
    """The orders of a schedule, read.

    Args:
        name: of the schedule.
        num_positions: of the pipeline.
        num_microbatches: of a step.
        stages_per_position: on every position.
    Raises:
        ConstraintError: as for `named_orders`.
    """
    sizes = name, num_positions, num_microbatches, stages_per_position
    return _NAMED.get(sizes, lambda: OrderTimes(named_orders(*sizes), num_positions * stages_per_position))
