"""The single-device check: the same steps of the captured program and of the user's eager model.

The measure is that of `differences`, the eager model's part in `against_eager`. Held against both are the loss, every
gradient, every parameter after the update and every buffer, whether or not the program writes it.

A step is two functions, and each is held against one device on its own: the gradients at the parameters, and the
parameters and optimizer states after the gradients. The single device has parameters and states of its own, which it
updates with the gradients of the run. Updated with its own it would tell of the optimizer as well: Adam divides a
gradient by its size, so that a parameter whose true gradient is nothing (a key's bias: softmax does not see it) moves
by the rate times rounding noise over rounding noise. Errors above the bound still fail: a wrong gradient in the step it
is made in, a wrong or lost update in every step after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from paraplan.capture.cutting.outputs import LossChoice
from paraplan.capture.hooks import refuse_hooks
from paraplan.ir.errors import CheckError
from paraplan.ir.model.program import Program, master_dtype
from paraplan.ir.plan import Plan
from paraplan.jobs.checking.against_eager import CAPTURED, ROUNDING, AgainstEager, Fault, Verdict
from paraplan.jobs.checking.captured import Captured, MakeOptimizer, StepOutcome, Tensors, overflows, with_aliases
from paraplan.jobs.checking.differences import Difference, differences, floor_of, max_error, relative
from paraplan.jobs.checking.eager import ModelCall, Taken
from paraplan.jobs.checking.random_replay import repeated
from paraplan.jobs.models import Made
from paraplan.runtime.ragged import RowPadding

__all__ = ["Captured", "LargestErrors", "SingleDevice", "max_error", "relative"]

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 1e-1, "fp16": 5e-2, "fp8": 3e-1}
"""Largest errors of loss and tensors against the captured program, beside `ROUNDING` times those of the eager model;
below fp64 they are noise of summing in another order."""

UPDATED = {"fp64": 1e-9}
"""Largest errors of parameters after an update with the same gradients; `UPDATED_NARROW` below fp64."""
UPDATED_NARROW = 1e-5


@dataclass
class LargestErrors:
    """The largest errors seen so far.

    Attributes:
        loss, grad: against the captured program on one device.
        param: likewise, after updates with the same gradients; written buffers count as parameters.
        eager: of loss, gradients, buffers and updated parameters against the user's eager model.
        how: how the eager model was compared.
        worst: the tensor with the largest gradient or parameter error.
        failure: what is beyond its limit, and what to do; "" where nothing is.
    """

    loss: float = 0.0
    grad: float = 0.0
    param: float = 0.0
    eager: float = 0.0
    how: str = ""
    worst: str = ""
    failure: str = ""

    def raise_failure(self) -> None:
        """Raises where something is beyond its limit.

        Raises:
            CheckError: says what.
        """
        if self.failure:
            raise CheckError(f"check failed: {self.failure}")


class _Updates:
    """The eager model's parameters under torch's own optimizer, given the gradients of the run."""

    def __init__(self, against: AgainstEager, captured: Captured, optimizer: MakeOptimizer) -> None:
        self._captured, program = captured, captured.program
        self.params = {}
        for name, param in against.own.params.items():
            dtype = program.params[name].spec.dtype
            if name in captured.trained:
                dtype = master_dtype(program.precision, dtype)
            self.params[name] = nn.Parameter(param.detach().to(getattr(torch, dtype), copy=True), param.requires_grad)
        self._trained = against.own.trained
        self._optimizer = optimizer([self.params[name] for name in self._trained])
        self._held: dict[str, Tensor] = {}

    def step(self, taken: Taken, grads: Tensors, clip: float | None) -> dict[str, Tensor]:
        """The parameters after an update, from where the captured program's are before it."""
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(self._captured.masters[name])
                param.copy_(taken.params.get(name, param))
        for name in self._trained:
            own = taken.grads[name]
            given = None if own is None else grads.get(name, own)
            self.params[name].grad = None if given is None else given.to(self.params[name].dtype, copy=True)
        present = {name: self.params[name].grad for name in self._trained}
        skips = overflows(self._captured.program, present)
        if clip is not None:
            nn.utils.clip_grad_norm_([self.params[name] for name in self._trained], clip)
        held = {name: grad for name in self._captured.late() if (grad := self.params[name].grad) is not None}
        for name in held:
            self.params[name].grad = None
        if not skips:
            self._optimizer.step()
        if self._held:
            for name in self._trained:
                self.params[name].grad = self._held.get(name)
            self._optimizer.step()
        self._held = {} if skips else held
        return {name: param.detach() for name, param in self.params.items()}


