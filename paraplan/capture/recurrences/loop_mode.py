"""The mode that a forward with loops over time is exported under."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paraplan.capture.recurrences.layers import RecurrentCalls
from paraplan.capture.recurrences.loop_results import Stacked
from paraplan.capture.recurrences.loop_runs import SIGNS, Index, Loops, is_indexed
from paraplan.capture.recurrences.markers import NotALoop

_CHANGES = frozenset({"__setitem__", *(f"__i{name}__" for name in SIGNS)})
_JOINS = (torch.cat, torch.concat, torch.concatenate)
_GET = Tensor.__getitem__


class LoopMode(TorchFunctionMode):
    """Under it, tensors give marked steps, and lists that a loop filled are stacked by what they are steps of."""

    def __init__(self, loops: Loops) -> None:
        super().__init__()
        self.loops, self.recurrent = loops, RecurrentCalls()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Takes a step, or stacks."""
        kwargs, loop = kwargs or {}, self.loops.active
        if func is Tensor.is_complex:
            return func(*args, **kwargs)
        if loop is not None and func is _GET and _has_index(args[1]):
            return loop.take(*args)
        if loop is not None and any(isinstance(x, Tensor) and x.is_complex() for x in args):
            raise NotALoop(loop.where, "a step computes with complex numbers")
        name = getattr(func, "__name__", "")
        if args and (name in _CHANGES or (name.endswith("_") and not name.endswith("__"))):
            self.loops.results.check(args[0])
        if func in (torch.stack, *_JOINS) and (joined := self._joined(func, args, kwargs)) is not None:
            return joined
        if self.loops.apart is not None and loop is None and (layers := self.recurrent.of(func, args, kwargs)):
            return layers(*args)
        return func(*args, **kwargs)

    def _joined(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """What joins a list that a loop filled, stored as torch would; None of any other list."""
        listed = args[0] if args else kwargs.get("tensors")
        if not isinstance(listed, (list, tuple)):
            return None
        if not kwargs.keys() <= {"tensors", "dim", "axis"}:
            return listed._refuse() if isinstance(listed, Stacked) else None
        whole = listed.whole if isinstance(listed, Stacked) else self.loops.results.joined(listed)
        if whole is None:
            return None
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
        if func is torch.stack:
            return whole.movedim(0, dim).clone(memory_format=torch.contiguous_format)
        place = dim % (whole.dim() - 1)
        parts = whole.movedim(0, place).flatten(place, place + 1)
        return parts.clone(memory_format=torch.contiguous_format)


def _has_index(index: object) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Index) or (isinstance(part, slice) and is_indexed(part)) for part in parts)


def looping(loops: Loops) -> AbstractContextManager[object]:
    """What a forward is traced under."""
    return LoopMode(loops) if loops.watched else nullcontext()
