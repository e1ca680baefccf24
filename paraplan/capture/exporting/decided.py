"""Sizes and conditions that torch reads from data, where a call's arguments decide them already.

`torch.bincount(x, minlength=n)` has n bins, or more where the data need more, so that no graph of static sizes holds
it. Here it is what it is for data within its n bins: n zeros to which each index adds one, or its weight. A step whose
data need more is refused by the addition, which checks its indices as any indexing of torch does (an error on CPU, a
device-side assertion on CUDA). Without a `minlength` the size stays unknown, and capture refuses it.

`if torch.rand([]) < p` (a layer that is dropped, in models of Hugging Face) is no condition on data where p is 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_BINCOUNT = (torch.bincount, Tensor.bincount)
_UNIFORM = (torch.rand, torch.rand_like)


def _below(bound: float) -> bool | None:
    return False if bound <= 0 else True if bound >= 1 else None


def _up_to(bound: float) -> bool | None:
    return False if bound < 0 else True if bound >= 1 else None


def _not(below: Callable[[float], bool | None]) -> Callable[[float], bool | None]:
    def found(bound: float) -> bool | None:
        known = below(bound)
        return None if known is None else not known

    return found


_COMPARED: dict[object, Callable[[float], bool | None]] = {
    **dict.fromkeys((torch.lt, torch.less, Tensor.lt, Tensor.less, Tensor.__lt__), _below),
    **dict.fromkeys((torch.le, torch.less_equal, Tensor.le, Tensor.less_equal, Tensor.__le__), _up_to),
    **dict.fromkeys((torch.ge, torch.greater_equal, Tensor.ge, Tensor.greater_equal, Tensor.__ge__), _not(_below)),
    **dict.fromkeys((torch.gt, torch.greater, Tensor.gt, Tensor.greater, Tensor.__gt__), _not(_up_to)),
}
"""Per comparison, whether it holds of every number from 0 up to, but not, 1; None where of some."""


class Decided(TorchFunctionMode):
    """Under it, a `bincount` has as many bins as its `minlength`, and what holds of every uniform draw is known."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, tuple[Tensor, int]] = {}  # by id, held so that the id stays theirs, with their versions
        self._known: dict[int, tuple[Tensor, int]] = {}
        self._holds: dict[int, bool] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, or what stands for it."""
        kwargs = kwargs or {}
        if func is Tensor.__bool__ and _is_in(self._known, args[0]):
            return self._holds[id(args[0])]
        counts = _counts(*args, **kwargs) if func in _BINCOUNT else None
        made = func(*args, **kwargs) if counts is None else counts
        if func in _UNIFORM and made.numel() == 1 and not made.is_inference():
            self._drawn[id(made)] = made, made._version
        elif func in _COMPARED and not kwargs and _is_in(self._drawn, args[0]) and isinstance(args[1], int | float):
            holds = _COMPARED[func](args[1])
            if holds is not None and not made.is_inference():
                self._known[id(made)] = made, made._version
                self._holds[id(made)] = holds
        return made


def is_noted(func: object) -> bool:
    """Whether what is known of a single number may depend on a call of this function."""
    return func in _UNIFORM or func in _COMPARED


def _is_in(noted: dict[int, tuple[Tensor, int]], x: object) -> bool:
    """Whether a tensor was noted, and not written since."""
    found = noted.get(id(x))
    return found is not None and found[0]._version == found[1]


def _counts(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
    """The counts; None where their number is not given, or torch refuses the arguments."""
    whole = not (input.is_floating_point() or input.is_complex() or input.dtype == torch.bool)
    if minlength <= 0 or input.dim() != 1 or not whole or (weights is not None and weights.shape != input.shape):
        return None
    at = input.to(torch.int64)
    if weights is None:
        added = torch.ones_like(at)
    else:  # torch has no gradient of the weights, and double sums of what is not float32
        added = weights.detach().to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
    return added.new_zeros(minlength).scatter_add(0, at, added)
