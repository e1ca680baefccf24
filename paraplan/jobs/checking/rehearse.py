"""A plan's steps in this process, on the CPU, all ranks of it, held against one device: a check without a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from paraplan.capture.cutting.outputs import LossChoice
from paraplan.codegen import build_modules
from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.plan import Plan
from paraplan.jobs.checking.check import LargestErrors, SingleDevice
from paraplan.jobs.models import Made
from paraplan.jobs.optimizers import OPTIMIZER_CLASSES
from paraplan.jobs.trainers import check_model
from paraplan.runtime.in_process import InProcessTrainer

_RATE = 1e-3


def rehearse(
    plan: Plan,
    programs: Sequence[RankProgram],
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    loss_fn: Callable[..., Any] | None,
    loss: LossChoice,
    seed: int,
) -> LargestErrors:
    """A step for every batch, each compared.

    Args:
        plan, programs: verified.
        model: with values on cpu; not modified.
        batches: global batches by name, arguments that are no tensors included.
        loss_fn, loss: as the model was compiled with.
        seed: of dropout.
    Raises:
        CheckError: a step is not what it should be.
        ConstraintError: `batches` is no list of batches.
        PlanMismatchError: another model, or a batch that is not one for the plan.
    """
    _check_batches(batches)
    check_model(plan, model)
    programs = [_anywhere(program) for program in programs]
    trainer = InProcessTrainer(plan, programs, [build_modules(program) for program in programs], model, seed)
    trainer.record = False
    cls, extra = OPTIMIZER_CLASSES[plan.optimizer.name]

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return cls(params, lr=_RATE, **extra)  # type: ignore[call-arg]

    single = SingleDevice(plan, Made(model, dict(batches[0]), loss_fn), optimizer, seed, loss)
    scaler = trainer.scaler() if plan.program.precision == "fp16" else None
    for batch in batches:
        tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
        value = float(trainer.step(tensors))
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        grads = {name: grad / scale for name, grad in trainer.grads().items()}
        trainer.apply_optimizer(cls, scaler=scaler, lr=_RATE, **extra)
        state = {**trainer.params(), **trainer.buffers()}
        single.compare(tensors, None, value, grads, state, state)
        single.errors.raise_failure()
    return single.errors


def _anywhere(program: RankProgram) -> RankProgram:
    """The program on reference kernels: those of GPUs run nowhere else."""
    blocks = {
        name: msgspec.structs.replace(block, instrs=tuple(msgspec.structs.replace(i, kernel="") for i in block.instrs))
        for name, block in program.blocks.items()
    }
    return msgspec.structs.replace(program, blocks=blocks)


def _check_batches(batches: object) -> None:
    if not isinstance(batches, Sequence) or not batches or not all(isinstance(each, Mapping) for each in batches):
        what = "one batch" if isinstance(batches, Mapping) else "empty" if batches == [] else type(batches).__name__
        if isinstance(batches, Sequence) and batches:
            what = f"a {what} of {type(batches[0]).__name__}"
        raise ConstraintError(
            f"batches is {what}: give a list of global batches, each a mapping from input name to tensor ([batch])"
        )
