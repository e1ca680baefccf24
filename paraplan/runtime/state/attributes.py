"""What a plan's steps read of the caller's own model: attributes that are inputs, and those that must not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from paraplan.capture.hooks import hook_of, refuse_hooks
from paraplan.capture.python_state.dynamic import attribute_now, with_attributes
from paraplan.capture.python_state.reading import Reads
from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.plan import Plan
from paraplan.runtime.batch import ShardedBatch
from paraplan.runtime.state.captured_settings import Settings


class Attributes:
    """Those of one model under one plan.

    Args:
        plan: says which are inputs.
        model: held only where some are, so that its tensors can be given up otherwise.
        reads: what was read while capturing, where that was in this process.
    Raises:
        CaptureError: the model has hooks on gradients, which no captured step runs.
    """

    def __init__(self, plan: Plan, model: nn.Module, reads: Reads | None = None) -> None:
        refuse_hooks(model)
        self.program = plan.program
        self.declared = {name: entry for name, entry in self.program.batch.items() if entry.attribute}
        self._model: Callable[[], nn.Module | None] = (lambda: model) if self.declared else weakref.ref(model)
        self._settings = Settings(model, self.program, reads, "plan again with the model as it is to train")
        self._params = [(name, weakref.ref(param)) for name, param in model.named_parameters()]

    def check(self, evaluating: bool = False) -> None:
        """Refuse a model whose constants were changed; modes do not matter to an evaluation.

        Raises:
            PlanMismatchError: names what was changed, from what to what.
        """
        self._settings.check(evaluating)
        for name, reference in () if evaluating else self._params:
            param = reference()
            if param is not None and (hook := hook_of(param)):
                raise PlanMismatchError(
                    f"parameter {name!r} has a hook on its gradient ({hook}), which a captured step does not run; "
                    "remove it, and write what it does to the gradient as a torch.autograd.Function"
                )

    def holds(self) -> bool:
        """Whether the model's constants are those of the plan."""
        try:
            self._settings.check()
        except PlanMismatchError:
            return False
        return True

    def fill(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A global batch with the attributes that are inputs, as they are now."""
        return with_attributes(self.program, self._model(), batch)

    def refill(self, batch: ShardedBatch) -> ShardedBatch:
        """A rank's part of a batch likewise, whenever it was cut."""
        if not any(name in batch for name in self.declared):
            return batch
        found = ShardedBatch(batch)
        for name, entry in self.declared.items():
            if name in batch:
                held = batch[name]
                value = attribute_now(self._model(), entry.attribute, entry.spec)
                found[name] = torch.stack([value] * len(held)).to(held.dtype)
        return found
