"""All ranks of a plan in this process: for tests, fuzzing and checks of a plan before it is given a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.entry import Entry
from paraplan.ir.plan import Plan
from paraplan.ir.rank_program import RankProgram
from paraplan.runtime.batch import shard_batch
from paraplan.runtime.executor import Modules
from paraplan.runtime.optim import GroupMaker, clip, norm_of, norm_share, param_groups
from paraplan.runtime.params import full_tensors, join
from paraplan.runtime.rank import Rank, single_stage, source_lines
from paraplan.runtime.stepping import make_executors, step_together


class InProcessTrainer:
    """Trains a plan in one process, recording every step.

    Args:
        plan: the plan.
        programs: `ir.lower.lower(plan)`, per rank class.
        modules: per rank class, `codegen.build_modules(program)`.
        model: on cpu, with values.
        seed: base of the random seeds.
    """

    def __init__(
        self, plan: Plan, programs: Sequence[RankProgram], modules: Sequence[Modules], model: nn.Module, seed: int = 0
    ) -> None:
        self.plan, self.stage = plan, single_stage(plan)
        self.mesh = self.stage.mesh
        self.transport, executors = make_executors(
            self.mesh, programs, plan.schedule.rank_class, modules, source_lines(plan.program)
        )  # fmt: skip
        full = full_tensors(plan.program, model)
        self.ranks = [Rank(plan, executor, full, seed) for executor in executors]
        self.optimizers: list[torch.optim.Optimizer] = []

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Forward, backward and gradient reduction of one global batch.

        Returns:
            The loss (0-dim), of the whole batch.
        """
        for index, rank in enumerate(self.ranks):
            rank.start(shard_batch(self.plan, self.stage, rank.executor.coordinates, batch))
            rank.begin_account(self.optimizers[index : index + 1])
        step_together(self.transport, [rank.executor for rank in self.ranks], [rank.before for rank in self.ranks])
        return self.ranks[0].loss()

    def losses(self) -> list[Tensor]:
        """The loss as each rank has it."""
        return [rank.loss() for rank in self.ranks]

    def grads(self) -> dict[str, Tensor]:
        """Full gradients by parameter name, after `step`."""
        return {
            name: self._join(name, lambda rank, o=outer: rank.executor.outer[o])
            for name, outer in self.ranks[0].program.grads.items()
        }

    def params(self) -> dict[str, Tensor]:
        """Full parameters by name: the optimizer's copy where there is one."""
        return {name: self._join(name, lambda rank, n=name: rank.held(n)[0]) for name in self.stage.params}

    def stored_params(self, rank: int) -> dict[str, Tensor]:
        """The shards a rank computes with."""
        tensors = self.ranks[rank].tensors
        return {name: tensors[f"param:{name}"] for name in self.stage.params}

    def _join(self, name: str, local: Any) -> Tensor:
        by_coordinates = {rank.executor.coordinates: rank for rank in self.ranks}
        layout = self.ranks[0].held(name)[1]
        return join(layout, self.mesh.shape, lambda coords: local(by_coordinates[coords])).clone()

    def entries(self, rank: int) -> list[Entry]:
        """What a rank did since the step began."""
        return self.ranks[rank].executor.entries

    def peak_bytes(self, rank: int) -> int:
        """The most bytes a rank held at once since the step began."""
        return self.ranks[rank].executor.ledger.peak_bytes

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch's, over the gradients of the last step."""
        shares = []
        for rank in self.ranks:
            grads = {name: rank.executor.outer[outer] for name, outer in rank.program.grads.items()}
            shares.append(norm_share(grads, rank.layouts, rank.executor.coordinates, norm_type))
        total = torch.stack(shares).max() if norm_type == float("inf") else torch.stack(shares).sum()
        norm = norm_of(total, norm_type)
        for rank in self.ranks:
            clip([rank.executor.outer[outer] for outer in rank.program.grads.values()], norm, max_norm)
        return norm

    def apply_optimizer(
        self, cls: type[torch.optim.Optimizer], *, groups: Sequence[Mapping[str, Any]] | None = None,
        params: GroupMaker | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Update with the last step's gradients (the optimizers are made on the first call), then finish the step."""
        if not self.optimizers:
            self.optimizers = [cls(param_groups(rank.params, groups, params), **options) for rank in self.ranks]
        for rank, optimizer in zip(self.ranks, self.optimizers, strict=True):
            rank.take_grads()
            with self.transport.tracker, self.transport.tracker.booking(rank.executor.ledger):
                optimizer.step()
            optimizer.zero_grad()
        step_together(self.transport, [rank.executor for rank in self.ranks], [rank.tail() for rank in self.ranks])
