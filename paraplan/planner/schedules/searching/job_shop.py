"""A pipeline as a job shop: computations are operations, positions and links the machines that do one at a time.

Microbatches are equal, so those of one kind of operation (stage, F, say) may be put in the order of microbatches: let
the k-th to start be the k-th microbatch's everywhere, and whatever had to come before still does, with as much in
memory at any time. So an order of a position is a merge of queues, one per stage and kind. A message goes over its
link in the order of its making, which is that of the sender's computations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.planner.schedules.schedule_problem import Orders, PipelineProblem, at, check_costs, check_sizes

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W


@dataclass(frozen=True)
class StagePositions:
    """Where stages lie.

    Attributes:
        name: of the placement, for people.
        position: per replica and stage, its position; microbatch m is run by replica m mod their number.
    """

    name: str
    position: tuple[tuple[int, ...], ...]

    def of(self, stage: int, microbatch: int) -> int:
        """The position that runs a microbatch of a stage."""
        return self.position[microbatch % len(self.position)][stage]


def placements(problem: PipelineProblem) -> tuple[StagePositions, ...]:
    """Those to search: the one given; else in turns and in waves, and with one stage a position two ways at once.

    Raises:
        ConstraintError: sizes, costs, limits or a placement that mean nothing.
    """
    size, count = problem.num_positions, len(problem.stages)
    check_sizes("searched", size, problem.num_microbatches)
    check_costs(problem.stages)
    if problem.memory_bytes and len(problem.memory_bytes) != size:
        raise ConstraintError(f"schedule searched: {len(problem.memory_bytes)} memory limits for {size} positions")
    if problem.placement:
        if len(problem.placement) != count or set(problem.placement) != set(range(size)):
            raise ConstraintError(
                f"schedule searched: placement {problem.placement} of {count} stages on {size} positions; give each "
                "stage a position and each position a stage"
            )
        return (StagePositions("given", (problem.placement,)),)
    if count % size:
        raise ConstraintError(
            f"schedule searched: {count} stages on {size} positions; give a multiple of {size}, or a placement"
        )
    turns = tuple(stage % size for stage in range(count))
    waves = tuple(stage % size if stage // size % 2 == 0 else size - 1 - stage % size for stage in range(count))
    found = [StagePositions("in turns", (turns,))]
    if waves != turns:
        found.append(StagePositions("in waves", (waves,)))
    if problem.replicas and count == size > 1 and problem.num_microbatches > 1:
        found.append(StagePositions("two ways", (turns, turns[::-1])))
    return tuple(found)


@dataclass(frozen=True)
class Precedence:
    """What an operation waits for.

    Attributes:
        op: the operation before it.
        seconds: on the way from there.
        link: (from, to) positions; None on one position.
    """

    op: int
    seconds: float
    link: tuple[int, int] | None


@dataclass(frozen=True)
class Shop:
    """Operations, numbered so that every one comes after what it needs.

    Attributes:
        actions, position, seconds: per operation.
        needs: per operation, what it waits for.
        before_bytes, after_bytes: per operation, what it adds to memory as it starts and as it ends.
        queues: per position, its queues: operations of one stage and kind in the order of microbatches.
        start_bytes: per position, held from the beginning.
        limit_bytes: per position; None for no limit.
    """

    actions: tuple[Action, ...]
    position: tuple[int, ...]
    seconds: tuple[float, ...]
    needs: tuple[tuple[Precedence, ...], ...]
    before_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]
    queues: tuple[tuple[tuple[int, ...], ...], ...]
    start_bytes: tuple[int, ...]
    limit_bytes: tuple[int, ...] | None

    @cached_property
    def number(self) -> dict[Action, int]:
        """An action's operation."""
        return {action: index for index, action in enumerate(self.actions)}

    @cached_property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """Per microbatch, its operations."""
        found: list[list[int]] = [[] for _ in range(1 + max(action.microbatch for action in self.actions))]
        for op, action in enumerate(self.actions):
            found[action.microbatch].append(op)
        return tuple(map(tuple, found))

    @cached_property
    def readers(self) -> tuple[tuple[Precedence, ...], ...]:
        """Per operation, who waits for it: needs seen from the other end."""
        found: list[list[Precedence]] = [[] for _ in self.actions]
        for op, needs in enumerate(self.needs):
            for need in needs:
                found[need.op].append(Precedence(op, need.seconds, need.link))
        return tuple(map(tuple, found))

    def orders(self, sequences: list[list[int]]) -> Orders:
        """Sequences of operations as orders of actions."""
        return tuple(tuple(self.actions[op] for op in sequence) for sequence in sequences)

    def sequences(self, orders: Orders) -> list[list[int]]:
        """Orders of actions as sequences of operations."""
        return [[self.number[action] for action in order] for order in orders]

    def peak(self, sequences: list[list[int]]) -> int:
        """The most bytes any position holds."""
        peaks = []
        for live, sequence in zip(self.start_bytes, sequences, strict=True):
            peaks.append(live)
            for op in sequence:
                live += self.before_bytes[op]
                peaks.append(live)
                live += self.after_bytes[op]
                peaks.append(live)
        return max(peaks)

    def fits(self, position: int, sequence: list[int]) -> bool:
        """Whether a position's order keeps within its memory."""
        if self.limit_bytes is None:
            return True
        live, limit = self.start_bytes[position], self.limit_bytes[position]
        for op in sequence:
            live += self.before_bytes[op]
            if live > limit:
                return False
            live += self.after_bytes[op]
            if live > limit:
                return False
        return live <= limit


