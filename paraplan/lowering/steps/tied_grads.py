"""What ranks of different stages exchange at the end of a step: gradients of parameters they share, and the loss.

A parameter that several groups of ranks hold (tied weights, the stages of bidirectional pipelines, a weight that one
stage trains and another reads) gets the sum of their gradients in all of them: each that makes one sends it, once
reduced to the layout of its optimizer, to the others, and all add them up in the order of the groups, so that the
copies stay equal to the bit. Gradients go in bundles of the plan's
size, of which two are under way, in the order of the parameters in the model: the first that has not arrived anywhere
is waited for by nobody who has not sent it, so groups that share different parameters do not wait in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import StepKind
from paraplan.ir.machine.mesh import Layout, R, parse_layout
from paraplan.lowering.blocks.bundle import local_bytes
from paraplan.lowering.blocks.forward import Given
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.steps.loss_steps import LossSteps
from paraplan.lowering.steps.stage_messages import StageMessages
from paraplan.lowering.steps.step_writer import StepWriter
from paraplan.lowering.transfers.mesh_transfers import Message

Coming = tuple[Message, Name]
"""A message and the outer name of what it brings."""


class EndSteps:
    """Writes the exchange.

    Args:
        rank, writer: whose steps are written.
        messages: to and from other groups.
        losses: of this one.
        strides_of: accumulator -> its strides.
    """

    def __init__(
        self,
        rank: RankGroup,
        writer: StepWriter,
        messages: StageMessages,
        losses: LossSteps,
        strides_of: Mapping[Name, tuple[int, ...]],
    ) -> None:
        self._rank, self._writer, self._messages, self._losses = rank, writer, messages, losses
        self._strides_of = strides_of

    def exchange(self, reduced: Mapping[str, Name], coming: Sequence[Coming] = ()) -> dict[str, Name]:
        """Write the exchange of `reduced` gradients, with the end of what else is `coming`; then the loss is whole.

        Returns:
            Parameter -> outer name of its whole gradient.
        """
        grads = {name: reduced[name] for name in self._rank.holding.graded}
        ties = {name: self._makers(name) for name in self._rank.trained if len(self._holders(name)) > 1}
        before: list[str] = []
        for bundle in self._bundles(list(ties)):
            for name in bundle:
                self._send(name, grads.get(name))
            for name in bundle:
                for message, outer in self._coming(name, ties[name]):
                    self._messages.receive(message, outer)
            for name in before:
                self._arrive(name, ties[name])
                self._add(name, grads.get(name), ties[name])
            before = bundle
        self.exchange_loss([*(each for name in before for each in self._coming(name, ties[name])), *coming])
        for name in before:
            self._add(name, grads.get(name), ties[name])
        return grads | {name: outer_names.tied(name) for name in ties}

    def _bundles(self, names: Sequence[str]) -> list[list[str]]:
        """Names in order, in bundles of the plan's size or of one."""
        found: list[list[str]] = []
        room = 0
        for name in names:
            nbytes = local_bytes(self._rank.grad_spec(name), self._state(name, self._rank.group), self._rank.extended)
            if not found or nbytes > room:
                found.append([])
                room = self._rank.plan.bundle_bytes
            found[-1].append(name)
            room -= nbytes
        return found

    def _send(self, name: str, grad: Name | None) -> None:
        if grad is None:
            return
        strides = self._strides_of.get(grad) if grad == outer_names.accumulator(name) else None
        given = Given(self._state(name, self._rank.group), strides)
        for target in self._holders(name):
            if target != self._rank.group:
                self._messages.send_now(self._tie(name, self._rank.group, target), grad, given)

    def _coming(self, name: str, groups: Sequence[int]) -> list[Coming]:
        return [
            (self._tie(name, source, self._rank.group), outer_names.grad(name).of_group(source))
            for source in groups
            if source != self._rank.group
        ]

    def _arrive(self, name: str, groups: Sequence[int]) -> None:
        for target in self._holders(name):
            if target != self._rank.group:
                self._messages.sent(self._tie(name, self._rank.group, target))
        for message, outer in self._coming(name, groups):
            self._messages.arrived(message, outer)

    def _add(self, name: str, grad: Name | None, groups: Sequence[int]) -> None:
        for group in groups:
            addend = outer_names.grad(name).of_group(group) if grad is None or group != self._rank.group else grad
            self._writer.add(StepKind.ACCUMULATE, args=(outer_names.tied(name), addend))

    def exchange_loss(self, coming: Sequence[Coming] = ()) -> None:
        """Write the exchange of the loss and the end of all messages, with those still `coming` and their names."""
        self._send_loss()
        every = [
            *coming,
            *(
                (self._loss(name, source, self._rank.group), self._losses.share_of(name, source))
                for name in (outer_names.LOSS, *self._losses.metrics.values())
                for source in self._losses.sharers(name)
                if source != self._rank.group
            ),
        ]
        for message, name in every:
            self._messages.receive(message, name)
        self._messages.drain()
        for message, name in every:
            self._messages.arrived(message, name)
        self._losses.add_loss()

    def _holders(self, name: str) -> list[int]:
        return [group for group, holding in enumerate(self._rank.lowered.held) if name in holding.trained]

    def _makers(self, name: str) -> list[int]:
        return [group for group, holding in enumerate(self._rank.lowered.held) if name in holding.graded]

    def _state(self, name: str, group: int) -> Layout:
        return (R, *parse_layout(self._rank.lowered.held[group].params[name].state))

    def _tie(self, name: str, source: int, target: int) -> Message:
        spec, layout = self._rank.grad_spec(name), self._state(name, source)
        return self._rank.lowered.message(
            f"grad:{name}:{source}>{target}", spec, layout, source, target, self._state(name, target)
        )

    def _loss(self, name: Name, source: int, target: int) -> Message:
        whole, there = ((R,) * (1 + len(self._rank.lowered.held[group].mesh.shape)) for group in (source, target))
        spec = self._losses.loss_spec()
        return self._rank.lowered.message(f"{name}:{source}>{target}", spec, whole, source, target, there)

    def _send_loss(self) -> None:
        whole = Given((R,) * len(self._rank.extended))
        for name in self._losses.losses(self._rank.group):
            for target in range(len(self._rank.lowered.held)):
                if target != self._rank.group:
                    message = self._loss(name, self._rank.group, target)
                    self._messages.send_now(message, self._losses.share_of(name, self._rank.group), whole)
