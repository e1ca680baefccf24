"""A model trained by torch alone in float64, as its user would: its own module, autograd and SGD."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.random_models.recipe import Built
from paraplan.capture.precision import default_dtype

LR, MOMENTUM = 0.05, 0.9
_LIFTED = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


class Lifted(TorchDispatchMode):
    """Every float dtype that an op is told is float64: what `precision="fp64"` makes of a model, for eager."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """The op, in float64."""

        def lift(value: object) -> object:
            return _LIFTED.get(value, value) if isinstance(value, torch.dtype) else value

        return func(*map(lift, args), **{name: lift(value) for name, value in (kwargs or {}).items()})


@contextmanager
def in_float64() -> Iterator[None]:
    """Everything made or cast within is float64."""
    with default_dtype(torch.float64), Lifted():
        yield


class EagerModel:
    """The user's training loop.

    Args:
        built: the model; it is left as it is.
    """

    def __init__(self, built: Built) -> None:
        self.built = built
        self.model = copy.deepcopy(built.model)
        for module in self.model.modules():
            for name, x in module._buffers.items():
                if x is not None:
                    module._buffers[name] = lifted(x)
        for x in self.model.parameters():
            x.data = lifted(x.data)
        self.batch = {name: lifted(x) for name, x in built.batch.items()}
        self.takes = inspect.signature(self.model.forward).parameters
        self.optimizer = torch.optim.SGD(
            [p for p in self.model.parameters() if p.requires_grad], lr=LR, momentum=MOMENTUM, foreach=False
        )

    def step(self) -> tuple[float, dict[str, Tensor]]:
        """Forward, backward and update: the loss, and the gradients that there are."""
        inputs = {name: x for name, x in self.batch.items() if name in self.takes}
        with in_float64():
            loss = self.built.total(self.model(**inputs), self.batch)
            self.optimizer.zero_grad()
            loss.backward()
        found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        return float(loss.detach()), found

    def params(self) -> dict[str, Tensor]:
        """As they are now."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """As they are now."""
        return {name: b.detach().clone() for name, b in self.model.named_buffers()}


def lifted(x: Tensor) -> Tensor:
    """A float or complex tensor at double precision."""
    return x.to(_LIFTED.get(x.dtype, x.dtype))
