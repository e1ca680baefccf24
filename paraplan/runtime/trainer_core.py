"""What every trainer of a plan does, for the ranks of it that are in this process.

    step: bind the batch and seeds, run what is before the update      `step`
    gradients: their norm over all ranks, a scaler's verdict           `clip_grad_norm_`, `scaler`
    update: the user's optimizer                                       subclasses
    stored copies: run what is after the update                        `_finish_update`

Subclasses say how steps are taken (`_take`), how parts of outputs are joined (`_whole`) and where gradients are
(`_grads`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.names import LOSS_SCALE
from paraplan.ir.execution.rank_program import Step
from paraplan.ir.machine.mesh import Layout
from paraplan.ir.machine.rank_groups import counted_here, holdings
from paraplan.ir.model.sources import source_lines
from paraplan.ir.plan import Plan
from paraplan.runtime.batch import ShardedBatch, shard_batch
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
from paraplan.runtime.executing.executor import Executor
from paraplan.runtime.executing.graphs import AFTER, BEFORE
from paraplan.runtime.optimizers.delayed import LateUpdates
from paraplan.runtime.optimizers.optim import GroupMaker, check_norm, clip, norm_of, norm_share
from paraplan.runtime.optimizers.scaling import Scaler
from paraplan.runtime.optimizers.streamed import Staging
from paraplan.runtime.optimizers.updates import Couplings, make_optimizer
from paraplan.runtime.ragged import RowPadding
from paraplan.runtime.rank import Rank
from paraplan.runtime.state.attributes import Attributes
from paraplan.runtime.state.params import Dims
from paraplan.runtime.transport.transport import Transport

BESIDE, EVALUATION = "beside", "evaluation"
"""What is no part of a training step, and of which no account is kept; an evaluation's steps."""


