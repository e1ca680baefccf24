"""Gradients that wait where states live, for the optimizer's side (`lowering.transfers.offloaded_grads`).

Their parameters' `grad` is a view of where they wait (on disk, of a file mapped into memory), so whoever reads or
writes it does so as any tensor's. What is asked of all gradients at every step needs no reading: the norm comes from
what was measured as they left, and so does the verdict on infinities; what clipping and unscaling multiply them by is
kept, and multiplied in the update, when they are in memory. A gradient that someone else has written to, or that was
added to an earlier step's, is read where it waits instead.

Limits: what is read of such a `grad` after it was clipped or unscaled is as it was before (`value` is not); writing to
it then is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.names import magnitude, waiting


class WaitingGrads:
    """The gradients of a rank that wait beside states.

    Args:
        params: the optimizer's parameters by name.
        homes: where each waits, without padding, by the parameter's name.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], homes: Mapping[str, Tensor]) -> None:
        self._params, self._homes = params, dict(homes)
        self._given: dict[str, tuple[Tensor, int]] = {}
        self._read: set[str] = set()
        self._outer: Mapping[Name, Any] = {}
        self._factors: dict[str, list[Tensor]] = {}

    @property
    def names(self) -> frozenset[str]:
        """Of their parameters."""
        return frozenset(self._homes)

    def start(self, outer: Mapping[Name, Any]) -> None:
        """A step begins, with these outer values: its gradients replace those that wait, or are added to those that
        parameters still have."""
        for name, home in self._homes.items():
            param = self._params[name]
            grad, param.grad = param.grad, None
            outer[waiting(name)].adds = grad is not None
            if grad is not None and not self._is_given(name, grad):
                home.copy_(grad)
            elif grad is not None and not self._is_written(name):
                self._settle(name)
        self._outer, self._given, self._read, self._factors = outer, {}, set(), {}

    def grad(self, name: str) -> Tensor:
        """A gradient of the step that has ended."""
        if name not in self._given:
            view = self._homes[name].data  # writes to it are told apart from those to what else is in its file
            self._given[name] = view, view._version
            if self._outer[waiting(name)].adds:
                self._read.add(name)
        return self._given[name][0]

    def is_known(self, name: str, grad: Tensor) -> bool:
        """Whether a gradient is one that was measured, and nobody has written to it since."""
        return self._is_given(name, grad) and not self._is_written(name) and self._sizes(name) is not None

    def _sizes(self, name: str) -> Tensor | None:
        """What was measured, unless that is not all of it."""
        return None if name in self._read else self._outer.get(magnitude(name))

    def _is_given(self, name: str, grad: Tensor) -> bool:
        return name in self._given and grad is self._given[name][0]

    def _is_written(self, name: str) -> bool:
        view, version = self._given[name]
        return view._version != version

    def of(self, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
        """The parameters of an optimizer whose gradients are known."""
        theirs = {id(param) for group in optimizer.param_groups for param in group["params"]}
        mine = {name: self._params[name] for name in self._homes if id(self._params[name]) in theirs}
        return {name: x for name, x in mine.items() if x.grad is not None and self.is_known(name, x.grad)}

    def power(self, name: str, grad: Tensor, norm_type: float) -> Tensor | None:
        """The sum of |g|^2 (the largest |g| for infinity) of a gradient as it will be in the update; None where that is
        to be read from it.

        Args:
            name: of the parameter.
            grad: what is seen as its gradient.
            norm_type: 2, or infinity.
        Raises:
            PlanMismatchError: it was written to after it was unscaled.
        """
        if not self.is_known(name, grad) or norm_type not in (2.0, float("inf")):
            self._settle(name)
            return None
        sizes = self._sizes(name)
        assert sizes is not None
        found = sizes[0 if norm_type == 2.0 else 1]
        for factor in self._factors.get(name, ()):
            scale = factor.to(found.device, torch.float64)
            found = found * (scale * scale if norm_type == 2.0 else scale.abs())
        return found

    def is_finite(self, name: str) -> Tensor:
        """Whether every element of a known gradient is."""
        sizes = self._sizes(name)
        assert sizes is not None
        return torch.isfinite(sizes[1])

    def scale(self, name: str, grad: Tensor, factor: Tensor) -> bool:
        """Multiply a gradient in the update; False where that is not known of, and is to be done at once.

        Args:
            name: of the parameter.
            grad: what is seen as its gradient.
            factor: by which it is multiplied.
        """
        if not self.is_known(name, grad):
            return False
        self._factors.setdefault(name, []).append(factor)
        return True

    def value(self, name: str, grad: Tensor) -> Tensor:
        """A gradient as its update takes it, multiplied by what is kept; a copy where there is any."""
        for factor in self._factors.get(name, ()) if self._is_given(name, grad) else ():
            grad = grad * factor.to(grad.device, grad.dtype)
        return grad

    def recalled(self, name: str, grad: Tensor, device: torch.device) -> Tensor | None:
        """What the update takes: `grad`, which came from where it waits, unless the parameter has another or none.

        Args:
            name: of the parameter.
            grad: that came.
            device: of the update.
        Raises:
            PlanMismatchError: it was written to after it was clipped or unscaled.
        """
        mine = self._params[name].grad
        if mine is None or not self._is_given(name, mine):
            return mine if mine is None else mine.to(device)
        for factor in self._due(name):
            grad.mul_(factor.to(grad.device, grad.dtype))
        return grad

    def check(self) -> None:
        """An update begins.

        Raises:
            PlanMismatchError: a gradient was written to after it was clipped or unscaled.
        """
        for name, (view, _) in self._given.items():
            if self._params[name].grad is view:
                self._due(name)

    def _due(self, name: str) -> list[Tensor]:
        """What a gradient is to be multiplied by."""
        factors = self._factors.get(name, [])
        if factors and self._is_written(name):
            raise PlanMismatchError(
                f"the gradient of {name}, which waits beside its optimizer states, was written to after it was clipped "
                "or unscaled, which is done in the update; write to it before, or plan with gradients where "
                "their update is (without place_grads)"
            )
        return factors

    def _settle(self, name: str) -> None:
        """Multiply where it waits what was to be multiplied in the update; it is to be read there from now on."""
        for factor in self._due(name):
            view = self._given[name][0]
            view.mul_(factor.to(view.device, view.dtype))
            self._given[name] = view, view._version
            self._read.add(name)
        self._factors.pop(name, None)
