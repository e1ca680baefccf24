"""One model under several plans, one per shape of the batch: parameters, optimizer and seeds are shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.model.program import given_inputs
from paraplan.ir.plan import Plan
from paraplan.runtime.evaluate import Evaluation, Wanted
from paraplan.runtime.optimizers.optim import GroupMaker
from paraplan.runtime.optimizers.scaling import Scaler
from paraplan.runtime.trainer import Trainer


def check_buckets(plans: Sequence[Plan]) -> None:
    """Refuse plans that cannot share parameters.

    Raises:
        PlanMismatchError: another model, mesh or layout; or two plans of one shape.
    """
    first, seen = plans[0], [shapes_of(plan) for plan in plans]
    if any(len(plan.stages) > 1 for plan in plans):
        raise PlanMismatchError("plans of several stages cannot share a trainer; plan every shape with one stage")
    if any(plan.delayed_update is not None for plan in plans):
        raise PlanMismatchError(
            "plans with delayed_update cannot share a trainer: a gradient would wait for a step of another shape; plan "
            "every shape without it"
        )
    for plan, shapes in zip(plans[1:], seen[1:], strict=True):
        if plan.program.fingerprint != first.program.fingerprint or plan.stages[0].mesh != first.stages[0].mesh:
            raise PlanMismatchError(f"the plan for {shapes} is for another model or mesh than that for {seen[0]}")
        theirs, ours = plan.stages[0].params, first.stages[0].params
        other = next((name for name in ours if theirs.get(name) != ours[name]), "")
        if other or set(theirs) != set(ours):
            raise PlanMismatchError(
                f"the plan for {shapes} keeps {other or 'its parameters'} elsewhere than that for {seen[0]}: pin "
                "params={name: 'stored/grad/state'} to the first plan's, as Buckets.compile does"
            )
    keys = [(shapes, plan.program.settings) for shapes, plan in zip(seen, plans, strict=True)]
    if any(key in keys[:index] for index, key in enumerate(keys)):
        raise PlanMismatchError(f"two of the plans are for one shape of the batch: {seen}")


def shapes_of(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Shapes of what a plan's batch is given."""
    return {name: entry.spec.shape for name, entry in given_inputs(plan.program).items()}


class BucketTrainer:
    """This rank's trainers, one per shape, over one set of parameters.

    Args:
        trainers: made one after the other, each but the first with `share=` the first.
    """

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        check_buckets([trainer.plan for trainer in trainers])
        self.trainers = tuple(trainers)
        self.last = self.trainers[0]

    def pick(self, batch: Mapping[str, Tensor]) -> Trainer:
        """The trainer whose plan is for a batch's shape; one for more rows where none has as many.

        Raises:
            PlanMismatchError: no plan is for that shape.
        """
        given = {name: tuple(x.shape) for name, x in batch.items()}
        fitting = [trainer for trainer in self.trainers if shapes_of(trainer.plan) == given]
        fitting = fitting or [trainer for trainer in self.trainers if trainer.takes(batch)]
        if fitting:  # where no plan is for the model's attributes as they are, the first one's error says which
            return next((trainer for trainer in fitting if trainer.attributes.holds()), fitting[0])
        known = "; ".join(str(shapes_of(trainer.plan)) for trainer in self.trainers)
        raise PlanMismatchError(f"no plan is for a batch of {given}; there are plans for {known}")

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """`Trainer.step` under the plan for the batch's shape; takes whole global batches."""
        self.last = self.pick(batch)
        return self.last.step(batch)

    def eval_step(
        self, batch: Mapping[str, Tensor], outputs: Wanted = None, names: Sequence[str] | None = None
    ) -> Evaluation:
        """`Trainer.eval_step` likewise.

        Args:
            batch: of one of the shapes.
            outputs, names: as of `Trainer.eval_step`.
        """
        return self.pick(batch).eval_step(batch, outputs, names)

    def shard(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
        """The loader's global batches: `step` cuts each for its plan."""
        return iter(loader)

    def optimizer(
        self,
        cls: type[torch.optim.Optimizer],
        *,
        groups: Sequence[Mapping[str, Any]] | None = None,
        params: GroupMaker | None = None,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """`Trainer.optimizer` over the shared shards.

        Args:
            cls, groups, params, options: as of `Trainer.optimizer`.
        """
        made = self.trainers[0].optimizer(cls, groups=groups, params=params, after=self._finish, **options)
        for trainer in self.trainers[1:]:
            trainer.state.executor.update_with(self.trainers[0].state.executor.updater)
        return made

    def _finish(self) -> None:
        self.last.finish_update()

    def scaler(self, **options: Any) -> Scaler:
        """`Trainer.scaler` for all of them (the scale is shared)."""
        return self.trainers[0].scaler(**options)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`Trainer.clip_grad_norm_`."""
        return self.last.clip_grad_norm_(max_norm, norm_type)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.last.zero_grad()

    @property
    def metrics(self) -> Mapping[str, Tensor]:
        """`Trainer.metrics` of the last step."""
        return self.last.metrics

    @property
    def checkpoint(self) -> Trainer:
        """The trainer whose `state_dict` and like methods speak for all."""
        return self.trainers[0]
