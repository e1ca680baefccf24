"""All ranks of a plan in this process: for tests, fuzzing and checks of a plan before it is given a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.entry import Entry
from paraplan.ir.execution.rank_program import RankProgram, Step
from paraplan.ir.machine.mesh import Layout
from paraplan.ir.machine.rank_groups import holdings
from paraplan.ir.model.sources import source_lines
from paraplan.ir.plan import Plan
from paraplan.runtime.evaluate import Build
from paraplan.runtime.executing.executor import Executor, Modules
from paraplan.runtime.executing.observers import Observer
from paraplan.runtime.executing.stepping import make_executors, step_together
from paraplan.runtime.optimizers.optim import GroupMaker
from paraplan.runtime.optimizers.scaling import Scaler
from paraplan.runtime.rank import Rank
from paraplan.runtime.state.attributes import Attributes
from paraplan.runtime.state.params import Dims, join
from paraplan.runtime.state.weights import values_of
from paraplan.runtime.trainer_core import BESIDE, TrainerCore
from paraplan.runtime.transport.transport import InProcessTransport


class InProcessTrainer(TrainerCore):
    """Trains a plan in one process, recording every step.

    Args:
        plan: the plan.
        programs: `lowering.lower(plan)`, per rank class.
        modules: per rank class, `codegen.build_modules(program, device=device)`.
        model: on cpu, with values; or on meta.
        seed: base of the random seeds.
        build: emits the modules of another program of this plan; `eval_step` needs it.
        weights: safetensors files with the parameters.
        device: of every rank, "cpu" or "cuda" (the current device, which all of them share).
    """

    transport: InProcessTransport

    def __init__(
        self,
        plan: Plan,
        programs: Sequence[RankProgram],
        modules: Sequence[Modules],
        model: nn.Module,
        seed: int = 0,
        build: Build | None = None,
        weights: str | Path | None = None,
        device: str = "cpu",
    ) -> None:
        transport, executors = make_executors(
            [holding.mesh for holding in holdings(plan)],
            programs,
            plan.schedule.rank_class,
            modules,
            source_lines(plan.program),
            device,
        )
        values = values_of(plan.program, model, weights, seed)
        ranks = [Rank(plan, executor, values, seed, device) for executor in executors]
        super().__init__(plan, transport, ranks, Attributes(plan, model, None), device, build, record=True)

    def _take(self, part: str, executors: Sequence[Executor], steps: Sequence[Sequence[Step]]) -> None:
        """All ranks in this thread, instruction by instruction."""
        is_noted = self.record and part != BESIDE
        step_together(self.transport, executors, steps, None if is_noted else Observer())

    def _whole(self, shape: Dims, layout: Layout, parts: Sequence[Tensor]) -> Tensor:
        places = [rank.executor.coordinates for rank in self.ranks]
        return join(shape, layout, self.held[0].mesh.shape, lambda at: parts[places.index(at)])

    def _grads(self, rank: Rank) -> Mapping[str, Tensor]:
        return rank.grads()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """One per rank, once they are made."""
        return [optimizer for rank in self.ranks for optimizer in rank.optimizers]

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

    def apply_optimizer(
        self,
        cls: type[torch.optim.Optimizer],
        *,
        groups: Sequence[Mapping[str, Any]] | None = None,
        params: GroupMaker | None = None,
        scaler: Scaler | None = None,
        **options: Any,
    ) -> None:
        """Update with the last step's gradients (the optimizers are made on the first call), then finish the step.

        With a scaler, an update that finds an infinite gradient is skipped.

        Args:
            cls: of the optimizers.
            groups, params: as of `Trainer.optimizer`.
            scaler: of the loss, under fp16.
            options: for cls.
        """
        if not self.optimizers:
            for rank in self.ranks:
                self._optimizer(rank, cls, groups, params, options, False)
        for rank in self.ranks:
            rank.take_grads()
        if scaler is not None:
            scaler.unscale_all(self.optimizers)
        stepped = [self._update(*pair, scaler) for pair in zip(self.ranks, self.optimizers, strict=True)]
        if scaler is not None:
            scaler.update()
        if all(stepped):
            self._finish_update()
        for rank in self.ranks:
            rank.drop_grads()

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
        rank.drop_grads(but=rank.staged if made else ())  # they are updated in what follows
        return bool(made)
