"""The steps of one rank, part by part: a stage's forward and backward, with the tail between them (see
`whole_batch`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import StepKind
from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.steps.backward_halves import half_of
from paraplan.lowering.steps.segment_steps import SegmentSteps
from paraplan.lowering.steps.step_writer import StepWriter
from paraplan.lowering.steps.whole_batch import Turn, cut_block, gather_block


class StageSteps:
    """Writes the steps that run stages.

    Args:
        rank, writer: whose steps are written.
        segments: runs a stage's.
        actions: of the rank.
    Raises:
        InvalidPlanError: of the stage that holds the tail, a backward precedes a forward.
    """

    def __init__(self, rank: RankGroup, writer: StepWriter, segments: SegmentSteps, actions: Sequence[Action]) -> None:
        self._rank, self._writer, self._segments, self._actions = rank, writer, segments, actions
        self._turn: Turn | None = None
        stage = rank.lowered.tail_stage
        if stage in rank.holding.stages:
            self._turn = Turn(rank.plan.schedule.name, stage, rank.micro.mixes, actions)

    def forward(self, stage: int, m: int) -> None:
        """Run a stage's forward, and the tail's after the last one."""
        head, tail = self._halves(stage)
        self._segments.run_forward(head, m)
        if self._turn is not None and self._turn.ends(stage, m):
            for value in self._rank.parts(m).wholes:
                self.gather(value)
            self._segments.run_forward(tail, self._rank.m)

    def gather(self, value: str) -> Name:
        """Put together what the microbatches say of a value; the outer name of the whole."""
        spec, given = self._rank.spec_of(value), self._rank.parts(0).given[value]
        block = gather_block(f"gather.{value}", spec, given, self._rank.extended)
        whole = outer_names.value(value, self._rank.m)
        self._writer.call(block, tuple(outer_names.value(value, int(local[1:])) for local in block.inputs), (whole,))
        return whole

    def _halves(self, stage: int) -> tuple[range, range]:
        """A stage's segments before the tail, and those of it."""
        held = self._rank.plan.stages[stage]
        middle = max(held.first, min(held.stop, self._rank.micro.tail))
        return range(held.first, middle), range(middle, held.stop)

    def backward(
        self, stage: int, m: int, half: ActionKind, final: dict[int, list[str]], ahead: Callable[[], None] | None = None
    ) -> None:
        """Run a stage's backward, or half of it.

        Args:
            stage, m: of which microbatch.
            half: B for all of it.
            final: segment -> the parameters whose gradients are complete once it is through.
            ahead: writes what is to be under way beside the last segment.
        """
        head, tail = self._halves(stage)
        if self._turn is not None and self._turn.begins(stage, m, half):
            self._segments.run_backward(tuple(reversed(tail)), self._rank.m, half, final)
        if tail and half is not ActionKind.W:
            self._cut(m)
        self._segments.run_backward(tuple(reversed(head)), m, half, final, ahead)
        if ahead is not None and not head:
            ahead()

    def _cut(self, m: int) -> None:
        """A microbatch's part of the gradients that the tail has given."""
        parts = self._rank.parts(m)
        for value, given in parts.whole_grads.items():
            spec, layout = self._rank.spec_of(value), parts.grads[value].layout
            block = cut_block(f"cut.{value}", spec, given, layout, self._rank.extended)
            whole, grad = outer_names.grad_of(value, self._rank.m), outer_names.grad_of(value, m)
            self._writer.call(block, (whole,), (grad.addend(),), m, self._rank.micro.tail)
            self._writer.add(StepKind.ACCUMULATE, args=(grad, grad.addend()), microbatch=m)

    def finals(self) -> dict[int, dict[int, list[str]]]:
        """Action, by its place -> segment -> the parameters whose gradients it is the last to add to."""
        last: dict[str, tuple[int, int]] = {}
        for position, action in enumerate(self._actions):
            if action.kind not in (ActionKind.B, ActionKind.I, ActionKind.W):
                continue
            stage, parts = self._rank.plan.stages[action.stage], self._rank.parts(action.microbatch)
            begins = self._turn is not None and self._turn.begins(action.stage, action.microbatch, action.kind)
            for index in reversed(range(stage.first, stage.stop if begins else min(stage.stop, self._rank.micro.tail))):
                params = self._rank.program.segments[index].params
                grads = half_of(parts, index, action.kind).block.outputs[-len(params) :] if params else ()
                last.update({n: (position, index) for n, grad in zip(params, grads, strict=True) if grad is not None})
        found: dict[int, dict[int, list[str]]] = {}
        for name in self._rank.holding.graded:
            position, index = last[name]
            found.setdefault(position, {}).setdefault(index, []).append(name)
        return found
