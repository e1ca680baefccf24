"""All ranks of a plan in this process: for tests, fuzzing and checks of a plan before it is given a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir import names as outer_names
from paraplan.ir.entry import Entry
from paraplan.ir.holding import counted_here, holdings
from paraplan.ir.names import LOSS_SCALE
from paraplan.ir.plan import Plan
from paraplan.ir.rank_program import RankProgram, Step
from paraplan.ir.sources import source_lines
from paraplan.runtime.attributes import Attributes
from paraplan.runtime.batch import shard_batch
from paraplan.runtime.copies import Copier
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
from paraplan.runtime.late import LateUpdates
from paraplan.runtime.observers import Observer
from paraplan.runtime.optim import GroupMaker, check_norm, clip, norm_of, norm_share
from paraplan.runtime.params import join
from paraplan.runtime.rank import Rank
from paraplan.runtime.scaling import Scaler
from paraplan.runtime.staged import Staging
from paraplan.runtime.stepping import make_executors, step_together
from paraplan.runtime.updates import make_optimizer
from paraplan.runtime.weights import values_of


class InProcessTrainer:
    """Trains a plan in one process, recording every step.

    Args:
        plan: the plan.
        programs: `ir.lower.lower(plan)`, per rank class.
        modules: per rank class, `codegen.build_modules(program, device=device)`.
        model: on cpu, with values; or on meta.
        seed: base of the random seeds.
        build: emits the modules of another program of this plan; `eval_step` needs it.
        weights: safetensors files with the parameters.
        device: of every rank, "cpu" or "cuda" (the current device, which all of them share).

    Attributes:
        record: whether the next step keeps an account (`entries`, `peak_bytes`); what is computed is the same.
    """

    def __init__(
        self, plan: Plan, programs: Sequence[RankProgram], modules: Sequence[Modules], model: nn.Module, seed: int = 0,
        build: Build | None = None, weights: str | Path | None = None, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.plan, self.held, self.device = plan, holdings(plan), device
        self.attributes = Attributes(plan, model)
        self.transport, executors = make_executors(
            [holding.mesh for holding in self.held], programs, plan.schedule.rank_class, modules,
            source_lines(plan.program), device,
        )  # fmt: skip
        values = values_of(plan.program, model, weights, seed)
        self.ranks = [Rank(plan, executor, values, seed, device) for executor in executors]
        self.optimizers: list[torch.optim.Optimizer] = []
        self._staging: list[Staging] = []
        self.record = True
        self._evaluations = Evaluations(plan, build)
        self.evaluators: list[Executor] = []

    def eval_step(
        self, batch: Mapping[str, Tensor], outputs: Wanted = None, names: Sequence[str] | None = None
    ) -> Evaluation:
        """As `Trainer.eval_step`, recorded; `evaluators` are the executors it ran on."""
        key = self._evaluations.names(outputs, names)
        self.attributes.check(evaluating=True)
        self.evaluators, batch = [], self.attributes.fill(batch)
        for index, rank in enumerate(self.ranks):
            program, modules = self._evaluations.get(key, self.plan.schedule.rank_class[rank.executor.rank])
            here = rank.executor
            executor = Executor(
                program, modules, here.coordinates, here.port, here.rank, source_lines(self.plan.program),
                copier=Copier(self.device, rank=here.rank),
            )  # fmt: skip
            bind(executor, rank, shard_batch(self.plan, rank.stage, here.coordinates, batch, self.device))
            rank.account(executor, self.optimizers[index : index + 1])
            self.evaluators.append(executor)
        step_together(self.transport, self.evaluators, [executor.program.steps for executor in self.evaluators])
        places, mesh_shape = [rank.executor.coordinates for rank in self.ranks], self.held[0].mesh.shape
        found = collect(
            self.evaluators, outputs,
            lambda shape, layout, parts: join(shape, layout, mesh_shape, lambda at: parts[places.index(at)]),
        )  # fmt: skip
        return found if outputs != "global" else without_padding(self.plan, found, missing_rows(self.plan, batch))

    @property
    def metrics(self) -> Mapping[str, Tensor]:
        """Each of several losses of the last step, unweighted, by name."""
        return metrics_of(self.ranks[0].executor)

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Forward, backward and gradient reduction of one global batch.

        Returns:
            The loss (0-dim), of the whole batch.
        """
        if any(rank.has_begun for rank in self.ranks):  # the optimizer's step was skipped
            self.flush()
        if any(rank.is_stale for rank in self.ranks):
            self._together(lambda rank: rank.lists.restoring, Observer())
            for rank in self.ranks:
                rank.settled()
        self.attributes.check()
        batch = self.attributes.fill(batch)
        for index, rank in enumerate(self.ranks):
            rank.start(shard_batch(self.plan, rank.stage, rank.executor.coordinates, batch, self.device))
            if self.record:
                rank.begin_account(self.optimizers[index : index + 1])
        self._together(lambda rank: rank.before, None if self.record else Observer())
        return self.ranks[0].loss()

    def flush(self) -> None:
        """As `Trainer.flush`."""
        if any(rank.is_due for rank in self.ranks):
            self._together(lambda rank: rank.lists.flush if rank.is_due else (), Observer())

    def _together(self, steps: Callable[[Rank], Sequence[Step]], observer: Observer | None) -> None:
        """Steps of every rank."""
        executors = [rank.executor for rank in self.ranks]
        step_together(self.transport, executors, [steps(rank) for rank in self.ranks], observer)

    def losses(self) -> list[Tensor]:
        """The loss as each rank has it."""
        return [rank.loss() for rank in self.ranks]

    def grads(self) -> dict[str, Tensor]:
        """Full gradients by parameter name, after `step`."""
        return {
            name: self._join(name, lambda rank, n=name: rank.grad(n))
            for name in self._everyones(lambda rank: rank.program.grads)
        }

    def params(self) -> dict[str, Tensor]:
        """Full parameters by name: the optimizer's copy where there is one."""
        return {
            name: self._join(name, lambda rank, n=name: rank.held(n)[0])
            for name in self._everyones(lambda rank: rank.stage.params)
        }

    def stored_params(self, rank: int) -> dict[str, Tensor]:
        """The shards a rank computes with."""
        tensors = self.ranks[rank].tensors
        return {name: tensors[outer_names.param(name)] for name in self.ranks[rank].stage.params}

    def buffers(self, rank: int | None = None) -> dict[str, Tensor]:
        """The buffers as a rank has them, or (None) as those that write them have; ranks of a mesh hold them whole."""
        if rank is not None:
            return self.ranks[rank].buffers()
        return self._everyones(lambda each: each.buffers())

    def _everyones(self, of: Callable[[Rank], Mapping[str, Any]]) -> dict[str, Any]:
        """What ranks have by name, in the order of the groups that speak for it."""
        found: dict[str, Any] = {}
        for rank in self.ranks:
            found |= {name: x for name, x in of(rank).items() if name in self._counted(rank) and name not in found}
        return found

    def _counted(self, rank: Rank) -> frozenset[str]:
        return counted_here(self.plan.program, self.held, rank.stage)

    def _join(self, name: str, local: Any) -> Tensor:
        first = next(rank for rank in self.ranks if name in rank.stage.params)
        by_coordinates = {rank.executor.coordinates: rank for rank in self.ranks if rank.stage == first.stage}
        shape, mesh_shape = self.plan.program.params[name].spec.shape, first.stage.mesh.shape
        return join(shape, first.held(name)[1], mesh_shape, lambda coords: local(by_coordinates[coords])).clone()

    def entries(self, rank: int) -> list[Entry]:
        """What a rank did since the step began."""
        return self.ranks[rank].executor.account.entries

    def peak_bytes(self, rank: int) -> int:
        """The most bytes a rank held at once since the step began."""
        return self.ranks[rank].executor.account.ledger.peak_bytes

    def tier_peak_bytes(self, rank: int) -> dict[str, int]:
        """Per tier, the most bytes a rank had there at once since the step began."""
        return self.ranks[rank].executor.account.ledger.tier_peak_bytes

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch's, over the gradients of the last step; refuses what `Trainer.clip_grad_norm_` does."""
        norm_type = check_norm(max_norm, norm_type)
        shares = []
        for rank in self.ranks:
            grads = {name: grad for name, grad in rank.grads().items() if name in self._counted(rank)}
            place, waiting = rank.executor.coordinates, rank.waiting
            shares.append(norm_share(grads, rank.layouts, place, norm_type, self.device, waiting))
        total = torch.stack(shares).max() if norm_type == float("inf") else torch.stack(shares).sum()
        norm = norm_of(total, norm_type)
        for rank in self.ranks:
            clip(rank.grads(), norm, max_norm, rank.waiting)
        return norm

    def apply_optimizer(
        self, cls: type[torch.optim.Optimizer], *, groups: Sequence[Mapping[str, Any]] | None = None,
        params: GroupMaker | None = None, scaler: Scaler | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Update with the last step's gradients (the optimizers are made on the first call), then finish the step.

        With a scaler, an update that finds an infinite gradient is skipped.
        """
        if not self.optimizers:
            self.optimizers = [make_optimizer(rank, cls, groups, params, options) for rank in self.ranks]
            self._staging = [
                Staging(rank, optimizer, self.transport.tracker)
                for rank, optimizer in zip(self.ranks, self.optimizers, strict=True)
                if rank.staged
            ]
            staging = {each.rank: each for each in self._staging}
            for rank, optimizer in zip(self.ranks, self.optimizers, strict=True):
                if rank.late:
                    LateUpdates(rank, optimizer, self.transport.tracker, False, staging.get(rank))
        for rank in self.ranks:
            rank.take_grads()
        if scaler is not None:
            scaler.unscale_all(self.optimizers)
        stepped = [self._update(*pair, scaler) for pair in zip(self.ranks, self.optimizers, strict=True)]
        if scaler is not None:
            scaler.update()
        if all(stepped):
            self._together(lambda rank: rank.tail(), None if self.record else Observer())
            for rank in self.ranks:
                rank.settled()
        for rank in self.ranks:
            for param in rank.params.values():
                param.grad = None

    def _update(self, rank: Rank, optimizer: torch.optim.Optimizer, scaler: Scaler | None) -> bool:
        """One rank's update; whether it was made."""
        made: list[object] = []
        hook = optimizer.register_step_post_hook(lambda *_: made.append(None))
        tracker = self.transport.tracker
        with tracker.updating(rank.executor.account.ledger, rank.homes()) if self.record else nullcontext():
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        hook.remove()
        for name, param in rank.params.items():
            if not made or name not in rank.staged:  # others are updated in what follows
                param.grad = None
        return bool(made)

    def scaler(self, **options: Any) -> Scaler:
        """As `Trainer.scaler`, one for all ranks: give it to `apply_optimizer`."""
        scales = [rank.tensors[LOSS_SCALE] for rank in self.ranks if LOSS_SCALE in rank.tensors]
        waiting = [rank.waiting for rank in self.ranks]
        return Scaler(self.plan, lambda found: found, scales, self.device, waiting, **options)
