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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.entry import Entry
from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.holding import counted_here, holding_of, holdings
from paraplan.ir.names import LOSS_SCALE
from paraplan.ir.plan import Plan
from paraplan.ir.program import trained_params
from paraplan.ir.rank_program import RankProgram, Step
from paraplan.ir.sources import source_lines
from paraplan.ir.trace.reading import Reads
from paraplan.runtime.ahead import Ahead
from paraplan.runtime.attributes import Attributes
from paraplan.runtime.batch import ShardedBatch, shard_batch
from paraplan.runtime.compiled import Backend, CompiledPhases
from paraplan.runtime.copies import Copier
from paraplan.runtime.devices import on_this_device
from paraplan.runtime.distributed import DistributedTransport
from paraplan.runtime.evaluate import (
    Build,
    Evaluation,
    Evaluations,
    Wanted,
    bind,
    collect,
    metrics_of,
    missing_rows,
    without_padding,
)
from paraplan.runtime.executor import Executor, Modules
from paraplan.runtime.graphs import AFTER, BEFORE, Graphs, ReplayedSteps, refuse_host_decisions
from paraplan.runtime.late import LateUpdates
from paraplan.runtime.observers import Timer
from paraplan.runtime.optim import GroupMaker, check_norm, clip, norm_of, norm_share
from paraplan.runtime.params import join_over
from paraplan.runtime.rank import Rank, message_pairs
from paraplan.runtime.scaling import Scaler
from paraplan.runtime.staged import Staging
from paraplan.runtime.stepping import step_together
from paraplan.runtime.training_state import TrainingStates
from paraplan.runtime.updates import make_optimizer
from paraplan.runtime.weights import values_of


