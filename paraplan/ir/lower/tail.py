"""The steps of one rank, part by part: a stage's forward and backward, with the tail between them (see `whole`)."""

from __future__ import annotations

from collections.abc import Callable

from paraplan.ir import names as outer_names
from paraplan.ir.lower.walk import SegmentSteps
from paraplan.ir.lower.whole import cut_block, gather_block
from paraplan.ir.names import Name
from paraplan.ir.program import Source, source_of
from paraplan.ir.rank_program import StepKind
from paraplan.ir.schedule import ActionKind
from paraplan.ir.tensor import TensorSpec


class TailSteps(SegmentSteps):
    """The part of `RankSteps` that runs stages."""

    def forward(self, stage: int, m: int) -> None:
        """Run a stage's forward, and the tail's after the last one."""
        head, tail = self._halves(stage)
        self.run_forward(head, m)
        if self.turn is not None and self.turn.ends(stage, m):
            for value in self.parts(m).wholes:
                self.gather(value)
            self.run_forward(tail, self.m)

    def gather(self, value: str) -> Name:
        """Put together what the microbatches say of a value; the outer name of the whole."""
        spec, given = self.spec_of(value), self.parts(0).given[value]
        block = gather_block(f"gather.{value}", spec, given, self.extended)
        whole = outer_names.value(value, self.m)
        self.call(block, tuple(outer_names.value(value, int(local[1:])) for local in block.inputs), (whole,))
        return whole

    def _halves(self, stage: int) -> tuple[range, range]:
        """A stage's segments before the tail, and those of it."""
        held = self.plan.stages[stage]
        middle = max(held.first, min(held.stop, self.micro.tail))
        return range(held.first, middle), range(middle, held.stop)

    def spec_of(self, value: str) -> TensorSpec:
        """The global spec of what a segment may be given."""
        source, name = source_of(value)
        return self.program.batch[name].spec if source is Source.BATCH else self.lowered.spec_of(value)

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
        if self.turn is not None and self.turn.begins(stage, m, half):
            self.run_backward(tuple(reversed(tail)), self.m, half, final)
        if tail and half is not ActionKind.W:
            self._cut(m)
        self.run_backward(tuple(reversed(head)), m, half, final, ahead)
        if ahead is not None and not head:
            ahead()

    def _cut(self, m: int) -> None:
        """A microbatch's part of the gradients that the tail has given."""
        parts = self.parts(m)
        for value, given in parts.whole_grads.items():
            block = cut_block(f"cut.{value}", self.spec_of(value), given, parts.grads[value].layout, self.extended)
            whole, grad = outer_names.grad_of(value, self.m), outer_names.grad_of(value, m)
            self.call(block, (whole,), (grad.addend(),), m, self.micro.tail)
            self.add(StepKind.ACCUMULATE, args=(grad, grad.addend()), microbatch=m)