class SingleDevice:
    """Both references side by side, and the errors against them.

    Args:
        plan, made, seed: of the run.
        optimizer: makes the run's optimizer from parameters.
        choice: which of the model's losses are trained on; where left out, those of the program.
    """

    def __init__(self, plan: Plan, made: Made, optimizer: MakeOptimizer, seed: int, choice: LossChoice = None) -> None:
        refuse_hooks(made.model)  # copies of it have none
        self.program, self.errors, self._step = plan.program, LargestErrors(), 0
        self.captured, self._padding = Captured(plan, made.model, optimizer, seed), RowPadding(plan)
        self.eager = AgainstEager(ModelCall.of(made, plan.program, choice), plan.program, plan.reduce_dtype)
        self._limit = max(TOLERANCE[each] for each in (plan.program.precision, plan.reduce_dtype) if each)
        self._updates = _Updates(self.eager, self.captured, optimizer)
        self.errors.failure = shared_numbers(plan.program)

    def compare(
        self,
        batch: Tensors,
        clip: float | None,
        loss: float,
        grads: Tensors,
        params: Tensors | None,
        buffers: Tensors | None = None,
    ) -> None:
        """Take the same step and note the errors.

        Args:
            batch: the global batch; one of fewer rows is padded as the plan's run pads it, but for an eager model that
                draws no random numbers, which is held to the rows alone.
            clip: of the gradient norm.
            loss, grads: of the plan's run, gradients whole and before clipping.
            params: after the update, whole; None where they are not looked at.
            buffers: likewise, after the step; those left out are taken to be as they were.
        """
        captured, before = self.captured, dict(self.captured.buffers)
        rows, batch = batch, self._padding.pad(batch)
        if self.eager.num_draws:
            rows = batch
        held = None if buffers is None else with_aliases({**before, **_named(buffers, before)}, captured.aliases)
        seeds = captured.seeds()
        overflown = overflows(self.program, grads)
        found = StepOutcome(loss, None if overflown else grads, held)
        verdict = self.eager.compare(rows, captured.masters, before, seeds, found, partial(captured.outcome, batch))
        rereads = self.eager.rereads(rows, captured.masters, before, seeds)
        taken = self.eager.last
        updated = None if params is None or taken is None else self._updates.step(taken, grads, clip)
        kept = {name: x.detach().clone() for name, x in captured.masters.items()} if updated is not None else {}
        wanted_loss, wanted = captured.step(batch, clip, update_with=grads)
        faults = self._against_captured(loss, found.grads, params, buffers, wanted_loss, wanted, before)
        if overflown:
            verdict.how += f", gradients of step {self._step} left out: they overflow, so its update is skipped"
        if math.isnan(loss):
            verdict.how += f", where the loss of step {self._step} is nan and little is compared"
        self._note(faults, verdict, rereads)
        if updated is not None and params is not None:
            self._note_updates(differences({**kept, **_named(params, kept)}, updated, dtypes=True))
        self._step += 1

    def _against_captured(
        self,
        loss: float,
        grads: Mapping[str, Tensor | None] | None,
        params: Tensors | None,
        buffers: Tensors | None,
        wanted_loss: float,
        wanted: Tensors,
        before: Tensors,
    ) -> list[Fault]:
        captured, errors, noise = self.captured, self.errors, self.eager.noise
        floor = floor_of(self.program.precision)
        limit, updated = self._limit, UPDATED.get(self.program.precision, UPDATED_NARROW)
        off = Difference("", relative(loss, wanted_loss), f"{loss:.9g}", f"{wanted_loss:.9g}")
        faults = [Fault("loss", off, limit)]
        errors.loss = max(errors.loss, off.error)
        masters = {name: captured.masters[name] for name in captured.trained}
        for kind, what, found, right in (
            ("grad", "gradient of", grads, wanted),
            ("param", "parameter", params, masters),
            ("param", "buffer", buffers, captured.buffers),
        ):
            if found is None:
                continue
            there = {name: found.get(name, before.get(name)) for name in right}
            for name, each in differences(there, right, floor, dtypes=what != "gradient of").items():
                most = updated if what == "parameter" else limit + ROUNDING * noise.get(f"{what} {name}", 0.0)
                faults.append(Fault(what, each, most))
                if each.error > max(errors.grad, errors.param):
                    errors.worst = f"{what} {name}"
                setattr(errors, kind, max(getattr(errors, kind), each.error))
        return faults

    def _note(self, faults: list[Fault], verdict: Verdict, rereads: str) -> None:
        errors = self.errors
        errors.eager = max(errors.eager, float("inf") if verdict.cannot else verdict.error)
        errors.how = verdict.how or errors.how
        worst = max(faults, key=lambda fault: fault.ratio)
        if errors.failure:
            return
        if not worst.ratio <= 1:
            errors.failure = said(worst, self._step, CAPTURED, _PLAN_DIFFERS)
        elif not verdict.holds:
            errors.failure = eager_failure(verdict, self._step, rereads)
        elif rereads:
            errors.failure = f"step {self._step}: {rereads}"

    def _note_updates(self, found: dict[str, Difference]) -> None:
        limit = UPDATED.get(self.program.precision, UPDATED_NARROW)
        worst = max((Fault("parameter", each, limit) for each in found.values()), key=lambda fault: fault.ratio)
        self.errors.eager = max(self.errors.eager, worst.difference.error)
        if not worst.ratio <= 1 and not self.errors.failure:
            against = "torch's optimizer on the eager model's parameters"
            self.errors.failure = said(worst, self._step, against, _PROGRAM_DIFFERS)


