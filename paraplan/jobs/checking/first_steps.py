"""The first steps of a fitted model, held against its eager one before they are taken.

The planned step is taken aside, from the model's own parameters and buffers, and so is a step of a copy of the model
(twice below float64, see `against_eager`); then everything is put back: buffers, random generators, counts of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paraplan.ir.errors import CheckError
from paraplan.ir.model.program import Program
from paraplan.ir.model.seeds import segment_seed
from paraplan.jobs.checking.against_eager import AgainstEager
from paraplan.jobs.checking.captured import StepOutcome, aliases_of, run_program_on, with_aliases
from paraplan.jobs.checking.check import eager_failure, shared_numbers
from paraplan.jobs.checking.eager import ModelCall, generators_kept
from paraplan.runtime.fitted_step import FittedStep

Tensors = Mapping[str, Tensor]


class FirstSteps:
    """Checks so many steps.

    Args:
        call: how the user calls the model.
        count: of steps.
        tell: told how each came out.
    """

    def __init__(self, call: ModelCall, count: int, tell: Callable[[str], None]) -> None:
        self._call, self._left, self._done, self._tell = call, count, 0, tell

    def __call__(self, step: FittedStep, batch: Tensors) -> None:
        """Check a step that is about to be taken, if it is among the first.

        Raises:
            CheckError: it would not be that of the eager model.
        """
        if self._done >= self._left:
            return
        failure = shared_numbers(step.plan.program) or self._failure(step, batch)
        if failure:
            raise CheckError(f"check failed: {failure}")
        self._done += 1

    def _failure(self, step: FittedStep, batch: Tensors) -> str:
        program, model = step.plan.program, step.model
        params = {name: x.detach() for name, x in model.named_parameters(remove_duplicate=False)}
        buffers = {name: x.detach().clone() for name, x in model.named_buffers(remove_duplicate=False)}
        found, seeds = _taken_aside(step, batch)
        against = AgainstEager(self._call, program)

        def captured(other: Program, seeds: Sequence[int]) -> StepOutcome:
            taken = run_program_on(other, params, buffers, step.padding.pad(batch), seeds)
            after = with_aliases({**buffers, **taken.buffers}, aliases_of(model))
            return StepOutcome(float(taken.loss), taken.grads, after)

        verdict = against.compare(batch, params, buffers, seeds, found, captured)
        rereads = against.rereads(batch, params, buffers, seeds)
        if not verdict.holds:
            return eager_failure(verdict, self._done, rereads)
        if not rereads:
            how = f" ({verdict.how})" if verdict.how else ""
            self._tell(f"step {self._done} is the eager model's: largest error {verdict.error:.1e}{how}")
        return f"step {self._done}: {rereads}" if rereads else ""


def _taken_aside(step: FittedStep, batch: Tensors) -> tuple[StepOutcome, list[int]]:
    """What the planned step gives, and the seeds of its segments; nothing is changed by it."""
    program, done = step.plan.program, step.steps_done
    with generators_kept():
        base, at = step.draw()
    seeds = [segment_seed(base, at, index) for index in range(program.num_seeds)]
    named = dict(step.model.named_parameters())
    held = [(x, x.detach().clone()) for x in step.model.buffers()]
    try:
        with generators_kept(), torch.enable_grad():
            loss = step.loss(batch)
            wanted = [name for name in step.names if named[name].requires_grad]
            grads = torch.autograd.grad(loss, [named[name] for name in wanted], allow_unused=True)
        after = {name: x.detach().clone() for name, x in step.model.named_buffers(remove_duplicate=False)}
    finally:
        step.go_on_from(done, step.seed)
        with torch.no_grad():
            for x, before in held:
                x.copy_(before)
    return StepOutcome(float(loss.detach()), dict(zip(wanted, grads, strict=True)), after), seeds
