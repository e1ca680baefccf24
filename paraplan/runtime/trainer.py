"""Training a plan on torch.distributed: this process is one rank.

    trainer = Trainer(plan, programs, modules, model, transport)
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=3e-4)
    for batch in trainer.shard(loader):
        loss = trainer.step(batch); optimizer.step(); optimizer.zero_grad()

`step` runs forward, backward and gradient reduction and leaves gradients on the optimizer's parameters, which are
this rank's shards; a hook on the optimizer's `step` brings the updated values back to where the ops read them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.entry import Entry
from paraplan.ir.plan import Plan
from paraplan.ir.rank_program import RankProgram, Step
from paraplan.runtime import compiled as compiling
from paraplan.runtime.batch import ShardedBatch, shard_batch, shard_loader
from paraplan.runtime.checkpoint import Checkpointing
from paraplan.runtime.distributed import DistributedTransport
from paraplan.runtime.executor import Executor, Modules
from paraplan.runtime.optim import GroupMaker, clip, norm_of, norm_share, param_groups
from paraplan.runtime.params import full_tensors
from paraplan.runtime.rank import Rank, single_stage, source_lines


class Trainer(Checkpointing):
    """One rank of a plan.

    Args:
        plan: the plan.
        programs: `ir.lower.lower(plan)`, per rank class.
        modules: of this rank's class, `codegen.build_modules(program, transport.groups, transport.device)`.
        model: with values, on any device; only this rank's shards are kept.
        transport: of the stage's mesh.
        seed: base of the random seeds; the same on every rank.
        record: note every instruction and the memory it takes (slow); entries and `peak_bytes` then say what was.
        compile_phases: "F" and/or "B": run these phases through torch.compile, checked against eager once.

    Attributes:
        rank: this process' rank.
    """

    def __init__(
        self, plan: Plan, programs: Sequence[RankProgram], modules: Modules, model: nn.Module,
        transport: DistributedTransport, *, seed: int = 0, record: bool = False, compile_phases: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.plan, self.transport, self.rank, self.record = plan, transport, transport.rank, record
        self.stage = single_stage(plan)
        program = programs[plan.schedule.rank_class[self.rank]]
        coordinates = self.stage.mesh.coordinates(self.rank)
        executor = Executor(program, modules, coordinates, transport, self.rank, source_lines(plan.program))
        self.state = Rank(plan, executor, full_tensors(plan.program, model), seed, transport.device)
        compiling.compile_phases(executor, transport, compile_phases)
        self._optimizers: list[torch.optim.Optimizer] = []

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Forward, backward and gradient reduction of one global batch.

        Args:
            batch: what `shard` yields, or a whole global batch (the same on every rank).
        Returns:
            The loss of the whole batch (0-dim), the same on every rank.
        Raises:
            PlanMismatchError: the batch is not the one the plan was made for.
            RuntimeFailure: a step failed; names rank, action, op and source line.
        """
        mine = batch if isinstance(batch, ShardedBatch) else self.cut(batch)
        self.state.start(mine)
        if self.record:
            self.state.begin_account(self._optimizers)
        self._take(self.state.before)
        loss = self.state.loss()
        self.state.take_grads()
        return loss

    def _take(self, steps: Iterable[Step]) -> None:
        executor = self.state.executor
        if not self.record:
            executor.run(steps)
            return
        tracker = self.transport.tracker
        with torch.no_grad(), tracker, tracker.booking(executor.ledger):
            for _ in executor.record(steps):
                pass

    def cut(self, batch: Mapping[str, Tensor]) -> ShardedBatch:
        """This rank's part of a global batch."""
        return shard_batch(self.plan, self.stage, self.state.executor.coordinates, batch, self.transport.device)

    def shard(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[ShardedBatch]:
        """This rank's part of every global batch of a loader, the same loader on every rank."""
        return shard_loader(self.plan, self.stage, self.state.executor.coordinates, loader, self.transport.device)

    def optimizer(
        self, cls: type[torch.optim.Optimizer], *, groups: Sequence[Mapping[str, Any]] | None = None,
        params: GroupMaker | None = None, **options: Any,
    ) -> torch.optim.Optimizer:  # fmt: skip
        """The user's optimizer over this rank's shards.

        Args:
            cls: any torch optimizer that updates elements independently (the layouts are not told to it).
            groups: `{"match": regex, **options}`; the first whose pattern is found in a parameter's name takes it.
            params: makes the param groups from the shards by name; excludes `groups`.
            options: for cls.
        """
        made = cls(param_groups(self.state.params, groups, params), **options)
        trainer = weakref.ref(self)

        def finish(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            alive = trainer()
            if alive is not None:
                alive.finish_update()

        made.register_step_post_hook(finish)
        self._optimizers.append(made)
        return made

    def finish_update(self) -> None:
        """Bring updated values back to the stored parameters; runs by itself after the optimizer's step.

        While recording, gradients are let go here (their bytes are the program's), not at `zero_grad`.
        """
        if self.record:
            for param in self.state.params.values():
                param.grad = None
        self._take(self.state.tail())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch's, over all shards of all gradients: every element counts once.

        Returns:
            The norm before clipping, the same on every rank; float64.
        """
        grads = {name: param.grad for name, param in self.state.params.items() if param.grad is not None}
        total = norm_share(grads, self.state.layouts, self.state.executor.coordinates, norm_type, self.transport.device)
        for axis in range(len(self.stage.mesh.shape)):
            total = self.transport.reduce(total, axis, "max" if norm_type == float("inf") else "sum")
        norm = norm_of(total, norm_type)
        clip(grads.values(), norm, max_norm)
        return norm

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for param in self.state.params.values():
            param.grad = None

    @property
    def entries(self) -> list[Entry]:
        """What this rank did since the step began (only while recording)."""
        return self.state.executor.entries

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once since the step began (only while recording)."""
        return self.state.executor.ledger.peak_bytes
