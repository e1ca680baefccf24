"""Gradients of parameters, from the blocks that make them to where the optimizer takes them.

A gradient is added to its accumulator as it is made, brought there with others (`grad_reduction.Partials`), or added
up over several microbatches first (`microbatch_groups`); once complete it is reduced to the optimizer's layout
(`grad_reduction.Reductions`), and offloaded where its parameter is updated elsewhere (`offloaded_states`).

The gradient that a stage hands on to another is what a pipeline waits for, so what is complete by that backward sets
out after it was sent: every position's reductions then delay its own next computation, and not, one after another, the
last microbatch's way through all stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.names import accumulator
from paraplan.ir.execution.rank_program import LocalValue, StepKind
from paraplan.ir.execution.schedule import Action
from paraplan.ir.machine.reshard import Move
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.bundle import local_bytes
from paraplan.lowering.blocks.grad_reduction import Partials, Reductions
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.rewrites.accumulators import Accumulators
from paraplan.lowering.steps.microbatch_groups import Groups
from paraplan.lowering.steps.step_writer import StepWriter
from paraplan.lowering.transfers.bundled_transfers import BundledValue
from paraplan.lowering.transfers.offloaded_states import OffloadedStates


class Gradients:
    """Those of a group of ranks.

    Args:
        rank: the group.
        writer: of its steps.
        states: copies to where parameters are updated.
        fused: the places whose updates fused kernels make.
        actions: of the rank.

    Attributes:
        partials, reductions: on their way.
        strides_of: accumulator -> its strides.
        sent_after: the segment whose backward makes the gradient that is handed on to another stage, so that
            parameters' wait for `send_kept`; -1 where none is.
    """

    def __init__(
        self,
        rank: RankGroup,
        writer: StepWriter,
        states: OffloadedStates,
        fused: frozenset[str],
        actions: Sequence[Action],
    ) -> None:
        self._rank, self._writer, self._states = rank, writer, states
        holders = Counter(name for holding in rank.lowered.held for name in holding.trained)
        self._tied = frozenset(name for name, count in holders.items() if count > 1)
        dtypes = {name: rank.lowered.accumulates(rank.group, name) for name in rank.holding.graded}
        self._accumulators = Accumulators(rank, writer, dtypes, fused)
        self.reductions = Reductions(rank, writer, dtypes, self._reduced)
        self.partials = Partials(rank, writer, self._accumulate, self.reductions.final)
        self._groups = Groups(rank, writer, self._accumulators, self._send_group, actions)
        self.strides_of: dict[Name, tuple[int, ...]] = {}
        self.sent_after = -1
        self._kept: list[Callable[[], None]] = []
        self._waits = False

    def start(self, order: Sequence[int], m: int) -> None:
        """A backward of these segments begins."""
        if self._waits:
            self.partials.wait_all()
            self._waits = False
        self.partials.widest_bytes = max((self._partial_bytes(index, m) for index in order), default=0)

    def add(self, name: str, out: Name, value: LocalValue, path: tuple[Move, ...], m: int, index: int) -> None:
        """Take a parameter's gradient.

        Args:
            name, out, value: the parameter; the gradient's outer name, as it was made.
            path: the moves to where it accumulates.
            m, index: of which microbatch and segment.
        """
        if index == self.sent_after:
            self._kept.append(lambda: self._add(name, out, value, path, m, index))
        else:
            self._add(name, out, value, path, m, index)

    def _add(self, name: str, out: Name, value: LocalValue, path: tuple[Move, ...], m: int, index: int) -> None:
        if not path:
            out, value = self._accumulators.begin(name, out, value, m, index)
            self.strides_of.setdefault(accumulator(name), value.strides)
            self._writer.add(StepKind.ACCUMULATE, args=(accumulator(name), out), microbatch=m, segment=index)
        elif self._groups.every > 1 and index < self._rank.micro.tail:
            self._groups.add_up(name, out, value, m, index, path)
        else:
            out, _ = self._accumulators.laid_out(name, out, value, value.dtype, m, index)
            dtype = self._accumulators.dtype_on_arrival(name, path)
            self.partials.take(name, BundledValue(out, out.moved, self._made_spec(name), path, dtype))

    def passed(self, final: Iterable[str]) -> None:
        """A segment's backward was called, the last to add to these parameters' gradients."""
        self._in_turn(self.reductions.queue.issue_due)
        self._in_turn(self.partials.queue.issue_due)
        self._in_turn(lambda: self.partials.passed(final))
        self._states.grads.passed()

    def send_kept(self) -> None:
        """Send what was kept back."""
        kept, self._kept, self.sent_after = self._kept, [], -1
        for each in kept:
            each()
        if kept:
            self.partials.flush()

    def _in_turn(self, send: Callable[[], None]) -> None:
        """Now, or after the gradient that is handed on to another stage."""
        self._kept.append(send) if self.sent_after >= 0 else send()

    def _send_group(self, name: str, total: BundledValue) -> None:
        """Take a gradient that several microbatches have added up to."""
        self._in_turn(lambda: self.partials.take(name, total))

    def pause(self) -> None:
        """A backward is over, and others follow: what it makes of every microbatch is waited for, with the next one's
        begin where it has yet to be sent."""
        if self._groups.every > 1:
            self.partials.flush()
        elif self._kept:
            self._waits = True
        else:
            self.partials.wait_all()

    def offload(self, grads: Mapping[str, Name]) -> dict[str, Name]:
        """Gradients where their parameters are updated: those that were exchanged are offloaded only now."""
        left = {
            name: self._states.offload_grad(name, grad, self.strides_of.get(self.reductions.grads.get(name, grad)))
            for name, grad in grads.items()
            if self._states.offloads_grad(name) and name in self._tied
        }
        self._states.grads.wait_all()
        return {**grads, **left}

    def _reduced(self, name: str, grad: Name) -> None:
        """A gradient is in the optimizer's layout; other groups' are added to a tied parameter's first."""
        if self._states.offloads_grad(name) and name not in self._tied:
            self.reductions.grads[name] = self._states.offload_grad(name, grad, self.strides_of.get(grad))

    def _accumulate(self, name: str, addend: Name) -> None:
        self._accumulators.mark(name)
        self._writer.add(StepKind.ACCUMULATE, args=(accumulator(name), addend))

    def _partial_bytes(self, index: int, m: int) -> int:
        """Bytes of the gradients that a segment's backward leaves as they were made."""
        params = self._rank.program.segments[index].params
        paths = self._rank.parts(m).backwards[index].partial
        found = zip(map(self._made_spec, params), paths, strict=True)
        return sum(local_bytes(spec, path[0].before, self._rank.extended) for spec, path in found if path)

    def _made_spec(self, name: str) -> TensorSpec:
        """The spec of a gradient that leaves its block as a sum over ranks."""
        spec = self._rank.program.params[name].spec
        return TensorSpec(self._rank.lowered.reduce_dtype or spec.dtype, spec.shape)
