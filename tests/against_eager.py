"""Any model under several plans, run in this process, against the user's eager model in float64: loss, gradients,
parameters and buffers of every step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.capture.precision import default_dtype
from paraplan.codegen import build_modules
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer

LossFn = Callable[[object, dict[str, Tensor]], Tensor]
LossOf = Callable[[nn.Module, dict[str, Tensor]], Tensor]
PINS: dict[str, dict[str, int]] = {"one": {}, "dp": {"dp": 2, "zero": 3}, "tp": {"tp": 2}, "pp": {"pp": 2}}
SGD = {"lr": 0.05, "momentum": 0.9}


def doubled(x: Tensor) -> Tensor:
    """In float64 or complex128."""
    return x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x.clone()


def loss_by(loss_fn: LossFn | None) -> LossOf:
    """The loss of a model whose forward takes some of the batch, and whose output `loss_fn` takes."""

    def loss_of(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
        taken = inspect.signature(model.forward).parameters
        found = model(**{name: x for name, x in given.items() if name in taken})
        return found if loss_fn is None else loss_fn(found, given)  # type: ignore[no-any-return]

    return loss_of


def eager_steps(
    model: nn.Module, batch: Mapping[str, Tensor], loss_of: LossOf, steps: int
) -> Iterator[dict[str, Tensor | None]]:
    """Per step: "loss", "grad <name>", "param <name>" after the update and "buffer <name>"."""
    with default_dtype(torch.float64):
        own = copy.deepcopy(model)
        for tensor in (*own.parameters(), *own.buffers()):
            tensor.data = doubled(tensor.data)
        given = {name: doubled(x) for name, x in batch.items()}
        optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], **SGD)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(own, given)
            loss.backward()  # type: ignore[no-untyped-call]
            found = {f"grad {name}": None if p.grad is None else p.grad.clone() for name, p in own.named_parameters()}
            optimizer.step()
            found |= {f"param {name}": p.detach().clone() for name, p in own.named_parameters()}
            found |= {f"buffer {name}": x.detach().clone() for name, x in own.named_buffers()}
            yield {"loss": loss.detach(), **found}


def plan_steps(plan: Plan, model: nn.Module, batch: Mapping[str, Tensor], steps: int) -> Iterator[dict[str, Tensor]]:
    """The same of a plan; every rank must have the same loss and the same whole parameters and buffers, and entries
    must be those predicted."""
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(program) for program in programs], model)
    for _ in range(steps):
        found = {"loss": trainer.step(batch)} | {f"grad {name}": x for name, x in trainer.grads().items()}
        trainer.apply_optimizer(torch.optim.SGD, **SGD)
        found |= {f"param {name}": x for name, x in trainer.params().items()}
        found |= {f"buffer {name}": x for name, x in trainer.buffers().items()}
        for rank, loss in enumerate(trainer.losses()):
            torch.testing.assert_close(loss, found["loss"], rtol=1e-9, atol=0.0)
            own = {f"param {name}": x for name, x in trainer.stored_params(rank).items()}
            own |= {f"buffer {name}": x for name, x in trainer.buffers(rank).items()}
            for name, x in own.items():
                if name in found and x.shape == found[name].shape:
                    torch.testing.assert_close(
                        x, found[name], rtol=1e-9, atol=1e-12, equal_nan=True, msg=f"{name} of rank {rank}"
                    )
        yield {name: x.clone() for name, x in found.items()}
    for rank, index in enumerate(plan.schedule.rank_class):
        assert [each.key for each in trainer.entries(rank)] == [each.key for each in entries(programs[index])]


def _plain(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def error_of(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor | None], program: Program) -> tuple[float, str]:
    """The worst relative error, and of what; what is not there counts as infinitely wrong unless nothing is wanted."""
    floor = 1e-6 * max(float(_plain(x).abs().max()) for x in wanted.values() if x is not None and x.numel())
    worst = (0.0, "")
    for name, value in wanted.items():
        own = name.split(" ")[-1]
        unread = own not in program.params and own not in program.buffers and name != "loss"
        if value is None or unread or not value.numel():
            continue
        top = max(float(_plain(value).abs().max()), floor)
        if name in found:
            error = float((_plain(found[name]) - _plain(value)).abs().max()) / top if top else 0.0
        else:  # a buffer that no step writes, a parameter no segment reads
            error = float("inf") if name.startswith("grad") and bool(value.any()) else 0.0
        worst = max(worst, (error if error == error else float("inf"), name))
    return worst


def worst_error(
    plan: Plan, model: nn.Module, batch: Mapping[str, Tensor], wanted: Sequence[Mapping[str, Tensor | None]]
) -> tuple[float, str]:
    """As `error_of`, of the worst step."""
    given = {name: doubled(x) for name, x in batch.items()}
    steps = plan_steps(plan, model, given, len(wanted))
    return max(error_of(found, each, plan.program) for found, each in zip(steps, wanted, strict=True))


def eager_error(plan: Plan, model: nn.Module, batch: Mapping[str, Tensor], loss_of: LossOf, steps: int = 3) -> float:
    """The worst error of a plan's steps."""
    return worst_error(plan, model, batch, list(eager_steps(model, batch, loss_of, steps)))[0]


def plans_of(program: Program, random: int = 2, pins: Mapping[str, Mapping[str, int]] = PINS) -> Iterator[Plan]:
    """Pinned plans and random ones; pipelines only where the model has two segments."""

    def job(ranks: int) -> Job:
        return Job(program, ClusterSpec.local(ranks), OPTIMIZERS["momentum"], ModelRef(display="model"), {})

    for name, pinned in pins.items():
        if name != "pp" or len(program.segments) > 1:
            yield search(job(2 if pinned else 1), Constraints(**pinned), certify=False).plan  # type: ignore[arg-type]
    for seed in range(random):
        yield random_plan(job(2 + 2 * (seed % 2)), seed=seed)


def assert_trains_as_eager(
    model: nn.Module,
    batch: dict[str, Tensor],
    loss_fn: LossFn | None = None,
    steps: int = 3,
    without: tuple[str, ...] = (),
    tolerance: float = 1e-9,
) -> Program:
    """Captured in float64 and run under the plans of `plans_of`, a model does what it does in eager.

    Args:
        without: plans of `PINS` that are refused by name.
    """
    program = capture(model, batch, loss_fn=loss_fn, precision="fp64")
    wanted = list(eager_steps(model, batch, loss_by(loss_fn), steps))
    for plan in plans_of(program, pins={name: pins for name, pins in PINS.items() if name not in without}):
        error, where = worst_error(plan, model, batch, wanted)
        assert error <= tolerance, (where, error, plan.stages[0].mesh.shape)
    for name in without:
        try:
            list(plans_of(program, 0, {name: PINS[name]}))
        except ConstraintError:
            continue
        raise AssertionError(f"{name} is planned")
    return program
