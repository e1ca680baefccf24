"""Plans held against the user's own model in eager float64: losses, parameters and buffers of some steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from paraplan.codegen import build_modules
from paraplan.cost_models.memory import entries
from paraplan.ir.plan import Plan
from paraplan.ir.verify import verify_plan
from paraplan.jobs.check import max_error
from paraplan.runtime.local import InProcessTrainer

LR, STEPS = 0.1, 3
Batch = Mapping[str, Tensor]


def wide(batch: Batch) -> dict[str, Tensor]:
    """The batch in float64."""
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def eager_error(plan: Plan, model: nn.Module, batch: Batch, loss_of: Callable[[nn.Module, Batch], Tensor]) -> float:
    """The worst error over the steps of every rank's loss, parameters and buffers; entries must be those predicted."""
    programs = verify_plan(plan)
    trainer = InProcessTrainer(
        plan, programs, [build_modules(each) for each in programs], copy.deepcopy(model).double()
    )
    free = copy.deepcopy(model).double().train()
    optimizer = torch.optim.SGD([p for p in free.parameters() if p.requires_grad], lr=LR, momentum=0.9)
    worst = 0.0
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(free, wide(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        trainer.step(wide(batch))
        trainer.apply_optimizer(torch.optim.SGD, lr=LR, momentum=0.9)
        worst = max(worst, *(abs(float(mine - loss.detach())) / abs(float(loss.detach())) for mine in trainer.losses()))
    named = {name: param.detach() for name, param in free.named_parameters()}
    buffers = dict(free.named_buffers())
    worst = max(worst, _error(trainer.params(), named))
    for index, rank in enumerate(trainer.ranks):
        mine = trainer.stored_params(index)
        whole = {name: x for name, x in mine.items() if x.shape == named[name].shape}
        worst = max(worst, _error(whole, named), _error(rank.buffers(), buffers))
    expected = [[entry.key for entry in entries(each)] for each in programs]
    for index, at in enumerate(plan.schedule.rank_class):
        assert [entry.key for entry in trainer.entries(index)] == expected[at]
    return worst


def _error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    return max_error(dict(found), {name: wanted[name] for name in found})[0] if found else 0.0
