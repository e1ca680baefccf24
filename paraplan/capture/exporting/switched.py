"""Parameters whose `requires_grad` a forward switches: what reads one while it is off has no gradient for it.

An export keeps no such flag, so the switch is noted here in place of being made, and until it is undone the parameter
is read detached, as eager computes it ("freeze the discriminator for the generator's loss"). A switch that is left at
the end would freeze or train the parameter from then on; it is refused, as is training a frozen one within forward.
"""

from __future__ import annotations

import traceback
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paraplan.capture.following.refusals import Refused
from paraplan.capture.source_lines import line_of_stack
from paraplan.ir.errors import CaptureError
from paraplan.kernels.torch_private import is_fake, tree_map_only

_FLAG = Tensor.requires_grad
_METHODS = (Tensor.requires_grad_, Tensor.detach_)


class Switches(TorchFunctionMode):
    """Under it, parameters of a model are read as their `requires_grad` says at the moment."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}
        self._switched: dict[int, tuple[bool, str]] = {}

    def begin(self, model: nn.Module) -> None:
        """A forward of this model follows."""
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._switched = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Switches are noted; every other function gets parameters that are off detached."""
        kwargs = kwargs or {}
        getter = getattr(func, "__self__", None) is _FLAG
        x = args[0] if args else None
        if (getter or func in _METHODS) and id(x) in self._names:
            if getter and func.__name__ == "__get__":
                return self._is_on(x)
            self._switch(x, func is not Tensor.detach_ and bool([*args[1:], *kwargs.values(), True][0]))
            return x
        if (getter and func.__name__ == "__set__") or func in _METHODS:
            _refuse_outside(x)
        if not self.all_on:
            args, kwargs = tree_map_only(Tensor, lambda x: x if self._is_on(x) else x.detach(), (args, kwargs))
        return func(*args, **kwargs)

    @property
    def all_on(self) -> bool:
        """Whether no parameter is off."""
        return all(on for on, _ in self._switched.values())

    def _is_on(self, x: Tensor) -> bool:
        return self._switched[id(x)][0] if id(x) in self._switched else x.requires_grad

    def _switch(self, x: Tensor, on: bool) -> None:
        if on and not x.requires_grad:
            raise Refused(
                f"requires_grad of parameter {self._names[id(x)]!r}, which does not train, is switched on in forward; "
                "switch it on before planning, and where it shall not train read it detached (w.detach())"
            )
        if on == self._is_on(x):
            return
        line = line_of_stack("".join(traceback.format_stack()))
        self._switched[id(x)] = on, line

    def end(self) -> None:
        """The forward has ended, its loss computed.

        Raises:
            CaptureError: a switch was not undone; names line and remedy.
        """
        for number, (on, line) in self._switched.items():
            if not on:
                name = self._names[number]
                raise CaptureError(
                    f"{line or 'forward'}: requires_grad of parameter {name!r} is switched off and left so, which "
                    "freezes it from the first step on; switch it on again before forward and loss end, or freeze it "
                    f"before planning (model.get_parameter({name!r}).requires_grad_(False))"
                )


def _refuse_outside(x: object) -> None:
    if isinstance(x, nn.Parameter) and not is_fake(x):
        raise Refused(
            f"requires_grad of a parameter of shape {tuple(x.shape)} is switched that is none of the model in training "
            "(a loss function's own, or read from a global); make its module part of the model (self.critic = ...)"
        )