_PLAN_DIFFERS = (
    "The plan computes something else than the program it was made from: plan with fewer axes, microbatches or stages "
    "to see which of them does it, and report it with the plan's file"
)
_PROGRAM_DIFFERS = (
    "The captured step is not the model's: an edited plan, something that forward reads or changes and that is neither "
    "parameter, buffer nor input, or an op captured wrongly; plan again, and train the eager model until this check "
    "passes"
)


def said(fault: Fault, step: int, against: str, remedy: str) -> str:
    """A difference, in words: the step, the tensor, both values, the limit and what to do.

    Args:
        fault: the worst difference, and its limit.
        step: its number.
        against: what the step was held against, in words.
        remedy: what to do, the last sentence.
    """
    off = fault.difference
    what = f"{fault.what} {off.name!r}" if off.name else f"the {fault.what}"
    return (
        f"step {step}: {what} is {off.found} where {against} has {off.wanted}{f' {off.at}' if off.at else ''} "
        f"(error {off.error:.2e}, at most {fault.limit:.0e}). {remedy}"
    )


def eager_failure(verdict: Verdict, step: int, rereads: str = "") -> str:
    """Why a step is not the eager model's.

    Args:
        verdict: on a step, which failed.
        step: its number.
        rereads: what forward changed of its attributes and reads again, which explains a difference; "" for nothing.
    """
    if verdict.cannot:
        return f"step {step}: {verdict.cannot}, so the step cannot be held against it; make the model run on one device"
    assert verdict.worst is not None
    remedy = _PLAN_DIFFERS if verdict.against == CAPTURED else rereads or _PROGRAM_DIFFERS
    return said(verdict.worst, step, verdict.against, remedy)


def shared_numbers(program: Program) -> str:
    """Which draw of a program has another's numbers; "" where none has."""
    twice = repeated(program)
    if twice is None:
        return ""
    return (
        f"the random draw of {twice.rows} x {twice.columns} numbers of seed {twice.seed} has the numbers of "
        "another one; the program was edited: plan again"
    )


def _named(found: Tensors, names: Tensors) -> dict[str, Tensor]:
    return {name: found[name] for name in names if name in found}
