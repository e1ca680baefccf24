"""Program + Plan -> RankProgram: the steps around the blocks (see `ir.execution.names` for the names they use)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.names import LOSS
from paraplan.ir.execution.rank_program import OuterValue, OutputPlace, RankProgram, StepKind
from paraplan.ir.execution.schedule import Action, ActionKind, parse_action
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.stage_blocks import PlanBlocks
from paraplan.lowering.steps.buffer_steps import BufferSteps
from paraplan.lowering.steps.gradients import Gradients
from paraplan.lowering.steps.loss_steps import LossSteps
from paraplan.lowering.steps.outer import outer_values, with_drops
from paraplan.lowering.steps.segment_steps import SegmentSteps
from paraplan.lowering.steps.stage_messages import NameOf, StageMessages
from paraplan.lowering.steps.stage_steps import StageSteps
from paraplan.lowering.steps.step_writer import StepWriter
from paraplan.lowering.steps.tied_grads import EndSteps
from paraplan.lowering.transfers.bundled_transfers import BundledValue
from paraplan.lowering.transfers.offloaded_states import OffloadedStates
from paraplan.lowering.transfers.streamed_update import StagedUpdates

_BACKWARD = (ActionKind.B, ActionKind.I, ActionKind.W)


class RankSteps:
    """Writes the steps of one rank class, action by action.

    Args:
        blocks: of the plan.
        group: the group of ranks the class belongs to.
        actions: of the class.
    """

    def __init__(self, blocks: PlanBlocks, group: int, actions: Sequence[str]) -> None:
        plan, rank = blocks.plan, RankGroup(blocks, group)
        self.rank, self.writer = rank, StepWriter(plan.num_microbatches)
        self.texts = tuple(actions)
        self.actions: tuple[Action, ...] = tuple(parse_action(text) for text in actions)
        self._scheduled = frozenset(self.actions)
        layouts, writer = rank.holding.params, self.writer
        masters = {name: rank.grad_spec(name) for name in rank.trained}
        self._fused = blocks.fused
        self._states = OffloadedStates(layouts, masters, rank.holding.mesh.shape, writer)
        self._gradients = Gradients(rank, writer, self._states, self._fused, self.actions)
        self.losses = LossSteps(rank, writer)
        self.segments = SegmentSteps(rank, writer, self._gradients, self.losses)
        self.stages = StageSteps(rank, writer, self.segments, self.actions)
        self._messages = StageMessages(blocks, group, writer)
        self._buffers = BufferSteps(rank, writer, self._messages, self.stages.gather)
        self.ends = EndSteps(rank, writer, self._messages, self.losses, self._gradients.strides_of)
        self._staged = StagedUpdates(self._states, plan.program.params, plan.optimizer, self._fused, plan.bundle_bytes)
        self._late = tuple(name for name in rank.trained if plan.is_late(layouts[name]))

    @property
    def first_action(self) -> str:
        """What comes before all actions counts as part of the first forward."""
        return next(str(action) for action in self.actions if action.kind is ActionKind.F)

    def build(self) -> RankProgram:
        """The program of a training step."""
        self.writer.action = self.first_action
        if self._late:
            self.writer.add(StepKind.UPDATE, args=tuple(map(outer_names.state, self._late)), late=True)
        self.losses.tangents(self.losses.denominators())
        self.segments.unshard(self.actions)
        finals = self.stages.finals()
        last = {action.kind: index for index, action in enumerate(self.actions)}
        known = (0, self.writer.action)
        joined = self.losses.joining(self._gradients.reductions)
        last_backward = max(index for index, action in enumerate(self.actions) if action.kind in _BACKWARD)
        for index, (text, action) in enumerate(zip(self.texts, self.actions, strict=True)):
            self.writer.action = text
            if action.kind is ActionKind.F:
                self.forward(action)
                if self.rank.program.apart > 1:
                    self._buffers.write((action.stage, action.microbatch))
                if index == last[ActionKind.F]:
                    end_loss = self.losses.begin_loss(joined)
                    if self.rank.plan.cluster.num_devices == 1:  # nothing to wait for: it is known before its gradients
                        self.losses.end_waits()
                        end_loss()
                        known = (len(self.writer.steps), text)
            elif action.kind in _BACKWARD:
                self.losses.end_waits()
                ahead = self.rank.plan.states_ahead and index == last_backward
                states = partial(self._staged.prefetch, self.rank.trained) if ahead else None
                self._backward(action, finals.get(index, {}), states)
                if index != last.get(ActionKind.B) and index != last.get(ActionKind.W):
                    self._gradients.pause()
            elif action.kind is ActionKind.REDUCE_GRAD:
                if index == last[ActionKind.REDUCE_GRAD]:
                    grads = self._reduced(joined, end_loss)
                    self._write_buffers(*known)
            elif action.kind is ActionKind.UPDATE:
                if index == last[ActionKind.UPDATE]:
                    self._update(grads)
            else:
                self.transfer(action)
        kept = {LOSS, *self.losses.metrics.values(), *grads.values(), *self._measured}
        ended = [grad for name, grad in grads.items() if name not in self._late and grad.role is not Role.WAITING]
        self.writer.add(StepKind.DROP, drops=(*ended, *self._measured))
        return self.ended(kept, grads, {})

    def _reduced(self, joined: Sequence[BundledValue], end_loss: Callable[[], None]) -> dict[str, Name]:
        """Gradients after the last backward: summed over ranks, the loss along with them, and on their way."""
        self._gradients.send_kept()
        self._gradients.partials.wait_all()
        for value in joined:
            self._gradients.reductions.send(value)
        self._gradients.reductions.wait_all()
        if self.rank.plan.cluster.num_devices > 1:
            end_loss()
        coming = self._buffers.send()
        return self._gradients.offload(self.ends.exchange(self._gradients.reductions.grads, coming))

    def _write_buffers(self, at: int, action: str) -> None:
        """Buffers get their new values once the step is through; on one device with the loss, as a model itself writes
        them, unless the backward reads what they held before."""
        if self.rank.program.apart > 1:
            return self._buffers.check_apart()
        first = len(self.writer.steps)
        self._buffers.write()
        writes = self.writer.steps[first:]
        written = {name for step in writes for name in step.args if name.role is Role.BUFFER}
        between = self.writer.steps[at:first]
        if self.rank.plan.cluster.num_devices == 1 and written.isdisjoint(n for s in between for n in s.args):
            moved = [msgspec.structs.replace(step, action=action) for step in writes]
            self.writer.steps[at:] = [*moved, *between]

    def forward(self, action: Action) -> None:
        """A stage's forward, what it reads received before and what it makes sent after, where no action says when."""
        stage, m = action.stage, action.microbatch
        self._gradients.send_kept()
        self.segments.reach(self.rank.plan.stages[stage].first)
        self._messages.arrive(self.rank.lowered.route(m).values, stage, m, lambda value, _: outer_names.value(value, m))
        self.stages.forward(stage, m)
        if not self._is_scheduled(ActionKind.SEND_F, action):
            self._send_values(stage, m)

    def _backward(self, action: Action, final: dict[int, list[str]], ahead: Callable[[], None] | None = None) -> None:
        stage, m = action.stage, action.microbatch
        self._gradients.send_kept()
        if action.kind is not ActionKind.W:
            came = self._messages.arrive(self.rank.lowered.route(m).grads, stage, m, _grad_from(m))
            for value, name in came:
                self.writer.add(StepKind.ACCUMULATE, args=(outer_names.grad_of(value, m), name), microbatch=m)
        hands_on = action.kind is not ActionKind.W and self._hands_on(stage, m)
        self._gradients.sent_after = self.rank.plan.stages[stage].first if hands_on else -1
        self.stages.backward(stage, m, action.kind, final, ahead)
        if action.kind is not ActionKind.W and not self._is_scheduled(ActionKind.SEND_B, action):
            self._send_grads(stage, m)

    def _is_scheduled(self, kind: ActionKind, action: Action) -> bool:
        return Action(stage=action.stage, kind=kind, microbatch=action.microbatch) in self._scheduled

    def transfer(self, action: Action) -> None:
        """An action that only sends or receives."""
        stage, m = action.stage, action.microbatch
        route = self.rank.lowered.route(m)
        if action.kind is ActionKind.SEND_F:
            self._send_values(stage, m)
        elif action.kind is ActionKind.SEND_B:
            self._send_grads(stage, m)
        elif action.kind is ActionKind.RECV_F:
            self._messages.post(route.values, stage, m, lambda value, _: outer_names.value(value, m))
        elif action.kind is ActionKind.RECV_B:
            self._messages.post(route.grads, stage, m, _grad_from(m))
        else:
            raise InvalidPlanError(f"action {action}: {action.kind.value} is not executed by this version")

    def _send_values(self, stage: int, m: int) -> None:
        for each in self._messages.sent_by(self.rank.lowered.route(m).values, stage):
            self._messages.send(each, outer_names.value(each.value, m), self.rank.parts(m).given[each.value], m)

    def _send_grads(self, stage: int, m: int) -> None:
        for each in self._messages.sent_by(self.rank.lowered.route(m).grads, stage):
            self._messages.send(each, outer_names.grad_of(each.value, m), self.rank.parts(m).grads[each.value], m)
        self._gradients.send_kept()

    def _hands_on(self, stage: int, m: int) -> bool:
        """Whether another group of ranks waits for a stage's gradients of a microbatch."""
        return bool(self._messages.sent_by(self.rank.lowered.route(m).grads, stage))

    def ended(self, kept: set[Name], grads: dict[str, Name], outputs: dict[str, OutputPlace]) -> RankProgram:
        """The program of the steps written so far.

        Args:
            kept: values nothing gives up.
            grads: parameter -> the gradient it is updated with.
            outputs: what an evaluation returns, and where it is.
        """
        outer = outer_values(self.rank.lowered, self.rank.group, [name for name in self._late if name in grads])
        by_tier = self._update_bytes(outer)
        states, workspace = by_tier.pop("")
        return RankProgram(
            mesh_axes=self.rank.holding.mesh.axes,
            mesh_shape=self.rank.holding.mesh.shape,
            num_microbatches=self.rank.m,
            blocks=self.writer.blocks,
            outer=outer,
            steps=with_drops(tuple(self.writer.steps), outer, kept),
            loss=LOSS,
            metrics=self.losses.metrics,
            outputs=outputs,
            grads=grads,
            optimizer_bytes=states,
            update_workspace_bytes=workspace,
            update_tiers=by_tier,
            transfers=self._messages.transfers,
        )

    def _update_bytes(self, outer: dict[Name, OuterValue]) -> dict[str, tuple[int, int]]:
        """Per place of an update, bytes of the states that stay there and of earlier steps' gradients, and of the
        update's workspace."""
        optimizer, layouts = self.rank.plan.optimizer, self.rank.holding.params
        sizes: dict[str, list[int]] = {"": []}
        others: Counter[str] = Counter()
        for name in self.rank.trained:
            value, tier = outer[outer_names.state(name)], layouts[name].update_tier
            here = sizes.setdefault(tier, [])
            nbytes = math.prod(value.shape) * _itemsize(value.dtype)
            others[tier] += optimizer.scalar_bytes
            if optimizer.accumulates and not layouts[name].grad_tier:  # where gradients wait, they are added there
                others[tier] += nbytes
            if not layouts[name].staged:
                here.append(nbytes)
        return {
            tier: (
                sum(here) * optimizer.state_slots + others[tier],
                0 if tier in self._fused else optimizer.workspace_bytes(here),
            )
            for tier, here in sizes.items()
        }

    def _update(self, grads: dict[str, Name]) -> None:
        names = tuple(name for name in self.rank.trained if name not in self._late)
        plain = tuple(name for name in names if not self.rank.holding.params[name].staged)
        tiers = [tier for tier in ("", *TIERS) if self._states.on(tier, names)]
        for tier in tiers or ([] if self._late else [""]):
            on_tier = self._states.on(tier, names)
            self.writer.add(StepKind.UPDATE, args=tuple(map(outer_names.state, on_tier)))
        if self._late:
            self._end_late(grads)
        self._states.restore(plain, self.rank.program.params)
        self._staged.write(names)

    @property
    def _measured(self) -> tuple[Name, ...]:
        """What is known of gradients that wait beside states."""
        return tuple(
            name for step in self.writer.steps for name in step.outs if name is not None and name.role is Role.MAGNITUDE
        )

    def _end_late(self, grads: dict[str, Name]) -> None:
        """What the host has updated meanwhile comes back, and this step's gradients are held for the next."""
        self.writer.add(StepKind.UPDATED, drops=tuple(map(outer_names.late, self._late)))
        self._states.restore(self._late, self.rank.program.params)
        for name in self._late:
            self.writer.add(StepKind.ACCUMULATE, args=(outer_names.late(name), grads[name]))


def _grad_from(m: int) -> NameOf:
    """The names of gradients that other groups of ranks send for a microbatch."""
    return lambda value, group: outer_names.grad_of(value, m).of_group(group)


def _itemsize(dtype: str) -> int:
    return TensorSpec(dtype, ()).nbytes
