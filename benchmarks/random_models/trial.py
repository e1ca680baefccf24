"""A random model under its plans, every step held against the model trained by torch alone."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.random_models.eager import LR, MOMENTUM, EagerModel, lifted
from benchmarks.random_models.plans import Make, job_of, plans
from benchmarks.random_models.recipe import Built
from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import CaptureError, ConstraintError, NoPlanError, PlanMismatchError, UnsupportedOpError
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Plan
from paraplan.jobs.checking.check import Captured, max_error, relative
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.sampling import random_plan
from paraplan.runtime.in_process import InProcessTrainer

STEPS, TOLERANCE, PEAK_RATIO = 3, 1e-9, 1.02
RIGHT, REFUSED, WRONG, RAW = "right", "refused", "wrong", "raw"
OUTCOMES = (RIGHT, REFUSED, WRONG, RAW)

NAMED_REFUSALS = (CaptureError, UnsupportedOpError, ConstraintError, NoPlanError, PlanMismatchError)
"""What says that a model or a choice is refused. The other errors of the tree name faults of files or of ours."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What became of a plan: one of `OUTCOMES`, and why it is not right."""

    plan: str
    what: str
    why: str = ""


@dataclass
class Reference:
    """Steps on one device: losses, gradients, and parameters and buffers after each."""

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)


def trained_eagerly(built: Built, noise: float = 0.0) -> Reference:
    """By torch alone; `noise` is what parameters and inputs are off by at first, relatively."""
    model, found = EagerModel(built), Reference()
    if noise:
        generator = torch.Generator().manual_seed(2)
        for x in (*model.model.parameters(), *(x for x in model.batch.values() if x.is_floating_point())):
            x.data.mul_(1 + noise * torch.randn(x.shape, generator=generator, dtype=torch.float64))
    for _ in range(STEPS):
        loss, grads = model.step()
        found.losses.append(loss)
        found.grads.append(grads)
        found.params.append(model.params())
        found.buffers.append(model.buffers())
    return found


def is_steady(built: Built) -> bool:
    """Whether rounding stays rounding: no overflow, no tie that a last bit decides."""
    one, other = trained_eagerly(built), trained_eagerly(built, 1e-14)
    far = max(map(relative, other.losses, one.losses))
    far = max(
        far,
        *(
            _error(mine, theirs)
            for part in ("grads", "params", "buffers")
            for mine, theirs in zip(getattr(other, part), getattr(one, part), strict=True)
        ),
    )
    return far < TOLERANCE / 3 and all(abs(loss) < 1e4 for loss in one.losses)


def trained_as_captured(built: Built, program: Program) -> Reference:
    """By the captured program on one device, which draws the random numbers that plans draw."""
    device = Captured(
        random_plan(job_of(program, 1), 0), built.model, partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM), 0
    )
    found = Reference()
    for _ in range(STEPS):
        loss, grads = device.step(_lifted(built.batch), None)
        found.losses.append(loss)
        found.grads.append(grads)
        found.params.append({name: x.detach().clone() for name, x in device.masters.items()})
        found.buffers.append({name: x.clone() for name, x in device.buffers.items()})
    return found


def _lifted(batch: Tensors) -> dict[str, Tensor]:
    return {name: lifted(x) for name, x in batch.items()}


def captured(built: Built) -> Program:
    """Its program in float64."""
    return capture(
        built.model, dict(built.batch), loss_fn=built.loss_fn, precision="fp64", loss=built.choice, name="Model"
    )


def try_model(built: Built, seed: int, count: int, only: int | None = None) -> list[Outcome]:
    """Its plans, drawn from the seed, and what became of each, or of one."""
    try:
        program = captured(built)
    except Exception as fault:  # noqa: BLE001  (a finding like any other)
        return [Outcome("capture", *_told(fault))] * (count if only is None else 1)
    wanted = trained_as_captured(built, program) if built.is_random else trained_eagerly(built)
    drawn = list(plans(program, seed, count))
    return [try_plan(*each, built, wanted) for each in (drawn if only is None else drawn[only : only + 1])]


