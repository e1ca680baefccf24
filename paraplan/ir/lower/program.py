"""Program + Plan -> RankProgram: the steps around the blocks (see `ir.names` for the names they use)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from paraplan.ir import names as outer_names
from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.lower.buffers import check_apart, send_buffers, write_buffers
from paraplan.ir.lower.groups import Groups
from paraplan.ir.lower.losses import LossSteps
from paraplan.ir.lower.messages import Messages, NameOf
from paraplan.ir.lower.outer import outer_values, with_drops
from paraplan.ir.lower.stage import PlanBlocks
from paraplan.ir.lower.staged import StagedUpdates
from paraplan.ir.lower.ties import exchange_ends
from paraplan.ir.lower.whole import Turn
from paraplan.ir.names import LOSS, Name, Role
from paraplan.ir.rank_program import OuterValue, OutputPlace, RankProgram, StepKind
from paraplan.ir.schedule import Action, ActionKind, parse_action
from paraplan.ir.tensor import TensorSpec
from paraplan.ir.tiers import TIERS

_BACKWARD = (ActionKind.B, ActionKind.I, ActionKind.W)


class RankSteps(LossSteps):
    """Writes the steps of one rank class, action by action.

    Args:
        blocks: of the plan.
        group: the group of ranks the class belongs to.
        actions: of the class.
    """

    def __init__(self, blocks: PlanBlocks, group: int, actions: Sequence[str]) -> None:
        super().__init__(blocks, group)
        self.texts = tuple(actions)
        self.actions: tuple[Action, ...] = tuple(parse_action(text) for text in actions)
        self.groups = Groups(self.actions, self.plan.group)
        stage = blocks.tail_stage
        if stage in self.holding.stages:
            self.turn = Turn(self.plan.schedule.name, stage, blocks.micro.mixes, self.actions)
        self.messages = Messages(blocks, group, self.add)
        update = lambda args, staged, drops: self.add(StepKind.UPDATE, args=args, staged=staged, drops=drops)  # noqa: E731
        most = self.plan.bundle_bytes
        self.staged = StagedUpdates(self.states, self.program.params, self.plan.optimizer, self.fused, most, update)
        self.late = tuple(name for name in self.trained if self.plan.is_late(self.holding.params[name]))

    @property
    def first_action(self) -> str:
        """What comes before all actions counts as part of the first forward."""
        return next(str(action) for action in self.actions if action.kind is ActionKind.F)

    def build(self) -> RankProgram:
        """The program of a training step."""
        self.action = self.first_action
        if self.late:
            self.add(StepKind.UPDATE, args=tuple(map(outer_names.state, self.late)), late=True)
        self.waits = self.tangents(self.denominators())
        self.wake(self.actions)
        finals = self.finals(self.actions)
        last = {action.kind: index for index, action in enumerate(self.actions)}
        end_loss: Callable[[], None] = lambda: None  # noqa: E731
        known = (0, self.action)
        joined = self.joining()
        last_backward = max(index for index, action in enumerate(self.actions) if action.kind in _BACKWARD)
        for index, (text, action) in enumerate(zip(self.texts, self.actions, strict=True)):
            self.action = text
            if action.kind is ActionKind.F:
                self._forward(action)
                if self.program.apart > 1:
                    write_buffers(self, (action.stage, action.microbatch))
                if index == last[ActionKind.F]:
                    end_loss = self.begin_loss(joined, self.waits)
                    if self.plan.cluster.num_devices == 1:  # nothing to wait for: it is known before its gradients
                        self.end_waits()
                        end_loss()
                        known = (len(self.steps), text)
            elif action.kind in _BACKWARD:
                self.end_waits()
                ahead = self._set_out if self.plan.states_ahead and index == last_backward else None
                self._backward(action, finals.get(index, {}), ahead)
                if index != last.get(ActionKind.B) and index != last.get(ActionKind.W):
                    self.partials.end() if self.groups.every == 1 else self.partials.rest()
            elif action.kind is ActionKind.REDUCE_GRAD:
                if index == last[ActionKind.REDUCE_GRAD]:
                    self.partials.end()
                    for parcel in joined:
                        self.reductions.send(parcel)
                    self.reductions.end()
                    if self.plan.cluster.num_devices > 1:
                        end_loss()
                    grads = self._leave(exchange_ends(self, send_buffers(self)))
                    self._write_buffers(*known)
            elif action.kind is ActionKind.UPDATE:
                if index == last[ActionKind.UPDATE]:
                    self._update(grads)
            else:
                self._transfer(action)
        kept = {LOSS, *self.metrics.values(), *grads.values(), *self._measured}
        ended = [grad for name, grad in grads.items() if name not in self.late and grad.role is not Role.WAITING]
        self.add(StepKind.DROP, drops=(*ended, *self._measured))
        return self.ended(kept, grads, {})

    def _write_buffers(self, at: int, action: str) -> None:
        """Buffers get their new values once the step is through; on one device with the loss, as a model itself writes
        them, unless the backward reads what they held before."""
        if self.program.apart > 1:
            return check_apart(self)
        first = len(self.steps)
        write_buffers(self)
        writes = self.steps[first:]
        written = {name for step in writes for name in step.args if name.role is Role.BUFFER}
        if self.plan.cluster.num_devices == 1 and written.isdisjoint(n for s in self.steps[at:first] for n in s.args):
            moved = [msgspec.structs.replace(step, action=action) for step in writes]
            self.steps[at:] = [*moved, *self.steps[at:first]]

    def _forward(self, action: Action) -> None:
        """A stage's forward, what it reads received before and what it makes sent after, where no action says when."""
        stage, m = action.stage, action.microbatch
        self.messages.arrive(self.lowered.route(m).values, stage, m, lambda value, _: outer_names.value(value, m))
        self.forward(stage, m)
        if not self._is_scheduled(ActionKind.SEND_F, action):
            self._send_values(stage, m)

    def _backward(self, action: Action, final: dict[int, list[str]], ahead: Callable[[], None] | None = None) -> None:
        stage, m = action.stage, action.microbatch
        if action.kind is not ActionKind.W:
            came = self.messages.arrive(self.lowered.route(m).grads, stage, m, _grad_from(m))
            for value, name in came:
                self.add(StepKind.ACCUMULATE, args=(outer_names.grad_of(value, m), name), microbatch=m)
        self.backward(stage, m, action.kind, final, ahead)
        if action.kind is not ActionKind.W and not self._is_scheduled(ActionKind.SEND_B, action):
            self._send_grads(stage, m)

    def _is_scheduled(self, kind: ActionKind, action: Action) -> bool:
        return Action(stage=action.stage, kind=kind, microbatch=action.microbatch) in self.actions

    def _transfer(self, action: Action) -> None:
        """An action that only sends or receives."""
        stage, m = action.stage, action.microbatch
        if action.kind is ActionKind.SEND_F:
            self._send_values(stage, m)
        elif action.kind is ActionKind.SEND_B:
            self._send_grads(stage, m)
        elif action.kind is ActionKind.RECV_F:
            self.messages.post(self.lowered.route(m).values, stage, m, lambda value, _: outer_names.value(value, m))
        elif action.kind is ActionKind.RECV_B:
            self.messages.post(self.lowered.route(m).grads, stage, m, _grad_from(m))
        else:
            raise InvalidPlanError(f"action {action}: {action.kind.value} is not executed by this version")

    def _send_values(self, stage: int, m: int) -> None:
        for each in self.messages.sent_by(self.lowered.route(m).values, stage):
            self.messages.send(each, outer_names.value(each.value, m), self.parts(m).given[each.value], m)

    def _send_grads(self, stage: int, m: int) -> None:
        for each in self.messages.sent_by(self.lowered.route(m).grads, stage):
            self.messages.send(each, outer_names.grad_of(each.value, m), self.parts(m).grads[each.value], m)

    def ended(self, kept: set[Name], grads: dict[str, Name], outputs: dict[str, OutputPlace]) -> RankProgram:
        """The program of the steps written so far; `kept` are values nothing gives up."""
        outer = outer_values(self.lowered, self.group, [name for name in self.late if name in grads])
        by_tier = self._update_bytes(outer)
        states, workspace = by_tier.pop("")
        return RankProgram(
            mesh_axes=self.holding.mesh.axes,
            mesh_shape=self.holding.mesh.shape,
            num_microbatches=self.m,
            blocks=self.blocks,
            outer=outer,
            steps=with_drops(tuple(self.steps), outer, kept),
            loss=LOSS,
            metrics=self.metrics,
            outputs=outputs,
            grads=grads,
            optimizer_bytes=states,
            update_workspace_bytes=workspace,
            update_tiers=by_tier,
            transfers=self.messages.transfers,
        )

    def _update_bytes(self, outer: dict[Name, OuterValue]) -> dict[str, tuple[int, int]]:
        """Per place of an update, bytes of the states that stay there, and of the update's workspace."""
        optimizer, layouts = self.plan.optimizer, self.holding.params
        sizes: dict[str, list[int]] = {"": []}
        scalars: Counter[str] = Counter()
        for name in self.trained:
            value, tier = outer[outer_names.state(name)], layouts[name].update_tier
            here = sizes.setdefault(tier, [])
            scalars[tier] += optimizer.scalar_bytes
            if not layouts[name].staged:
                here.append(math.prod(value.shape) * _itemsize(value.dtype))
        return {
            tier: (
                sum(here) * optimizer.state_slots + scalars[tier],
                0 if tier in self.fused else optimizer.workspace_bytes(here),
            )
            for tier, here in sizes.items()
        }

    def _update(self, grads: dict[str, Name]) -> None:
        names = tuple(name for name in self.trained if name not in self.late)
        plain = tuple(name for name in names if not self.holding.params[name].staged)
        tiers = [tier for tier in ("", *TIERS) if self.states.on(tier, names)]
        for tier in tiers or ([] if self.late else [""]):
            on_tier = self.states.on(tier, names)
            self.add(StepKind.UPDATE, args=tuple(map(outer_names.state, on_tier)))
        if self.late:
            self._end_late(grads)
        self.states.restore(plain, self.program.params)
        self.staged.write(names)

    @property
    def _measured(self) -> tuple[Name, ...]:
        """What is known of gradients that wait beside states."""
        return tuple(
            name for step in self.steps for name in step.outs if name is not None and name.role is Role.MAGNITUDE
        )

    def _set_out(self) -> None:
        """The first states that come to their update are begun."""
        self.staged.set_out(self.trained)

    def _end_late(self, grads: dict[str, Name]) -> None:
        """What the host has updated meanwhile comes back, and this step's gradients are held for the next."""
        self.add(StepKind.UPDATED, drops=tuple(map(outer_names.late, self.late)))
        self.states.restore(self.late, self.program.params)
        for name in self.late:
            self.add(StepKind.ACCUMULATE, args=(outer_names.late(name), grads[name]))

    def _leave(self, grads: dict[str, Name]) -> dict[str, Name]:
        """Gradients where their parameters are updated: those that were exchanged set out only now."""
        left = {
            name: self.states.leave(name, grad, self.strides_of.get(self.reductions.grads.get(name, grad)))
            for name, grad in grads.items()
            if self.states.leaves(name) and name in self.tied
        }
        self.states.grads.end()
        return grads | left


def _grad_from(m: int) -> NameOf:
    """The names of gradients that other groups of ranks send for a microbatch."""
    return lambda value, group: outer_names.grad_of(value, m).of_group(group)


def _itemsize(dtype: str) -> int:
    return TensorSpec(dtype, ()).nbytes
