"""The single-device check: the same steps of the captured program and of the user's eager model, and the measure.

Per tensor: max|a − b| / max(max|b|, 1e-6 · the largest max|b| among its peers), as docs/design.md section 10 has it.

A step is two functions, and each is held against one device on its own: the gradients at the parameters, and the
parameters and optimizer states after the gradients. The single device has parameters and states of its own, which it
updates with the gradients of the run. Updated with its own it would tell of the optimizer as well: Adam divides a
gradient by its size, so that a parameter whose true gradient is nothing (a key's bias: softmax does not see it) moves
by the rate times rounding noise over rounding noise. Nothing wrong is forgiven by this: a wrong gradient is a wrong
gradient in the step it is made in, and a wrong or lost update moves the run off the single device for good.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.plan import Plan
from paraplan.ir.program import HALVES, Program, master_dtype, trained_params
from paraplan.ir.seeds import segment_seed
from paraplan.ir.trace.fake import taken
from paraplan.ir.trace.reference import loss_shares, microbatches, run_step
from paraplan.jobs.models import Made
from paraplan.runtime.params import full_tensors

Tensors = Mapping[str, Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
"""What the eager model is compared in."""


@dataclass
class Errors:
    """The largest errors seen so far.

    Attributes:
        loss, grad: against the captured program on one device.
        param: likewise, after updates with the same gradients; written buffers count as parameters.
        eager: losses and gradients against the user's eager model; None where dropout makes the comparison
            meaningless.
        worst: the tensor with the largest gradient or parameter error.
    """

    loss: float = 0.0
    grad: float = 0.0
    param: float = 0.0
    eager: float | None = None
    worst: str = ""


def max_error(found: Tensors, wanted: Tensors) -> tuple[float, str]:
    """The largest error of any tensor, and its name; NaN counts as infinitely wrong.

    Args:
        found, wanted: tensors by name; each in `wanted` must be in `found`.
    """
    tops = {name: float(value.detach().abs().max()) if value.numel() else 0.0 for name, value in wanted.items()}
    floor = 1e-6 * max(tops.values(), default=0.0)
    worst, where = 0.0, ""
    for name, value in wanted.items():
        if not value.numel():
            continue
        off = float((found[name].detach().to(torch.float64) - value.detach().to(torch.float64)).abs().max())
        scale = max(tops[name], floor)
        error = 0.0 if off == 0 else (off / scale if scale and off == off else float("inf"))
        if error > worst:
            worst, where = error, name
    return worst, where


def relative(found: float, wanted: float) -> float:
    """|a − b| / |b|; infinite where either is no number."""
    if found == wanted:
        return 0.0
    error = abs(found - wanted) / max(abs(wanted), 1e-300)
    return error if error == error else float("inf")


class Captured:
    """The captured program on one device, trained by the same optimizer.

    Args:
        plan: its program is run.
        model: with values.
        optimizer: makes it from parameters.
        seed: of the run.
    """

    def __init__(self, plan: Plan, model: nn.Module, optimizer: MakeOptimizer, seed: int) -> None:
        self.plan, self.program, self.seed = plan, plan.program, seed
        full = full_tensors(plan.program, model)
        program = self.program
        self.masters: dict[str, nn.Parameter | Tensor] = {}
        trained = set(trained_params(program))
        for name, spec in program.params.items():
            dtype = master_dtype(program.precision, spec.spec.dtype) if name in trained else spec.spec.dtype
            value = full[f"param:{name}"].detach().to("cpu", getattr(torch, dtype)).clone()
            self.masters[name] = nn.Parameter(value) if name in trained else value
        self.buffers = {
            name: full[f"buffer:{name}"].to("cpu", getattr(torch, spec.dtype)) for name, spec in program.buffers.items()
        }
        self.trained = trained_params(program)
        self.optimizer = optimizer([self.masters[name] for name in self.trained])  # type: ignore[misc]
        self.scaler = torch.amp.GradScaler("cpu", enabled=program.precision == "fp16")
        self.may_be_late = tuple(
            name for name in self.trained if any(plan.is_late(x.params[name]) for x in plan.stages if name in x.params)
        )
        self.held: dict[str, Tensor] = {}
        self.done = 0

    def _late(self) -> tuple[str, ...]:
        """What this step's gradients update one step late, as the plan's does (`ir.lower.late`)."""
        after = self.plan.delayed_update
        return () if after is None or self.done < after else self.may_be_late

    def step(
        self, batch: Tensors, clip: float | None, update_with: Tensors | None = None
    ) -> tuple[float, dict[str, Tensor]]:
        """One training step, in which what is updated late is updated with the gradients of the step before.

        Args:
            batch: the global batch.
            clip: of the gradient norm.
            update_with: gradients to update with in place of its own, before clipping.
        Returns:
            The loss and its own gradients before clipping.
        """
        program = self.program
        params = {
            name: x.detach().to(getattr(torch, program.params[name].spec.dtype)) for name, x in self.masters.items()
        }
        count = program.apart * len(program.segments)
        seeds = [torch.tensor(segment_seed(self.seed, self.done, index)) for index in range(count)]
        cast = {name: batch[name].to(getattr(torch, entry.spec.dtype)) for name, entry in program.batch.items()}
        scale = float(self.scaler.scale(torch.ones(())))
        loss, grads, written = run_step(program, params, self.buffers, cast, seeds, scale)
        self.buffers |= written
        for name in self.trained:
            self.masters[name].grad = _present(grads[name]).to(self.masters[name].dtype).clone()
        self.scaler.unscale_(self.optimizer)
        found = {name: _present(self.masters[name].grad).clone() for name in self.trained}
        for name in self.trained if update_with is not None else ():
            _present(self.masters[name].grad).copy_(update_with[name])  # type: ignore[index]
        if clip is not None:
            nn.utils.clip_grad_norm_([self.masters[name] for name in self.trained], clip)
        late = self._late()
        held = {name: _present(self.masters[name].grad) for name in late}
        skips = program.precision == "fp16" and not all(bool(grad.isfinite().all()) for grad in found.values())
        for name in late:
            self.masters[name].grad = None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.held:
            for name, grad in self.held.items():
                self.masters[name].grad = grad
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.held = {} if skips else held
        self.done += 1
        return float(loss), found


def _present(grad: Tensor | None) -> Tensor:
    assert grad is not None, "a trained parameter has a gradient"
    return grad


class Eager:
    """The user's model on one device, by torch's autograd.

    Each step starts from the captured program's parameters: what is compared is the model's meaning, not how far an
    optimizer carries noise (Adam divides by it). The update itself is torch's own in every case.

    Args:
        made: the model and its loss.
        program: gives precision and names.
    """

    def __init__(self, made: Made, program: Program) -> None:
        self.program, self.loss_fn = program, made.loss_fn
        self.model = copy.deepcopy(made.model).to("cpu", _DTYPES[program.precision])
        named = dict(self.model.named_parameters(remove_duplicate=False))
        self.params = {name: named[name] for name in trained_params(program)}

    def step(self, batch: Tensors, params: Tensors) -> tuple[float, dict[str, Tensor]] | None:
        """The loss and the gradients at some parameters; None where microbatches are batches by themselves, and several
        losses count different numbers of labels in them."""
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(params[name])
                param.grad = None
        cast = {name: batch[name].to(getattr(torch, entry.spec.dtype)) for name, entry in self.program.batch.items()}
        total, shares = 0.0, loss_shares(self.program, cast)
        if shares is None:
            return None
        for part, share in zip(microbatches(self.program, cast), shares, strict=True):
            loss = self._loss(part) * share
            loss.backward()
            total += float(loss.detach())
        return total, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.params.items()}

    def _loss(self, batch: Tensors) -> Tensor:
        """The loss of a batch."""
        output: Any = self.model(**(batch if self.loss_fn is None else taken(self.model, batch)))
        if self.loss_fn is not None:
            return self.loss_fn(output, batch)
        return output if isinstance(output, Tensor) else output["loss"] if isinstance(output, dict) else output.loss


class SingleDevice:
    """Both references side by side, and the errors against them.

    Args:
        plan, made, seed: of the run.
        optimizer: makes the run's optimizer from parameters.
    """

    def __init__(self, plan: Plan, made: Made, optimizer: MakeOptimizer, seed: int) -> None:
        self.captured = Captured(plan, made.model, optimizer, seed)
        is_random = any(kind.seed is not None for kind in plan.program.kinds)
        self.eager = None if is_random or plan.program.precision in HALVES else Eager(made, plan.program)
        self.errors = Errors(eager=None if self.eager is None else 0.0)

    def compare(
        self, batch: Tensors, clip: float | None, loss: float, grads: Tensors, params: Tensors | None,
        buffers: Tensors | None = None,
    ) -> None:  # fmt: skip
        """Take the same step and note the errors.

        Args:
            batch: the global batch.
            clip: of the gradient norm.
            loss, grads: of the plan's run, gradients whole and before clipping.
            params: after the update, whole; None where they are not looked at.
            buffers: likewise, after the step; those the model writes are compared.
        """
        eager = None if self.eager is None else self.eager.step(batch, self.captured.masters)
        wanted_loss, wanted = self.captured.step(batch, clip, update_with=grads)
        errors = self.errors
        errors.loss = max(errors.loss, relative(loss, wanted_loss))
        self._note("grad", *max_error(grads, wanted), "gradient of")
        if params is not None:
            masters = {name: self.captured.masters[name] for name in self.captured.trained}
            self._note("param", *max_error(params, masters), "parameter")
        if buffers is not None:
            written = {name: self.captured.buffers[name] for name in self.captured.program.buffer_updates}
            self._note("param", *max_error(buffers, written), "buffer")
        if eager is not None:
            errors.eager = max(errors.eager or 0.0, relative(loss, eager[0]), max_error(grads, eager[1])[0])

    def _note(self, what: str, error: float, name: str, words: str) -> None:
        if error > max(self.errors.grad, self.errors.param):
            self.errors.worst = f"{words} {name}"
        setattr(self.errors, what, max(getattr(self.errors, what), error))
