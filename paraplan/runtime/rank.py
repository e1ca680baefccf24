"""One rank of a plan: its tensors, its optimizer parameters, and the two halves of its step.

A step runs everything up to UPDATE (gradients then lie in the state layout), the user's optimizer updates the
state tensors, and the rest (copies back into the stored parameters, drops) follows it. Lowering gives the lists of
steps (`lowering.phases`); here is decided which of them is due.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.rank_program import RankProgram, Step
from paraplan.ir.machine.mesh import Layout, parse_layout
from paraplan.ir.machine.rank_groups import Holding, holding_of, holdings
from paraplan.ir.plan import Plan
from paraplan.ir.sizes import say_size
from paraplan.lowering.phases import step_lists
from paraplan.lowering.steps.delayed_update import UpdatePhase
from paraplan.runtime.batch import ShardedBatch, microbatches
from paraplan.runtime.executing.executor import Executor, Late
from paraplan.runtime.optimizers.optim import GroupMaker, param_groups
from paraplan.runtime.optimizers.waiting_grads import WaitingGrads
from paraplan.runtime.state.params import Nothing, Values, cut, inside, local_tensors, own_part, travels
from paraplan.runtime.transport.tier_copies import tensor_of


class Updates(Late, Protocol):
    """What does late updates (`late.LateUpdates`)."""

    @property
    def is_due(self) -> bool:
        """Whether gradients are held whose update has not begun."""

    @property
    def is_begun(self) -> bool:
        """Whether an update was begun and not waited for."""

    def forget(self) -> None:
        """Let go of what is due."""


@dataclass
class SharedProgress:
    """What all plans that share parameters have in common.

    Attributes:
        seed: base of the random seeds.
        steps_done: steps taken.
        is_trained: whether an optimizer was made for the parameters.
        written: how often each parameter was written when stored copies were last as they are.
        brought: how often each parameter and state was written, of those brought to their update, then.
        notes_grads: whether writes to gradients are noticed.
        is_told: whether someone was told that gradients of several steps take more memory than was planned.
        noted: gradients and how often each was written, as the plan made them.
    """

    seed: int
    steps_done: int = 0
    is_trained: bool = False
    written: list[int] = field(default_factory=list)
    brought: list[int] = field(default_factory=list)
    notes_grads: bool = False
    is_told: bool = False
    noted: dict[str, tuple[int, int]] = field(default_factory=dict)


class Rank:
    """A rank's tensors around an executor.

    Args:
        plan: the plan.
        executor: of the rank.
        values: where parameters and buffers come from; another rank object of this rank shares its own.
        seed: base of the random seeds.
        device: where tensors live.

    Attributes:
        stage: what the rank holds: its mesh, parameters and batch.
        params: the state tensors the optimizer updates, by parameter name; they share the outer values' storage, and
            have none of its padding.
        layouts: of the states (and of the gradients the optimizer reads).
        tiers: where each parameter is updated, and its gradient is, by name; "" is the device.
        staged: names of those whose states live elsewhere.
        late: names of those that the host updates one step late.
        updates: does so; None where there is no optimizer yet.
        phase: of the step, see `lowering.steps.delayed_update`.
        lists: of steps.
        waiting: the gradients that wait beside states.
        torn: whether an update failed on its way, so that stored copies are to be written from their states again.
        optimizers: over its parameters.
    """

    def __init__(self, plan: Plan, executor: Executor, values: Values | Rank, seed: int, device: str = "cpu") -> None:
        self.plan, self.executor, self.device = plan, executor, device
        self.stage: Holding = holding_of(holdings(plan), executor.rank)
        self.program: RankProgram = executor.program
        self.lists, self.phase = step_lists(self.program), UpdatePhase.STEADY
        self.updates: Updates | None = None
        self.torn = False
        self.optimizers: list[torch.optim.Optimizer] = []
        shared = values if isinstance(values, Rank) else None
        self.clock = SharedProgress(seed) if shared is None else shared.clock
        source: Values = Nothing() if isinstance(values, Rank) else values
        held = {} if shared is None else {name: x for name, x in shared.tensors.items() if name in self.program.outer}
        self.tensors: dict[Name, Tensor] = local_tensors(
            self.program, source, executor.coordinates, device, executor.copier.homes, held
        )
        executor.bind(self.tensors)
        states = {value.source: name for name, value in self.program.outer.items() if value.role is Role.STATE}
        self.layouts: dict[str, Layout] = {
            name: parse_layout(self.program.outer[outer].layout) for name, outer in states.items()
        }
        self.tiers: dict[str, str] = {name: self.stage.params[name].update_tier for name in states}
        self.staged = frozenset(name for name in states if self.stage.params[name].staged)
        late = {arg for step in self.lists.flush if step.late for arg in step.args}
        self.late = frozenset(name for name, outer in states.items() if outer in late)
        params = {name: nn.Parameter(self._optimized(name, self.tensors[outer])) for name, outer in states.items()}
        self.params: dict[str, nn.Parameter] = params if shared is None else shared.params
        homes = {
            name: self.without_padding(name, self.tensors[home], layout)
            for name, layout in self.layouts.items()
            if (home := outer_names.waiting(name)) in self.tensors
        }
        self.waiting = WaitingGrads(self.params, homes) if shared is None else shared.waiting
        self._own_shapes = {name: tuple(param.shape) for name, param in self.params.items()}
        self._late_names = {name for name, each in self.program.outer.items() if each.role is Role.LATE}
        if shared is None:
            self.settled()

    def _optimized(self, name: str, state: Tensor) -> Tensor:
        """What an optimizer's parameter is made of: the state, or where its gradient is on another device than it
        lives, something of its shape there that holds no value."""
        own = self.without_padding(name, state, self.layouts[name])
        waits = self.stage.params[name].grad_tier
        if self.tiers[name] or waits or own.device.type == torch.device(self.device).type:
            return own
        return torch.full((), float("nan"), dtype=own.dtype, device=self.device).expand(own.shape)

    def param_groups(self, groups: Sequence[Mapping[str, Any]] | None, params: GroupMaker | None) -> list[Any]:
        """What the class of an optimizer is given for this rank; see `optim.param_groups`."""
        held = holdings(self.plan)
        everywhere = [(name, each.params[name].update_tier) for each in held for name in each.trained]
        return param_groups(self.params, groups, params, self.tiers, everywhere)

    def train_with(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made over parameters."""
        self.optimizers.append(optimizer)
        self.clock.is_trained = True

    def update_late_with(self, updates: Updates) -> None:
        """Who does late updates."""
        self.updates = updates
        self.executor.update_with(late=updates)

    @property
    def seed(self) -> int:
        """Base of the random seeds."""
        return self.clock.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self.clock.seed = seed

    @property
    def steps_done(self) -> int:
        """Steps taken, by all plans that share parameters."""
        return self.clock.steps_done

    @steps_done.setter
    def steps_done(self, count: int) -> None:
        self.clock.steps_done = count

    @property
    def before(self) -> tuple[Step, ...]:
        """The steps before the optimizer."""
        return self.lists.phases[self.phase].before

    @property
    def is_stale(self) -> bool:
        """Whether stored copies are to be written again: an update failed, or parameters were written after it."""
        return self.torn or self.clock.written != self._versions()

    def settled(self) -> None:
        """Stored copies are as their states are."""
        self.torn, self.clock.written, self.clock.brought = False, self._versions(), self._staged_versions()

    def _staged_versions(self) -> list[int]:
        """How often what is brought to updates was written."""
        slots = [self.tensors[x] for x in map(outer_names.slots, self.staged) if x in self.tensors]
        return [x._version for x in (*(self.params[name] for name in self.staged), *slots)]

    def _versions(self) -> list[int]:
        """How often each parameter was written."""
        return [param._version for param in self.params.values()]

    @property
    def delays(self) -> bool:
        """Whether what this step's optimizer would update late is to wait."""
        return bool(self.lists.flush) and self.phase is not UpdatePhase.WARM

    @property
    def has_begun(self) -> bool:
        """Whether a late update was begun and not waited for."""
        return self.updates is not None and self.updates.is_begun

    @property
    def is_due(self) -> bool:
        """Whether one is due, or under way."""
        return self.updates is not None and (self.updates.is_due or self.updates.is_begun)

    def start(self, batch: ShardedBatch, homes: Mapping[Name, Tensor] | None = None) -> None:
        """Bind a batch, copied to its homes where it has any, and fresh seeds.

        What the last step left behind is dropped, but for gradients that are due.
        """
        outer, due = self.executor.outer, self.updates is not None and self.updates.is_due
        held = self._late_names if due else ()
        for name in [name for name in outer if name not in self.tensors and name not in held]:
            del outer[name]
        self.executor.copier.forget()  # states that set out for an update that was skipped
        self.waiting.start(outer)
        warm = self.plan.delayed_update is not None and self.steps_done < self.plan.delayed_update
        self.phase = (
            UpdatePhase.STEADY if due or not self.lists.flush else UpdatePhase.WARM if warm else UpdatePhase.FIRST
        )
        self.executor.bind(microbatches(self.plan, self.stage, batch, self.program.outer, self.device, homes))
        self.executor.seed(self.seed, self.steps_done)
        self.steps_done += 1

    def begin_account(self, executor: Executor) -> None:
        """Book everything alive in an executor with this rank's tensors, forget old entries, measure the peak from
        here."""
        ledger, tier_of = executor.account.ledger, {param: self.tiers[name] for name, param in self.params.items()}
        apart = {self.params[name] for name in self.staged}  # but for scalars, what they have is in the namespace
        for value in executor.outer.values():
            ledger.register_all(value)
        for optimizer in self.optimizers:
            for param, slots in optimizer.state.items():
                for key, slot in slots.items():
                    if isinstance(slot, Tensor) and not (param in apart and travels(key, slot, param)):
                        ledger.adopt(slot, tier_of.get(param, ""))
        ledger.reset_peak()
        executor.account.entries.clear()

    def homes(self) -> list[tuple[str, Tensor]]:
        """Parameters and gradients on tiers, with their tiers."""
        tiers = {name: tier for name, tier in self.tiers.items() if tier and name not in self.staged}
        there = [(tier, self.params[name]) for name, tier in tiers.items()]
        return [*there, *((tier, param.grad) for tier, param in there if param.grad is not None)]

    def take_grads(self) -> None:
        """Hand the gradients to the optimizer's parameters; added where one is there already."""
        if any(self.tiers.values()) or self.waiting.names:
            self.executor.copier.settle()
        added = 0
        for name, grad in self.grads().items():
            param = self.params[name]
            if param.grad is None:
                param.grad = grad
            else:
                param.grad.add_(grad)
                added += grad.nbytes
        self.note_grads()
        if added and not self.plan.optimizer.accumulates and not self.clock.is_told:
            self.clock.is_told = True
            warnings.warn(
                f"gradients of several steps are added up, and the plan counts one step's: on rank "
                f"{self.executor.rank} memory peaks up to {say_size(added)} above the predicted peak. Plan with "
                "accumulate=True (--accumulate), or leave that much memory free",
                stacklevel=4,
            )

    def notice_writes(self, wanted: bool) -> None:
        """Whether writes to gradients are noticed from now on."""
        self.clock.notes_grads = wanted

    def note_grads(self) -> None:
        """Gradients are as the plan made them, clipped them or unscaled them."""
        if self.clock.notes_grads:
            self.clock.noted = self._grad_versions()

    def are_grads_written(self) -> bool:
        """Whether someone else has written to gradients since; asked once of each."""
        noted, self.clock.noted = self.clock.noted, {}
        return bool(noted) and noted != self._grad_versions()

    def _grad_versions(self) -> dict[str, tuple[int, int]]:
        grads = {name: param.grad for name, param in self.params.items() if param.grad is not None}
        return {name: (id(grad), grad._version) for name, grad in grads.items()}

    def drop_grads(self, but: Collection[str] = ()) -> None:
        """Let the parameters' gradients go, some names' excepted."""
        for name, param in self.params.items():
            if name not in but:
                param.grad = None

    def loss(self) -> Tensor:
        """The step's loss, detached from the program's own storage."""
        return self.executor.outer[self.program.loss].clone()

    def tail(self) -> tuple[Step, ...]:
        """The steps after the optimizer: those that are possible with what is there. Until `settled`, stored copies are
        to be written again."""
        self.torn = True
        steps, outer = self.lists.phases[self.phase], self.executor.outer
        ahead = [name for step in self.lists.ahead for name in step.outs]
        has_grads, is_there = (all(name in outer for name in names) for names in (steps.grads, ahead))
        if has_grads and is_there and self.clock.brought == self._staged_versions():
            return steps.after
        for name in ahead:
            if name in outer:
                self.executor.copier.wait(outer.pop(name))
        return steps.brought if has_grads else steps.again

    def load(self, full: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers from full tensors, "param:<name>" and "buffer:<name>"."""
        with torch.no_grad():
            self.executor.copier.settle()
            for name, value in self.program.outer.items():
                if value.role not in (Role.PARAMETER, Role.STATE, Role.BUFFER):
                    continue
                stored = name if value.role is Role.BUFFER else outer_names.param(value.source)
                source = full.get(str(stored))
                if source is not None:
                    part = cut(source, parse_layout(value.layout), self.program.mesh_shape, self.executor.coordinates)
                    inside(self.tensors[name], part.shape).copy_(part)

    def buffers(self) -> dict[str, Tensor]:
        """Buffers by name, whole; what the model writes (running statistics) is as the last step left it."""
        named = {value.source: name for name, value in self.program.outer.items() if value.role is Role.BUFFER}
        return {name: self.tensors[outer].clone() for name, outer in named.items()}

    def held(self, name: str) -> tuple[Tensor, Layout]:
        """The authoritative local copy of a parameter (the state where it trains) or buffer, padding included, and its
        layout."""
        self.executor.copier.settle()
        written = name in self.plan.program.buffer_updates
        trained = outer_names.state if name in self.params else outer_names.param
        outer = outer_names.buffer(name) if written else trained(name)
        return self.tensors[outer], parse_layout(self.program.outer[outer].layout)

    def held_part(self, name: str) -> tuple[Tensor, Layout]:
        """As `held`, without padding."""
        local, layout = self.held(name)
        return self.without_padding(name, local, layout), layout

    def without_padding(self, name: str, local: Tensor, layout: Layout) -> Tensor:
        """A shard of a parameter or buffer, or of its gradient, without padding: a view.

        Args:
            name: of the parameter or buffer.
            local: the shard.
            layout: it lies in.
        """
        program = self.plan.program
        shape = program.buffers[name].shape if name in program.buffer_updates else program.params[name].spec.shape
        return own_part(local, shape, layout, self.program.mesh_shape, self.executor.coordinates)

    def grads(self) -> dict[str, Tensor]:
        """The step's gradients by parameter name, without padding, as the optimizer reads them."""
        waiting = self.waiting
        return {
            name: waiting.grad(name) if name in waiting.names else inside(self.grad(name), self._own_shapes[name])
            for name in self.program.grads
        }

    def grad(self, name: str) -> Tensor:
        """A gradient of the step, padding included."""
        if name in self.waiting.names:
            return self.tensors[outer_names.waiting(name)]
        return tensor_of(self.executor.outer[self.program.grads[name]])


def message_pairs(plan: Plan, programs: Sequence[RankProgram]) -> list[tuple[int, int]]:
    """The (source, target) pairs of ranks between which messages go."""
    found: dict[tuple[int, int], None] = {}
    for holding in holdings(plan):
        for place, rank in enumerate(holding.mesh.devices):
            for transfer in programs[plan.schedule.rank_class[rank]].transfers.values():
                if transfer.sends and transfer.peers[place] >= 0:
                    found[rank, transfer.peers[place]] = None
    return list(found)
