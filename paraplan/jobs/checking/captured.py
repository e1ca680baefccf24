"""The captured program trained on one device, by torch's own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paraplan.capture.reference import StepResult, run_step
from paraplan.ir.model.program import Program, master_dtype, trained_params
from paraplan.ir.model.seeds import segment_seed
from paraplan.ir.plan import Plan
from paraplan.runtime.state.params import full_tensors

Tensors = Mapping[str, Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class StepOutcome(NamedTuple):
    """What a step gave: its loss, gradients (of a name None: none), and all buffers after it; None: not looked at."""

    loss: float
    grads: Mapping[str, Tensor | None] | None
    buffers: Tensors | None


def run_program_on(
    program: Program, params: Tensors, buffers: Tensors, batch: Tensors, seeds: Sequence[int], scale: float = 1.0
) -> StepResult:
    """One step of a program of a batch in any dtypes.

    Args:
        program: that runs.
        params, buffers: whole, by name.
        batch: by name; each is cast to what the program says of it.
        seeds: of its random ops.
        scale: what the loss is multiplied by for its gradients.
    """
    cast = {name: batch[name].to(getattr(torch, entry.spec.dtype)) for name, entry in program.batch.items()}
    return run_step(program, params, buffers, cast, [torch.tensor(seed) for seed in seeds], scale)


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Further names of buffers that have several: to the first."""
    first: dict[int, str] = {}
    named = list(model.named_buffers(remove_duplicate=False))
    return {name: own for name, x in named if (own := first.setdefault(id(x), name)) != name}


def with_aliases(buffers: Tensors, aliases: dict[str, str]) -> dict[str, Tensor]:
    """Buffers under all of their names."""
    return {**buffers, **{name: buffers[own] for name, own in aliases.items() if own in buffers}}


def overflows(program: Program, grads: Mapping[str, Tensor | None]) -> bool:
    """Whether a scaler skips the update with these gradients, being too large for fp16."""
    return program.precision == "fp16" and not all(x is None or bool(x.isfinite().all()) for x in grads.values())


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
            name: full[f"buffer:{name}"].to("cpu", getattr(torch, spec.dtype), copy=True)
            for name, spec in program.buffers.items()
        }
        self.trained = trained_params(program)
        self.optimizer = optimizer([self.masters[name] for name in self.trained])  # type: ignore[misc]
        self.scaler = torch.amp.GradScaler("cpu", enabled=program.precision == "fp16")
        self.may_be_late = tuple(
            name for name in self.trained if any(plan.is_late(x.params[name]) for x in plan.stages if name in x.params)
        )
        self.aliases = aliases_of(model)
        self.held: dict[str, Tensor] = {}
        self.done = 0

    def seeds(self) -> list[int]:
        """Of the segments, in the next step."""
        return [segment_seed(self.seed, self.done, index) for index in range(self.program.num_seeds)]

    def taken(self, batch: Tensors, program: Program, seeds: Sequence[int], scale: float = 1.0) -> StepResult:
        """A forward and backward from where it is, of this program or one with other draws; nothing is updated.

        Args:
            batch: of the step, by name.
            program: this one, or one with other draws.
            seeds: of its random ops.
            scale: what the loss is multiplied by for its gradients.
        """
        params = {
            name: x.detach().to(getattr(torch, program.params[name].spec.dtype)) for name, x in self.masters.items()
        }
        return run_program_on(program, params, self.buffers, batch, seeds, scale)

    def outcome(self, batch: Tensors, program: Program, seeds: Sequence[int]) -> StepOutcome:
        """What such a step gives, every buffer under all of its names.

        Args:
            batch, program, seeds: as of `taken`.
        """
        step = self.taken(batch, program, seeds)
        return StepOutcome(float(step.loss), step.grads, with_aliases({**self.buffers, **step.buffers}, self.aliases))

    def late(self) -> tuple[str, ...]:
        """What this step's gradients update one step late, as the plan's does (`lowering.steps.delayed_update`)."""
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
        scale = float(self.scaler.scale(torch.ones(())))
        loss, grads, written = self.taken(batch, self.program, self.seeds(), scale)
        self.buffers |= written
        found = {name: _present(grads[name]).to(self.masters[name].dtype) / scale for name in self.trained}
        given = found if update_with is None else update_with
        for name in self.trained:  # what overflows, and so is skipped, is told by the gradients that are updated with
            self.masters[name].grad = given[name].to(self.masters[name].dtype) * scale
        self.scaler.unscale_(self.optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_([self.masters[name] for name in self.trained], clip)
        late = self.late()
        held = {name: _present(self.masters[name].grad) for name in late}
        skips = overflows(self.program, given)
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