def build_shop(problem: PipelineProblem, placed: StagePositions, split: bool) -> Shop:
    """The operations of a problem under one placement, the backward whole or split.

    Args:
        problem: what is scheduled.
        placed: the position of every stage.
        split: whether the backward is in two halves.
    """
    stages, m = problem.stages, problem.num_microbatches
    actions = [at(stage, F, micro) for stage in range(len(stages)) for micro in range(m)]
    backward = I if split else B
    for stage in reversed(range(len(stages))):
        actions += [at(stage, backward, micro) for micro in range(m)]
        actions += [at(stage, W, micro) for micro in range(m)] if split else []
    number = {action: index for index, action in enumerate(actions)}
    position = tuple(placed.of(action.stage, action.microbatch) for action in actions)
    needs, before, after = [], [], []
    for action in actions:
        stage, micro, costs = action.stage, action.microbatch, stages[action.stage]
        here = placed.of(stage, micro)
        found = []
        if action.kind is W:
            found.append(Precedence(number[at(stage, I, micro)], 0.0, None))
        elif action.kind is not F:
            found.append(Precedence(number[at(stage, F, micro)], 0.0, None))
        step, kind = (-1, F) if action.kind is F else (1, backward)
        if action.kind is not W and 0 <= stage + step < len(stages):
            there = placed.of(stage + step, micro)
            source = stages[stage + step]
            seconds = source.send_forward_s if kind is F else source.send_backward_s
            link = (there, here) if there != here else None
            found.append(Precedence(number[at(stage + step, kind, micro)], seconds if link else 0.0, link))
        needs.append(tuple(found))
        before.append(costs.activation_bytes if action.kind is F else 0)
        after.append(
            {
                F: 0,
                B: -costs.activation_bytes,
                I: costs.weight_grad_bytes - costs.activation_bytes,
                W: -costs.weight_grad_bytes,
            }[action.kind]
        )
    queues: list[dict[tuple[int, ActionKind], list[int]]] = [{} for _ in range(problem.num_positions)]
    for op, action in enumerate(actions):
        queues[position[op]].setdefault((action.stage, action.kind), []).append(op)
    held = [{stage for stage, _ in own} for own in queues]
    return Shop(
        actions=tuple(actions),
        position=position,
        needs=tuple(needs),
        before_bytes=tuple(before),
        seconds=tuple(stages[action.stage].seconds(action.kind) for action in actions),
        after_bytes=tuple(after),
        queues=tuple(tuple(map(tuple, own.values())) for own in queues),
        start_bytes=tuple(sum(stages[stage].fixed_bytes for stage in own) for own in held),
        limit_bytes=problem.memory_bytes or None,
    )