class Trainer(TrainingStates):
    """One rank of a plan.

    Args:
        plan: the plan.
        programs: `ir.lower.lower(plan)`, per rank class.
        modules: of this rank's class, `codegen.build_modules(program, transport.groups, transport.device)`.
        model: with values, on any device, or on meta; only this rank's shards are kept.
        transport: of the plan's meshes, in the order of `ir.holding.holdings`.
        seed: base of the random seeds; the same on every rank.
        record: note every instruction and the memory it takes (slow); entries and `peak_bytes` then say what was.
        compile_phases: "F" and/or "B": run these phases through torch.compile, checked against eager once.
        compile_backend: torch.compile's.
        compile_strict: a block that cannot be compiled, or differs from eager, is an error, not a warning.
        build: emits the modules of another program of this plan; `eval_step` needs it.
        weights: safetensors files to read this rank's parts of the parameters from; without them a model on meta is
            initialised from the seed (see `weights`).
        share: another plan's trainer of this rank, whose parameters, states and buffers become this one's too.
        copier: makes copies to and from the host and the disk; left out, one that makes them beside the program.
        reads: what forward read while it was captured, where that was in this process.

    Attributes:
        rank: this process' rank.
        replayed: its steps as graphs; None where they run kernel by kernel.
    """

    def __init__(
        self, plan: Plan, programs: Sequence[RankProgram], modules: Modules, model: nn.Module,
        transport: DistributedTransport, *, seed: int = 0, record: bool = False, compile_phases: Sequence[str] = (),
        compile_backend: Backend = "inductor", compile_strict: bool = False,
        build: Build | None = None, weights: str | Path | None = None,
        share: Trainer | None = None, copier: Copier | None = None, reads: Reads | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.transport, self.rank, self.record = plan, transport, transport.rank, record
        self.held = holdings(plan)
        self.stage = holding_of(self.held, self.rank)
        program = programs[plan.schedule.rank_class[self.rank]]
        coordinates = self.stage.mesh.coordinates(self.rank)
        if share is not None:
            copier = share.state.executor.copier
        copier = copier or Copier(transport.device, beside=True, rank=self.rank)
        executor = Executor(
            program, modules, coordinates, transport, self.rank, source_lines(plan.program), copier=copier
        )
        self.attributes = Attributes(plan, model, reads)
        own = dict(model.named_parameters(remove_duplicate=False))
        frozen = plan.program.params.keys() - set(trained_params(plan.program))
        self.frozen_dtypes = {name: own[name].dtype for name in sorted(frozen) if name in own}
        values = values_of(plan.program, model, weights, seed) if share is None else share.state
        self.state = Rank(plan, executor, values, seed, transport.device)
        if len(self.held) > 1:
            transport.connect(message_pairs(plan, programs))
        self._phases = CompiledPhases(executor, transport, compile_phases, compile_backend, compile_strict)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._evaluations = Evaluations(plan, build)
        self._evaluators: dict[tuple[str, ...], Executor] = {}
        self.replayed: ReplayedSteps | None = None
        self._timer: Timer | None = None

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
        self.attributes.check()
        if self.state.steps_done == 1 and not self.state.clock.is_trained:
            warnings.warn(
                "a second step begins, and no optimizer was made with trainer.optimizer(cls, ...): one over "
                "model.parameters() or named_parameters() updates nothing that the plan trains",
                stacklevel=2,
            )
        mine = self.attributes.refill(batch) if isinstance(batch, ShardedBatch) else self.cut(batch)
        if self.state.has_begun:  # the optimizer's step was skipped
            self.flush()
        graphs = self._graphs
        self.state.start(mine, graphs and graphs.homes)
        self._restore()
        if self.record:
            self.state.begin_account(self._optimizers)
        else:
            self._phases.prepare()
        self._take_part(BEFORE, self.state.before)
        loss = self.state.loss()
        self.state.take_grads()
        if graphs is not None:
            graphs.lend()
        return loss

    @property
    def metrics(self) -> Mapping[str, Tensor]:
        """Each of several losses of the last step, unweighted, by name."""
        return metrics_of(self.state.executor)

    def eval_step(
        self, batch: Mapping[str, Tensor], outputs: Wanted = None, names: Sequence[str] | None = None
    ) -> Evaluation:
        """The forward of one global batch: no gradients, nothing saved, no dropout, no buffer updated.

        It is the captured program that runs: batch norm captured in training mode still takes the batch's statistics.

        Args:
            batch: as for `step`.
            outputs: what else the model returns: whole on every rank ("global") or this rank's part ("local").
            names: which of them; all where left out.
        Raises:
            PlanMismatchError: the batch is not one for the plan.
            ConstraintError: an output does not exist, or mixes samples that microbatches keep apart.
        """
        key = self._evaluations.names(outputs, names)
        if key not in self._evaluators:
            program, modules = self._evaluations.get(key, self.plan.schedule.rank_class[self.rank])
            here = self.state.executor.coordinates
            self._evaluators[key] = Executor(
                program, modules, here, self.transport, self.rank, source_lines(self.plan.program),
                copier=self.state.executor.copier,
            )  # fmt: skip
        executor = self._evaluators[key]
        self.attributes.check(evaluating=True)
        whole = not isinstance(batch, ShardedBatch)
        rows = missing_rows(self.plan, self.attributes.fill(batch)) if whole else None
        self._restore()
        bind(executor, self.state, self.cut(batch) if whole else self.attributes.refill(batch))  # type: ignore[arg-type]
        if self.record:
            self.state.account(executor, self._optimizers)
        self._take(executor.program.steps, executor)
        found = collect(
            [executor], outputs, lambda shape, layout, parts: join_over(shape, layout, parts[0], self.transport.gather)
        )
        return found if outputs != "global" else without_padding(self.plan, found, rows)

    def _restore(self) -> None:
        """Bring to stored parameters what was written into the optimizer's since its step (clamped weights, say)."""
        if self.state.is_stale:
            self.state.executor.run(self.state.lists.restoring)
            self.state.settled()

    def _take_part(self, part: str, steps: tuple[Step, ...]) -> None:
        """Take steps on this side of the optimizer, as a graph where they are one."""
        if (graphs := self._graphs) is None:
            self._take(steps)
        else:
            graphs.run(part, steps)

    @property
    def _graphs(self) -> ReplayedSteps | None:
        """What a step goes through, unless it is recorded or timed."""
        return None if self.record or self._timer is not None else self.replayed

    def _take(self, steps: Iterable[Step], executor: Executor | None = None) -> None:
        executor = executor or self.state.executor
        if self.record or self._timer is not None:
            step_together(self.transport, [executor], [steps], self._timer)
        else:
            executor.run(steps)

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
        batch = self.attributes.fill(batch)
        return shard_batch(self.plan, self.stage, self.state.executor.coordinates, batch, self.transport.device)

    def takes(self, batch: Mapping[str, Tensor]) -> bool:
        """Whether a global batch is one for the plan, padded if need be."""
        try:
            self.cut(batch)
        except PlanMismatchError:
            return False
        return True

    def shard(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[ShardedBatch]:
        """This rank's part of every global batch of a loader, the same loader on every rank.

        With CUDA the next one is loaded and cut in a thread while a step runs (see `ahead`).
        """
        device = self.transport.device
        return Ahead(self.cut, loader, on_this_device(device)) if device == "cuda" else map(self.cut, loader)

    def optimizer(
        self, cls: type[torch.optim.Optimizer], *, groups: Sequence[Mapping[str, Any]] | None = None,
        params: GroupMaker | None = None, after: Callable[[], None] | None = None, **options: Any,
    ) -> torch.optim.Optimizer:  # fmt: skip
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
        made = make_optimizer(self.state, cls, groups, params, options)
        self.state.clock.is_trained = True
        staging = Staging(self.state, made, self.transport.tracker) if self.state.staged else None
        trainer = weakref.ref(self)
        if self.state.late:
            LateUpdates(self.state, made, self.transport.tracker, True, staging)
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
        self._optimizers.append(made)
        return made

    def scaler(self, **options: Any) -> Scaler:
        """The gradient scaler of a plan that computes in fp16; see `scaling.Scaler`.

        Args:
            options: torch.amp.GradScaler's (init_scale, growth_factor, backoff_factor, growth_interval).
        Raises:
            PlanMismatchError: the plan computes in another precision.
        """

        def agree(found: Tensor) -> None:
            self.transport.agree(found, "max")
            self.state.note_grads()

        scales = [self.state.tensors[LOSS_SCALE]] if LOSS_SCALE in self.state.tensors else []
        return Scaler(self.plan, agree, scales, self.transport.device, [self.state.waiting], **options)

    def finish_update(self) -> None:
        """Bring updated values back to the stored parameters; runs by itself after the optimizer's step.

        While recording, gradients are let go here (their bytes are the program's), not at `zero_grad`.
        """
        if self.record:
            for name, param in self.state.params.items():
                if name not in self.state.staged:
                    param.grad = None
        self.state.torn = True
        self._take_part(AFTER, self.state.tail())
        self.state.settled()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch's, over all shards of all gradients: every element counts once.

        Returns:
            The norm before clipping, the same on every rank; float64.
        Raises:
            ConstraintError: norm_type is 0 or -inf, or one of both is no number.
        """
        norm_type = check_norm(max_norm, norm_type)
        grads = {name: param.grad for name, param in self.state.params.items() if param.grad is not None}
        here = counted_here(self.plan.program, self.held, self.stage)
        counted = {name: grad for name, grad in grads.items() if name in here}
        place = self.state.executor.coordinates
        total = norm_share(counted, self.state.layouts, place, norm_type, self.transport.device, self.state.waiting)
        norm = norm_of(self.transport.agree(total, "max" if norm_type == float("inf") else "sum"), norm_type)
        clip(grads, norm, max_norm, self.state.waiting)
        self.state.note_grads()
        return norm

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for param in self.state.params.values():
            param.grad = None

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