def try_plan(name: str, make: Make, built: Built, wanted: Reference) -> Outcome:
    """Make a plan and run it."""
    try:
        why = run(make(), built, wanted)
    except Exception as fault:  # noqa: BLE001
        return Outcome(name, *_told(fault))
    return Outcome(name, WRONG if why else RIGHT, why)


def _told(fault: Exception) -> tuple[str, str]:
    """An exception as an outcome."""
    if isinstance(fault, NAMED_REFUSALS):
        return REFUSED, f"{type(fault).__name__}: {fault}"
    where = traceback.extract_tb(fault.__traceback__)[-1]
    return RAW, f"{type(fault).__name__}: {fault} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"


def run(plan: Plan, built: Built, wanted: Reference) -> str:
    """What is wrong about a plan's steps; empty where nothing is."""
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(program) for program in programs], built.model)
    first = {name: lifted(x) for name, x in built.model.named_buffers()}
    unheld = {name: lifted(x.detach()) for name, x in built.model.named_parameters()}  # what no loss reads
    for step in range(STEPS):
        trainer.record = step == STEPS - 1
        loss = float(trainer.step(_lifted(built.batch)))
        faults = {f"loss of step {step}": relative(loss, wanted.losses[step])}
        faults[f"gradients of step {step}"] = _error(trainer.grads(), wanted.grads[step])
        trainer.apply_optimizer(torch.optim.SGD, lr=LR, momentum=MOMENTUM)
        faults[f"parameters after step {step}"] = _error(unheld | trainer.params(), wanted.params[step])
        for rank in range(len(trainer.ranks)):
            theirs = {name: x for name, x in wanted.buffers[step].items() if _speaks(trainer, rank, name)}
            held = {name: x for name, x in (first | trainer.buffers(rank)).items() if name in theirs}
            faults[f"buffers after step {step}"] = max(
                faults.get(f"buffers after step {step}", 0.0), _error(held, theirs)
            )
        wrong = [f"{what} off by {error:.1e}" for what, error in faults.items() if not error <= TOLERANCE]
        if wrong:
            return ", ".join(wrong)
    return _misaccounted(plan, programs, trainer)


def _speaks(trainer: InProcessTrainer, rank: int, name: str) -> bool:
    """Whether a rank holds the buffer, or nobody does."""
    holders = [name in each.buffers() for each in trainer.ranks]
    return holders[rank] or not any(holders)


def _error(found: Tensors, wanted: Tensors) -> float:
    """The worst error of all tensors; what is missing on either side counts as zeros."""
    every = {**wanted, **found}
    sides = ({name: side.get(name, torch.zeros_like(x)) for name, x in every.items()} for side in (found, wanted))
    parts = [{name: torch.view_as_real(x) if x.is_complex() else x for name, x in side.items()} for side in sides]
    exact = [name for name, x in parts[1].items() if not x.is_floating_point()]
    if any(not torch.equal(parts[0][name].to(parts[1][name].dtype), parts[1][name]) for name in exact):
        return float("inf")
    return max_error(*({name: x for name, x in part.items() if name not in exact} for part in parts))[0]


def _misaccounted(plan: Plan, programs: Any, trainer: InProcessTrainer) -> str:
    """Where the recorded step is not the predicted one."""
    traces = simulate_plan(plan, programs).traces
    predicted = [[entry.key for entry in entries(program)] for program in programs]
    for rank, index in enumerate(plan.schedule.rank_class):
        if [entry.key for entry in trainer.entries(rank)] != predicted[index]:
            return f"entries of rank {rank} differ"
        pairs = [(traces[index].peak_bytes, trainer.peak_bytes(rank))]
        pairs += [(traces[index].tier_peak_bytes[tier], size) for tier, size in trainer.tier_peak_bytes(rank).items()]
        for simulated, measured in pairs:
            if not measured <= simulated <= PEAK_RATIO * measured:
                return f"peak of rank {rank}: simulated {simulated}, measured {measured}"
    return ""