class TrainerCore:
    """The ranks of a plan that are in this process.

    Args:
        plan: the plan.
        transport: of the ranks.
        ranks: with the tensors and optimizers of each.
        attributes: of the model, where they are inputs, or constants that are checked.
        device: of every rank.
        build: emits the modules of another program of this plan; `eval_step` needs it.
        record: whether the next step keeps an account; what is computed is the same.

    Attributes:
        held: what each group of ranks holds.
        evaluators: the executors that the last evaluation ran on.
    """

    transport: Transport

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        ranks: Sequence[Rank],
        attributes: Attributes,
        device: str,
        build: Build | None,
        record: bool,
    ) -> None:
        self.plan, self.transport, self.held, self.device, self.record = plan, transport, holdings(plan), device, record
        self.attributes, self.ranks = attributes, tuple(ranks)
        self._couplings = Couplings()
        self._padding = RowPadding(plan)
        self.evaluators: list[Executor] = []
        self._evaluations = Evaluations(plan, build)
        self._evaluators: dict[tuple[str, ...], list[Executor]] = {}

    def _take(self, part: str, executors: Sequence[Executor], steps: Sequence[Sequence[Step]]) -> None:
        """Take steps of every rank: `BEFORE` or `AFTER` the update, `BESIDE` a step, or of an `EVALUATION`."""
        raise NotImplementedError

    def _whole(self, shape: Dims, layout: Layout, parts: Sequence[Tensor]) -> Tensor:
        """Join the ranks' parts of a tensor, one per rank of this process."""
        raise NotImplementedError

    def _grads(self, rank: Rank) -> Mapping[str, Tensor]:
        """A rank's gradients of the step that has ended."""
        raise NotImplementedError

    def _homes(self) -> Mapping[Name, Tensor] | None:
        """Where a step reads its batch, if anywhere."""
        return None

    def _take_all(self, part: str, steps: Callable[[Rank], Sequence[Step]]) -> None:
        self._take(part, [rank.executor for rank in self.ranks], [steps(rank) for rank in self.ranks])

    def _parts(self, batch: Mapping[str, Tensor]) -> list[ShardedBatch]:
        """A global batch, cut for every rank, or the part that is this process' rank's."""
        if isinstance(batch, ShardedBatch):
            return [self.attributes.refill(batch)]
        batch = self.attributes.fill(batch)
        places = [(rank.stage, rank.executor.coordinates) for rank in self.ranks]
        return [shard_batch(self.plan, stage, place, batch, self.device, self._padding) for stage, place in places]

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Forward, backward and gradient reduction of one global batch.

        Returns:
            The loss of the whole batch (0-dim).
        """
        self.attributes.check()
        parts = self._parts(batch)
        if any(rank.has_begun for rank in self.ranks):  # the optimizer's step was skipped
            self.flush()
        for rank, part in zip(self.ranks, parts, strict=True):
            rank.start(part, self._homes())
        self._restore()
        if self.record:
            for rank in self.ranks:
                rank.begin_account(rank.executor)
        self._take_all(BEFORE, lambda rank: rank.before)
        return self.ranks[0].loss()

    def flush(self) -> None:
        """Apply gradients that wait for the next step (a plan's `delayed_update`); all ranks must call.

        Whatever gives out states does so first, so that a checkpoint has every step in it; the step that follows finds
        no gradient waiting, here as in a run that goes on from the checkpoint. To be called when training has ended.
        """
        if any(rank.is_due for rank in self.ranks):
            self._take_all(BESIDE, lambda rank: rank.lists.flush if rank.is_due else ())

    def _restore(self) -> None:
        """Bring to stored parameters what was written into the optimizer's since its step (clamped weights, say)."""
        if any(rank.is_stale for rank in self.ranks):
            self._take_all(BESIDE, lambda rank: rank.lists.restoring)
            for rank in self.ranks:
                rank.settled()

    def _finish_update(self) -> None:
        """Bring updated values back to the stored parameters."""
        self._take_all(AFTER, Rank.tail)
        for rank in self.ranks:
            rank.settled()

    @property
    def metrics(self) -> Mapping[str, Tensor]:
        """Each of several losses of the last step, unweighted, by name."""
        return metrics_of(self.ranks[0].executor)

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
            self._evaluators[key] = [self._evaluator(rank.executor, key) for rank in self.ranks]
        self.evaluators = executors = self._evaluators[key]
        self.attributes.check(evaluating=True)
        rows = None if isinstance(batch, ShardedBatch) else missing_rows(self.plan, self.attributes.fill(batch))
        self._restore()
        for rank, executor, part in zip(self.ranks, executors, self._parts(batch), strict=True):
            bind(executor, rank, part)
            if self.record:
                rank.begin_account(executor)
        self._take(EVALUATION, executors, [executor.program.steps for executor in executors])
        found = collect(executors, outputs, self._whole)
        return found if outputs != "global" else without_padding(self._padding, found, rows)

    def _evaluator(self, here: Executor, key: tuple[str, ...]) -> Executor:
        program, modules = self._evaluations.get(key, self.plan.schedule.rank_class[here.rank])
        return Executor(
            program,
            modules,
            here.coordinates,
            here.port,
            here.rank,
            source_lines(self.plan.program),
            copier=here.copier,
        )

    def _optimizer(
        self,
        rank: Rank,
        cls: type[torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]] | None,
        params: GroupMaker | None,
        options: Mapping[str, Any],
        beside: bool,
    ) -> tuple[torch.optim.Optimizer, Staging | None]:
        """The user's optimizer over a rank's shards, and what brings states to it, if anything.

        Args:
            rank, cls, groups, params, options: see `updates.make_optimizer`.
            beside: whether late updates are done beside the program.
        """
        made, tracker = make_optimizer(rank, cls, groups, params, options, self._couplings), self.transport.tracker
        staging = Staging(rank, made, tracker) if rank.staged else None
        if rank.late:
            LateUpdates(rank, made, tracker, beside, staging)
        return made, staging

    def scaler(self, **options: Any) -> Scaler:
        """The gradient scaler of a plan that computes in fp16, for all ranks of this process; see `scaling.Scaler`.

        Args:
            options: torch.amp.GradScaler's (init_scale, growth_factor, backoff_factor, growth_interval).
        Raises:
            PlanMismatchError: the plan computes in another precision.
        """

        def agree(found: Tensor) -> None:
            self.transport.agree(found, "max")
            for rank in self.ranks:
                rank.note_grads()

        scales = [rank.tensors[LOSS_SCALE] for rank in self.ranks if LOSS_SCALE in rank.tensors]
        return Scaler(self.plan, agree, scales, self.device, [rank.waiting for rank in self.ranks], **options)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch's, over all shards of all gradients: every element counts once.

        Returns:
            The norm before clipping, the same on every rank; float64.
        Raises:
            ConstraintError: norm_type is 0 or -inf, or one of both is no number.
        """
        norm_type = check_norm(max_norm, norm_type)
        held = [(rank, self._grads(rank)) for rank in self.ranks]
        shares = torch.stack([self._norm_share(rank, grads, norm_type) for rank, grads in held])
        is_max = norm_type == float("inf")
        total = self.transport.agree(shares.max() if is_max else shares.sum(), "max" if is_max else "sum")
        norm = norm_of(total, norm_type)
        for rank, grads in held:
            clip(grads, norm, max_norm, rank.waiting)
            rank.note_grads()
        return norm

    def _norm_share(self, rank: Rank, grads: Mapping[str, Tensor], norm_type: float) -> Tensor:
        counted = {name: grad for name, grad in grads.items() if name in self._counted(rank)}
        return norm_share(counted, rank.layouts, rank.executor.coordinates, norm_type, self.device, rank.waiting)

    def _counted(self, rank: Rank) -> frozenset[str]:
        return counted_here(self.plan.program, self.held, rank.stage)
