"""Training a plan on torch.distributed: this process is one rank.

    trainer = Trainer(plan, programs, modules, model, transport)
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=3e-4)
    for batch in trainer.shard(loader):
        loss = trainer.step(batch); optimizer.step(); optimizer.zero_grad()

`step` runs forward, backward and gradient reduction and leaves gradients on the optimizer's parameters, which are
this rank's shards; a hook on the optimizer's `step` brings the updated values back to where the ops read them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.capture.python_state.reading import Reads
from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.execution.entry import Entry
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import RankProgram, Step
from paraplan.ir.machine.mesh import Layout
from paraplan.ir.machine.rank_groups import holding_of, holdings
from paraplan.ir.model.program import trained_params
from paraplan.ir.model.sources import source_lines
from paraplan.ir.plan import Plan
from paraplan.runtime.batch import ShardedBatch
from paraplan.runtime.evaluate import Build
from paraplan.runtime.executing.compiled import Compilation, CompiledPhases
from paraplan.runtime.executing.executor import Executor, Modules
from paraplan.runtime.executing.graphs import AFTER, BEFORE, Graphs, ReplayedSteps, refuse_host_decisions
from paraplan.runtime.executing.observers import Timer
from paraplan.runtime.executing.stepping import step_together
from paraplan.runtime.optimizers.optim import GroupMaker
from paraplan.runtime.optimizers.prefetch import Ahead
from paraplan.runtime.rank import Rank, message_pairs
from paraplan.runtime.state.attributes import Attributes
from paraplan.runtime.state.params import Dims, Nothing, join_over
from paraplan.runtime.state.training_state import TrainingStates
from paraplan.runtime.state.unread import UnreadState
from paraplan.runtime.state.weights import values_of
from paraplan.runtime.trainer_core import BESIDE
from paraplan.runtime.transport.current_device import on_this_device
from paraplan.runtime.transport.distributed import DistributedTransport
from paraplan.runtime.transport.tier_copies import Copier


@dataclass(frozen=True)
class TrainerOptions:
    """How a rank executes its plan.

    Attributes:
        seed: base of the random seeds; the same on every rank.
        record: note every instruction and the memory it takes (slow); entries and `peak_bytes` then say what was.
        compilation: which blocks go through torch.compile.
        build: emits the modules of another program of this plan; `eval_step` needs it.
        weights: safetensors files to read this rank's parts of the parameters from; without them a model on meta is
            initialised from the seed (see `weights`).
        copier: makes copies to and from the host and the disk; left out, one that makes them beside the program.
    """

    seed: int = 0
    record: bool = False
    compilation: Compilation = field(default_factory=Compilation)
    build: Build | None = None
    weights: str | Path | None = None
    copier: Copier | None = None


class Trainer(TrainingStates):
    """One rank of a plan.

    Args:
        plan: the plan.
        programs: `lowering.lower(plan)`, per rank class.
        modules: of this rank's class, `codegen.build_modules(program, transport.groups, transport.device)`.
        model: with values, on any device, or on meta; only this rank's shards are kept.
        transport: of the plan's meshes, in the order of `ir.machine.rank_groups.holdings`.
        options: how they are executed.
        share: another plan's trainer of this rank, whose parameters, states and buffers become this one's too.
        reads: what forward read while it was captured, where that was in this process.

    Attributes:
        rank: this process' rank.
        replayed: its steps as graphs; None where they run kernel by kernel.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Sequence[RankProgram],
        modules: Modules,
        model: nn.Module,
        transport: DistributedTransport,
        options: TrainerOptions | None = None,
        *,
        share: Trainer | None = None,
        reads: Reads | None = None,
    ) -> None:
        how = options or TrainerOptions()
        self.rank, device = transport.rank, transport.device
        self._timer: Timer | None = None
        self.replayed: ReplayedSteps | None = None
        self.stage = holding_of(holdings(plan), self.rank)
        copier = how.copier if share is None else share.state.executor.copier
        executor = Executor(
            programs[plan.schedule.rank_class[self.rank]],
            modules,
            self.stage.mesh.coordinates(self.rank),
            transport,
            self.rank,
            source_lines(plan.program),
            copier=copier or Copier(device, beside=True, rank=self.rank),
        )
        values = values_of(plan.program, model, how.weights, how.seed) if share is None else Nothing()
        ranks = [Rank(plan, executor, values if share is None else share.state, how.seed, device)]
        super().__init__(plan, transport, ranks, Attributes(plan, model, reads), device, how.build, how.record)
        self.state: Rank = self.ranks[0]
        own = dict(model.named_parameters(remove_duplicate=False))
        frozen = plan.program.params.keys() - set(trained_params(plan.program))
        self.frozen_dtypes = {name: own[name].dtype for name in sorted(frozen) if name in own}
        read = {name for holding in self.held for name in holding.params}
        self.unread: UnreadState = UnreadState(plan.program, read, model, values) if share is None else share.unread
        if len(self.held) > 1:
            transport.connect(message_pairs(plan, programs))
        self._phases = CompiledPhases(executor, transport, how.compilation)

    def replay(self, graphs: Graphs) -> None:
        """From now on steps are captured and replayed, what is recorded or timed excepted; see `graphs`.

        Raises:
            ConstraintError: the host decides or waits within a step; names what, and the way out.
        """
        refuse_host_decisions(self.state.program)
        self.replayed = ReplayedSteps(self.state, graphs)

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Forward, backward and gradient reduction of one global batch.

        Args:
            batch: what `shard` yields, or a whole global batch (the same on every rank).
        Returns:
            The loss of the whole batch (0-dim), the same on every rank.
        Raises:
            PlanMismatchError: the batch is not the one the plan was made for, or what the plan has as a constant of the
                model was changed.
            RuntimeFailure: a step failed; names rank, action, op and source line.
            CodegenError: under `compile_strict`, a block could not be compiled or differs from eager.
        """
        if self.state.steps_done == 1 and not self.state.clock.is_trained:
            warnings.warn(
                "a second step begins, and no optimizer was made with trainer.optimizer(cls, ...): one over "
                "model.parameters() or named_parameters() updates nothing that the plan trains",
                stacklevel=2,
            )
        loss = super().step(batch)
        self.state.take_grads()
        if (graphs := self._graphs) is not None:
            graphs.lend()
        return loss

    @property
    def _graphs(self) -> ReplayedSteps | None:
        """What a step goes through, unless it is recorded or timed."""
        return None if self.record or self._timer is not None else self.replayed

    def _homes(self) -> Mapping[Name, Tensor] | None:
        return None if self._graphs is None else self._graphs.homes

    def _take(self, part: str, executors: Sequence[Executor], steps: Sequence[Sequence[Step]]) -> None:
        """Kernel by kernel, or as a graph where they are one; instruction by instruction where that is observed."""
        if part != BESIDE and (self.record or self._timer is not None):
            step_together(self.transport, executors, steps, self._timer)
            return
        if part == BEFORE:
            self._phases.prepare()
        if part in (BEFORE, AFTER) and self._graphs is not None:
            self._graphs.run(part, tuple(steps[0]))
        else:
            executors[0].run(steps[0])

    def _whole(self, shape: Dims, layout: Layout, parts: Sequence[Tensor]) -> Tensor:
        return join_over(shape, layout, parts[0], self.transport.gather)

    def _grads(self, rank: Rank) -> Mapping[str, Tensor]:
        return {name: param.grad for name, param in rank.params.items() if param.grad is not None}

    @contextmanager
    def timed(self) -> Iterator[Mapping[tuple[str, int], list[float]]]:
        """Within it, steps are taken op by op; gives (block, instruction) -> seconds of each of its calls."""
        self._timer = timer = Timer()
        try:
            yield timer.seconds
        finally:
            self._timer = None

    def cut(self, batch: Mapping[str, Tensor]) -> ShardedBatch:
        """This rank's part of a global batch."""
        return self._parts(batch)[0]

    def takes(self, batch: Mapping[str, Tensor]) -> bool:
        """Whether a global batch is one for the plan, padded if need be."""
        try:
            self.cut(batch)
        except PlanMismatchError:
            return False
        return True

    def shard(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[ShardedBatch]:
        """This rank's part of every global batch of a loader, the same loader on every rank.

        With CUDA the next one is loaded and cut in a thread while a step runs (see `runtime.optimizers.prefetch`).
        """
        device = self.transport.device
        return Ahead(self.cut, loader, on_this_device(device)) if device == "cuda" else map(self.cut, loader)

    def optimizer(
        self,
        cls: type[torch.optim.Optimizer],
        *,
        groups: Sequence[Mapping[str, Any]] | None = None,
        params: GroupMaker | None = None,
        after: Callable[[], None] | None = None,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """The user's optimizer over this rank's shards.

        Under the plan's `delayed_update` its `step` takes the gradients the host is to update with away from their
        parameters, and brings in what it has updated meanwhile with those of the step before.

        Args:
            cls: a torch optimizer. One that updates elements by others (norms, statistics of rows, orthogonalised
                updates) is found out and refused where the plan shards what it would take whole.
            groups: `{"match": regex, **options}`; the first whose pattern is found in a parameter's name takes it. All
                others form a group with `options`: to leave some out, choose with `params`.
            params: makes the param groups from the shards by name, of these alone; excludes `groups`.
            after: runs after its step, instead of `finish_update`.
            options: for cls.
        Raises:
            PlanMismatchError: a pattern matches nothing, `params` gives other tensors or none, or the optimizer is
                another one on shards (see `coupling`).
        """
        made, staging = self._optimizer(self.state, cls, groups, params, options, True)
        trainer = weakref.ref(self)
        if self.state.late:
            made.register_state_dict_pre_hook(lambda _: _flush(trainer()))
            made.register_load_state_dict_pre_hook(lambda *_: _flush(trainer()))

        def finish(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            alive = trainer()
            if staging is not None and staging.is_stepping:
                return
            if after is not None:
                after()
            elif alive is not None:
                alive.finish_update()

        ends = [made.register_step_post_hook(finish)]

        def end_last(*_: object) -> None:
            if staging is None or not staging.inside:  # what hooks of the user's write is brought back too
                ends.pop().remove()
                ends.append(made.register_step_post_hook(finish))

        made.register_step_pre_hook(end_last)
        return made

    def finish_update(self) -> None:
        """Bring updated values back to the stored parameters; runs by itself after the optimizer's step.

        While recording, gradients are let go here (their bytes are the program's), not at `zero_grad`.
        """
        if self.record:
            self.state.drop_grads(but=self.state.staged)
        self._finish_update()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.state.drop_grads()

    @property
    def compiled(self) -> dict[str, str | None]:
        """Blocks that were to be compiled: "" where they are, why they stay eager, None before their first run."""
        return self._phases.reasons

    @property
    def entries(self) -> list[Entry]:
        """What this rank did since the step began (only while recording)."""
        return self.state.executor.account.entries

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive on the device at once since the step began (only while recording)."""
        return self.state.executor.account.ledger.peak_bytes

    @property
    def tier_peak_bytes(self) -> dict[str, int]:
        """Likewise of every tier that was used ("host", "disk")."""
        return self.state.executor.account.ledger.tier_peak_bytes


def _flush(trainer: Trainer | None) -> None:
    """What waits is in what an optimizer gives out, and in what it takes in."""
    if trainer is not None:
        trainer.flush()
