"""What a memory schedule costs, and whether it may be (`ir.execution.memory_actions` has the actions and their text).

Memory follows from the order of the actions alone, never from how long they take: it changes at R (what the op makes),
F and B. Time is that of an event simulation with a compute stream and, per tier, a copy stream each way; an action is
issued when the ops before it have ended. A copy on a tier is kept until the step ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.memory_actions import Act, Actions, MemAction, free, run
from paraplan.planner.memory.problem import GIVEN, MemoryProblem, Tier


@dataclass(frozen=True)
class ScheduleCost:
    """What a schedule costs.

    Attributes:
        step_s: until the last op has ended.
        peak_bytes: the most resident at once, base included.
        peak_action: index of the action at which.
        recomputed_s: seconds of executions beyond each op's first.
        waited_s: seconds the compute stream waited for copies.
        moved_bytes: copied to tiers.
        tier_bytes: what each tier holds in the end, in the problem's order.
    """

    step_s: float
    peak_bytes: int
    peak_action: int
    recomputed_s: float
    waited_s: float
    moved_bytes: int
    tier_bytes: tuple[int, ...]


def evaluate(problem: MemoryProblem, actions: Actions) -> ScheduleCost:
    """Replays a schedule.

    Raises:
        InvalidPlanError: an action cannot be taken (what it needs is not there, a tier is full, an op that must not be
            repeated is), or at the end an op never ran or a kept tensor is missing; says which action.
    """
    machine = _Machine(problem)
    for position, action in enumerate(actions):
        _TAKE[action.act](machine, action, position)
    machine.check_end()
    return ScheduleCost(
        machine.now,
        machine.peak,
        machine.peak_action,
        machine.recomputed,
        machine.waited,
        machine.moved,
        tuple(sum(problem.tensors[tensor].nbytes for tensor in machine.stored[tier.name]) for tier in problem.tiers),
    )


class _Machine:
    """What is where, and what time it is, while a schedule is replayed."""

    def __init__(self, problem: MemoryProblem) -> None:
        self.problem = problem
        self.resident = {index for index, tensor in enumerate(problem.tensors) if tensor.maker == GIVEN}
        self.live = problem.base_bytes + sum(problem.tensors[index].nbytes for index in self.resident)
        self.peak, self.peak_action = self.live, -1
        self.done: set[int] = set()
        self.now = self.waited = self.recomputed = 0.0
        self.moved = 0
        self.tiers: dict[str, Tier] = {tier.name: tier for tier in problem.tiers}
        self.stream_free = {(tier, act): 0.0 for tier in self.tiers for act in (Act.OUT, Act.BACK)}
        self.leaving: dict[int, float] = {}
        self.coming: dict[int, float] = {}
        self.stored: dict[str, dict[int, float]] = {name: {} for name in self.tiers}

    def run(self, action: MemAction, position: int) -> None:
        op = self.problem.ops[action.index]
        missing = [tensor for tensor in op.reads if tensor not in self.resident]
        if missing:
            raise InvalidPlanError(
                f"action {position}: op {action.index} ({op.name}) reads tensors {missing}, which are not there"
            )
        again = action.index in self.done
        if again and not op.repeatable:
            raise InvalidPlanError(f"action {position}: op {action.index} ({op.name}) must not be executed twice")
        for tensor in op.reads:
            self._wait(self.coming, tensor)
        made = sum(self.problem.tensors[tensor].nbytes for tensor in op.makes)
        self._raise_peak(self.live + made + op.workspace_bytes, position)
        for tensor in op.makes:
            self._arrive(tensor)
        self.now += op.time_s
        self.recomputed += op.time_s if again else 0.0
        self.done.add(action.index)

    def free(self, action: MemAction, position: int) -> None:
        tensor = action.index
        self._need(tensor, position, "freed")
        self._wait(self.leaving, tensor)
        self._wait(self.coming, tensor)
        self.resident.remove(tensor)
        self.live -= self.problem.tensors[tensor].nbytes

    def out(self, action: MemAction, position: int) -> None:
        tensor, tier = action.index, self._tier(action, position)
        self._need(tensor, position, f"copied to {tier.name}")
        stored = self.stored[tier.name]
        if tensor not in stored:
            holds = sum(self.problem.tensors[each].nbytes for each in (*stored, tensor))
            if holds > tier.capacity_bytes:
                raise InvalidPlanError(
                    f"action {position}: {tier.name} would hold {holds} of {tier.capacity_bytes} bytes"
                )
        begun = max(self.now, self.coming.get(tensor, 0.0), self.stream_free[tier.name, Act.OUT])
        end = begun + tier.out_s(self.problem.tensors[tensor].nbytes)
        self.stream_free[tier.name, Act.OUT] = stored[tensor] = end
        self.leaving[tensor] = max(end, self.leaving.get(tensor, 0.0))
        self.moved += self.problem.tensors[tensor].nbytes

    def back(self, action: MemAction, position: int) -> None:
        tensor, tier = action.index, self._tier(action, position)
        if tensor in self.resident or tensor not in self.stored[tier.name]:
            raise InvalidPlanError(f"action {position}: tensor {tensor} is there already, or not on {tier.name}")
        self._arrive(tensor)
        self._raise_peak(self.live, position)
        begun = max(self.now, self.stored[tier.name][tensor], self.stream_free[tier.name, Act.BACK])
        end = begun + tier.back_s(self.problem.tensors[tensor].nbytes)
        self.stream_free[tier.name, Act.BACK] = self.coming[tensor] = end

    def check_end(self) -> None:
        missed = [index for index in range(len(self.problem.ops)) if index not in self.done]
        if missed:
            raise InvalidPlanError(f"ops {missed[:5]} ({len(missed)} in all) never run")
        lost = [
            index for index, tensor in enumerate(self.problem.tensors) if tensor.kept and index not in self.resident
        ]
        if lost:
            raise InvalidPlanError(f"tensors {lost[:5]} ({len(lost)} in all) must be there in the end and are not")

    def _arrive(self, tensor: int) -> None:
        if tensor not in self.resident:
            self.resident.add(tensor)
            self.live += self.problem.tensors[tensor].nbytes

    def _raise_peak(self, nbytes: int, position: int) -> None:
        if nbytes > self.peak:
            self.peak, self.peak_action = nbytes, position

    def _wait(self, copies: dict[int, float], tensor: int) -> None:
        end = copies.pop(tensor, 0.0)
        if end > self.now:
            self.waited += end - self.now
            self.now = end

    def _need(self, tensor: int, position: int, what: str) -> None:
        if tensor not in self.resident:
            raise InvalidPlanError(f"action {position}: tensor {tensor} is {what} but not there")

    def _tier(self, action: MemAction, position: int) -> Tier:
        found = self.tiers.get(action.tier)
        if found is None:
            have = ", ".join(self.tiers) or "none"
            raise InvalidPlanError(f"action {position}: there is no tier {action.tier!r} (have {have})")
        return found


_TAKE = {Act.RUN: _Machine.run, Act.FREE: _Machine.free, Act.OUT: _Machine.out, Act.BACK: _Machine.back}


def freeing(problem: MemoryProblem, ops: tuple[int, ...]) -> Actions:
    """A schedule that executes ops in an order given, repeats among them, and frees as soon as possible.

    Each tensor made is freed after the last op that reads it before it is made again; a result that nobody reads is
    freed at once; kept tensors stay from when they were last made.
    """
    last_use: dict[tuple[int, int], int] = {}
    version = dict.fromkeys(range(len(problem.tensors)), 0)
    for position, index in enumerate(ops):
        for tensor in problem.ops[index].reads:
            last_use[tensor, version[tensor]] = position
        for tensor in problem.ops[index].makes:
            version[tensor] += 1
            last_use[tensor, version[tensor]] = position
    newest = dict(version)
    ends: dict[int, list[int]] = {}
    for (tensor, made), position in last_use.items():
        if not (problem.tensors[tensor].kept and made == newest[tensor]):
            ends.setdefault(position, []).append(tensor)
    actions: list[MemAction] = [free(t) for t in _never_read(problem, last_use)]
    for position, index in enumerate(ops):
        actions.append(run(index))
        actions += [free(tensor) for tensor in sorted(ends.get(position, ()))]
    return tuple(actions)


def _never_read(problem: MemoryProblem, last_use: dict[tuple[int, int], int]) -> list[int]:
    return [
        index
        for index, tensor in enumerate(problem.tensors)
        if tensor.maker == GIVEN and not tensor.kept and (index, 0) not in last_use
    ]
