"""Any model under several plans, run in this process, against the user's eager model in float64: loss, gradients,
parameters and buffers of every step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paraplan.codegen import build_modules
from paraplan.cost_models.memory import entries
from paraplan.ir.cluster import ClusterSpec
from paraplan.ir.errors import ConstraintError
from paraplan.ir.plan import OPTIMIZERS, ModelRef, Plan
from paraplan.ir.program import Program
from paraplan.ir.trace import capture
from paraplan.ir.verify import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from paraplan.runtime.local import InProcessTrainer

LossFn = Callable[[object, dict[str, Tensor]], Tensor]
PINS: dict[str, dict[str, int]] = {"one": {}, "dp": {"dp": 2, "zero": 3}, "tp": {"tp": 2}, "pp": {"pp": 2}}
SGD = {"lr": 0.05, "momentum": 0.9}


def doubled(x: Tensor) -> Tensor:
    """In float64 or complex128."""
    return x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x.clone()


@contextmanager
def in_double() -> Iterator[None]:
    """Numbers and factories in float64."""
    saved = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(saved)


def eager_steps(
    model: nn.Module, batch: Mapping[str, Tensor], loss_fn: LossFn | None, steps: int
) -> Iterator[dict[str, Tensor | None]]:
    """Per step: "loss", "grad <name>", "param <name>" after the update and "buffer <name>"."""
    with in_double():
        own = copy.deepcopy(model)
        for tensor in (*own.parameters(), *own.buffers()):
            tensor.data = doubled(tensor.data)
        given = {name: doubled(x) for name, x in batch.items()}
        taken = inspect.signature(own.forward).parameters
        optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], **SGD)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = own(**{name: x for name, x in given.items() if name in taken})
            loss = loss if loss_fn is None else loss_fn(loss, given)
            loss.backward()
            found = {f"grad {name}": None if p.grad is None else p.grad.clone() for name, p in own.named_parameters()}
            optimizer.step()
            found |= {f"param {name}": p.detach().clone() for name, p in own.named_parameters()}
            found |= {f"buffer {name}": x.detach().clone() for name, x in own.named_buffers()}
            yield {"loss": loss.detach(), **found}


def plan_steps(plan: Plan, model: nn.Module, batch: Mapping[str, Tensor], steps: int) -> Iterator[dict[str, Tensor]]:
    """The same of a plan; entries must be those predicted."""
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(program) for program in programs], model)
    for _ in range(steps):
        found = {"loss": trainer.step(batch)} | {f"grad {name}": x for name, x in trainer.grads().items()}
        trainer.apply_optimizer(torch.optim.SGD, **SGD)
        found |= {f"param {name}": x for name, x in trainer.params().items()}
        found |= {f"buffer {name}": x for name, x in trainer.buffers().items()}
        yield {name: x.clone() for name, x in found.items()}
    for rank, index in enumerate(plan.schedule.rank_class):
        assert [each.key for each in trainer.entries(rank)] == [each.key for each in entries(programs[index])]


def error_of(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor | None], program: Program) -> tuple[float, str]:
    """The worst relative error, and of what; what is not there counts as infinitely wrong unless nothing is wanted."""
    floor = 1e-6 * max(float(x.abs().max()) for x in wanted.values() if x is not None and x.numel())
    worst = (0.0, "")
    for name, value in wanted.items():
        own = name.split(" ")[-1]
        unread = own not in program.params and own not in program.buffers and name != "loss"
        if value is None or unread or not value.numel():
            continue
        top = max(float(doubled(value).abs().max()), floor)
        if name in found:
            error = float((doubled(found[name]) - doubled(value)).abs().max()) / top if top else 0.0
        else:  # a buffer that no step writes, a parameter no segment reads
            error = float("inf") if name.startswith("grad") and bool(value.any()) else 0.0
        worst = max(worst, (error if error == error else float("inf"), name))
    return worst


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
    model: nn.Module, batch: dict[str, Tensor], loss_fn: LossFn | None = None, steps: int = 3,
    without: tuple[str, ...] = (), tolerance: float = 1e-9,
) -> Program:  # fmt: skip
    """Captured in float64 and run under the plans of `plans_of`, a model does what it does in eager.

    Args:
        without: plans of `PINS` that are refused by name.
    """
    program = capture(model, batch, loss_fn=loss_fn, precision="fp64")
    wanted = list(eager_steps(model, batch, loss_fn, steps))
    for plan in plans_of(program, pins={name: pins for name, pins in PINS.items() if name not in without}):
        for found, expected in zip(plan_steps(plan, model, batch, steps), wanted, strict=True):
            error, where = error_of(found, expected, program)
            assert error <= tolerance, (where, error, plan.stages[0].mesh.shape)
    for name in without:
        try:
            list(plans_of(program, 0, {name: PINS[name]}))
        except ConstraintError:
            continue
        raise AssertionError(f"{name} is planned")
    return program
