"""What a schedule takes: an event simulation of orders of computations over given times.

A position does its computations in order, each as soon as what it needs is there. What another position makes travels
over the link between the two (one per direction), one message at a time in the order they are made, while both compute.
An activation is held from the start of its F to the end of its B or I, what W needs from there to the end of W.

This is for comparing orders before there is a program: no reductions, no updates, no contention between links. Plans
are priced by `cost_models.simulator.simulate`.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.ir.struct import Value
from paraplan.planner.schedules.schedule_problem import (
    BACKWARD,
    COMPUTE,
    Orders,
    StageCosts,
    at,
    check_costs,
    runner_of,
)

_MESSAGE, _REDUCE, _COMPUTE = range(3)


class Noise(Value, frozen=True, kw_only=True):
    """Unevenness of computations.

    Attributes:
        seed: what jitter is drawn from; an action's draw depends on nothing but this and the action.
        jitter: standard deviation of the logarithm of a computation's factor.
        slowdown: per position, a constant factor (stragglers); () for none.
    """

    seed: int = 0
    jitter: float = 0.0
    slowdown: tuple[float, ...] = ()


class Event(Value, frozen=True, kw_only=True):
    """Something that happens.

    Attributes:
        action: a computation; SEND_F or SEND_B stands for a whole message, REDUCE_GRAD for a stage's gradients being
            complete.
        positions: where: one, a message's sender and receiver, or all that hold the stage.
        start_s, end_s: when; a message is posted at start_s and has arrived at end_s.
    """

    action: Action
    positions: tuple[int, ...]
    start_s: float
    end_s: float


class ScheduleTimes(Value, frozen=True, kw_only=True):
    """What some orders take.

    Attributes:
        events: by start.
        step_s: until the last computation ends.
        busy_s: per position, seconds of computation.
        peak_bytes: per position, the most bytes held at once.
        peak_in_flight: per position, the most (stage, microbatch) whose forward has begun and whose backward (W where
            it is split) has not ended.
    """

    events: tuple[Event, ...]
    step_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    peak_in_flight: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of the step that positions stand still, averaged over them."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.step_s) if self.step_s else 0.0


def evaluate(orders: Orders, stages: tuple[StageCosts, ...], noise: Noise | None = None) -> ScheduleTimes:
    """Simulate.

    Args:
        orders: per position, its computations.
        stages: costs per stage.
        noise: unevenness; None for none.
    Raises:
        InvalidPlanError: the orders wait for each other, or name a stage there is not.
        ConstraintError: costs that mean nothing.
    """
    check_costs(stages)
    walk = _Walk(orders, stages, noise or Noise())
    events = walk.run()
    peaks = [_peaks(order, stages) for order in orders]
    return ScheduleTimes(
        events=events,
        step_s=max((event.end_s for event in events), default=0.0),
        busy_s=tuple(walk.busy_s),
        peak_bytes=tuple(peak for peak, _ in peaks),
        peak_in_flight=tuple(most for _, most in peaks),
    )


def _peaks(order: tuple[Action, ...], stages: tuple[StageCosts, ...]) -> tuple[int, int]:
    """The most bytes held, and the most in flight, of one position."""
    live = peak = sum(stages[stage].fixed_bytes for stage in {action.stage for action in order})
    flying = most = 0
    for action in order:
        costs = stages[action.stage]
        if action.kind is ActionKind.F:
            live, flying = live + costs.activation_bytes, flying + 1
        elif action.kind is ActionKind.B:
            live, flying = live - costs.activation_bytes, flying - 1
        elif action.kind is ActionKind.I:
            live += costs.weight_grad_bytes - costs.activation_bytes
        else:
            live, flying = live - costs.weight_grad_bytes, flying - 1
        peak, most = max(peak, live), max(most, flying)
    return peak, most


@dataclass
class _Walk:
    """A simulation under way; events are taken from a heap in order of time, messages before computations."""

    orders: Orders
    stages: tuple[StageCosts, ...]
    noise: Noise
    done: dict[Action, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = runner_of(self.orders)
        self.next = [0] * len(self.orders)
        self.free_s = [0.0] * len(self.orders)
        self.busy_s = [0.0] * len(self.orders)
        self.link_s: dict[tuple[int, int], float] = {}
        self.arrived: dict[Action, float] = {}
        self.waiting: dict[Action, int] = {}
        self.heap: list[tuple[float, int, int, int, str, Action]] = []
        self.left = dict.fromkeys(range(len(self.stages)), 0)
        self.held: dict[int, set[int]] = {stage: set() for stage in range(len(self.stages))}
        self.reduced_s = dict.fromkeys(range(len(self.stages)), 0.0)
        for position, order in enumerate(self.orders):
            for action in order:
                if action.stage >= len(self.stages) or action.kind not in COMPUTE:
                    raise InvalidPlanError(
                        f"position {position}: {action} in an order of F, B, I and W of {len(self.stages)} stages"
                    )
                self.held[action.stage].add(position)
                self.left[action.stage] += action.kind in (ActionKind.B, ActionKind.W)

    def run(self) -> tuple[Event, ...]:
        for position in range(len(self.orders)):
            self._offer(position)
        while self.heap:
            start_s, which, position, _, _, action = heapq.heappop(self.heap)
            if which == _COMPUTE:
                self._compute(position, action, start_s)
            elif which == _MESSAGE:
                self._message(action, start_s)
            else:
                self._note(action, tuple(sorted(self.held[action.stage])), start_s, start_s)
        for position, order in enumerate(self.orders):
            if self.next[position] < len(order):
                action = order[self.next[position]]
                raise InvalidPlanError(
                    f"position {position}, computation {self.next[position]} ({action}) never gets what it needs: "
                    f"{', '.join(str(need) for need in self._needs(action) if need not in self.arrived)}"
                )
        return tuple(self.events)

    def _needs(self, action: Action) -> tuple[Action, ...]:
        """What must be there before a computation, besides the position itself."""
        stage, micro = action.stage, action.microbatch
        if action.kind is ActionKind.F:
            return (at(stage - 1, ActionKind.F, micro),) if stage else ()
        if action.kind is ActionKind.W:
            return (at(stage, ActionKind.I, micro),)
        needs = [at(stage, ActionKind.F, micro)]
        if stage + 1 < len(self.stages):
            needs.append(at(stage + 1, ActionKind.I, micro))  # stands for B as well
        return tuple(needs)

    def _offer(self, position: int) -> None:
        """Put a position's next computation on the heap, or note what it waits for."""
        order = self.orders[position]
        if self.next[position] == len(order):
            return
        action = order[self.next[position]]
        ready_s = self.free_s[position]
        for need in self._needs(action):
            there = need if self._local(need, position) else at(need.stage, _SENT[need.kind], need.microbatch)
            if there not in self.arrived:
                self.waiting[there] = position
                return
            ready_s = max(ready_s, self.arrived[there])
        self._push(ready_s, _COMPUTE, position, action)

    def _local(self, need: Action, position: int) -> bool:
        return self.runner.get((need.stage, need.microbatch)) == position

    def _push(self, start_s: float, which: int, position: int, action: Action) -> None:
        heapq.heappush(
            self.heap, (start_s, which, position, action.microbatch, action.kind.value + str(action.stage), action)
        )

    def _arrive(self, what: Action, when_s: float) -> None:
        self.arrived[what] = when_s
        position = self.waiting.pop(what, None)
        if position is not None:
            self._offer(position)

    def _compute(self, position: int, action: Action, start_s: float) -> None:
        seconds = self.stages[action.stage].seconds(action.kind) * self._factor(position, action)
        end_s = start_s + seconds
        self._note(action, (position,), start_s, end_s)
        self.busy_s[position] += seconds
        self.free_s[position] = end_s
        self.next[position] += 1
        made = action
        if action.kind in BACKWARD:
            made = at(action.stage, ActionKind.I, action.microbatch)
        if action.kind is not ActionKind.W:
            step = 1 if action.kind is ActionKind.F else -1
            reader = self.runner.get((action.stage + step, action.microbatch))
            if reader is not None and reader != position:
                self._push(end_s, _MESSAGE, position, at(action.stage, _SENT[made.kind], action.microbatch))
            self._arrive(made, end_s)
        if action.kind in (ActionKind.B, ActionKind.W):
            self.left[action.stage] -= 1
            self.reduced_s[action.stage] = max(self.reduced_s[action.stage], end_s)
            if not self.left[action.stage]:
                done = Action(stage=action.stage, kind=ActionKind.REDUCE_GRAD)
                self._push(self.reduced_s[action.stage], _REDUCE, position, done)
        self._offer(position)

    def _message(self, action: Action, start_s: float) -> None:
        forward = action.kind is ActionKind.SEND_F
        costs = self.stages[action.stage]
        source = self.runner[action.stage, action.microbatch]
        to = self.runner[action.stage + (1 if forward else -1), action.microbatch]
        seconds = costs.send_forward_s if forward else costs.send_backward_s
        end_s = max(start_s, self.link_s.get((source, to), 0.0)) + seconds
        self.link_s[source, to] = end_s
        self._note(action, (source, to), start_s, end_s)
        self._arrive(action, end_s)

    def _note(self, action: Action, positions: tuple[int, ...], start_s: float, end_s: float) -> None:
        self.events.append(Event(action=action, positions=positions, start_s=start_s, end_s=end_s))

    def _factor(self, position: int, action: Action) -> float:
        factor = self.noise.slowdown[position] if self.noise.slowdown else 1.0
        if self.noise.jitter:
            factor *= math.exp(random.Random(f"{self.noise.seed} {action}").gauss(0.0, self.noise.jitter))
        return factor


_SENT = {ActionKind.F: ActionKind.SEND_F, ActionKind.I: ActionKind.SEND_B}
