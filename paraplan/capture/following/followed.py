"""What export would not follow as it is written, done in a way it does: calls of torch.

`x.data` is no op: it becomes `x.detach()`, and an assignment to it a copy into that. Numbers that forward writes out
(`torch.tensor(0.1)`) are kept as they were written, for fp64. Some functions are rewritten
(`rewritten`). What gives back the very tensor it was given (a dropout
of nothing, too) is no op either, nor is what torch refuses, where forward catches the error and goes on; where only a
trace refuses it, forward goes on as eager would not, and capture ends with that error.
What is written under no_grad has no gradient, also to a part of a tensor; what was detached in place is known as
detached from there on. Arrays of numpy become tensors as they are then: what is made of them later does not show in a
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from paraplan.capture.following.refusals import note
from paraplan.capture.following.rewritten import REWRITTEN
from paraplan.capture.python_state.outside.written import Written
from paraplan.capture.source_lines import depends_on_data, is_of_trace
from paraplan.capture.torch_private import drop_refused, is_own, trace_as, traced_as, unrecorded
from paraplan.ir.errors import CaptureError
from paraplan.kernels.torch_private import tree_leaves, tree_map_only

_DATA = torch.Tensor.data
_DROPOUTS = frozenset({F.dropout, torch.dropout, torch.dropout_})
_DETACHES = frozenset({torch.Tensor.detach_, torch.detach_})
_WRITTEN = frozenset({torch.tensor, torch.as_tensor, torch.Tensor.new_tensor})
_IN_PLACE = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__"})
_ARRAYS: tuple[type, ...] = (numpy.ndarray,)


class Followed(TorchFunctionMode):
    """Within it, data is followed and written numbers are kept.

    Args:
        cached: as for `Written`.
    """

    def __init__(self, cached: Callable[[], Iterable[Tensor]] = tuple) -> None:
        super().__init__()
        self.written = Written(cached)
        self._numbers: list[tuple[torch.dtype, tuple[int, ...], list[float]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every other function as it is."""
        data = args[0] if args else (kwargs or {}).get("data")
        args, kwargs = _as_given(func, args, kwargs or {})
        if getattr(func, "__self__", None) is _DATA:
            return args[0].detach() if func.__name__ == "__get__" else _assign(*args)
        if func in _DETACHES and args and is_own(args[0]):
            return _detached(args[0])
        if func in _DROPOUTS and _drops_nothing(*args, **kwargs):
            return args[0] if args else kwargs["input"]
        if func in REWRITTEN and (written := REWRITTEN[func](*args, **kwargs)) is not None:
            return written
        try:
            made = _as_itself(func, args, kwargs)
            if func is torch.as_tensor:
                self.written.share(data, made)
            self.written.check(args[0] if args and is_write(func) else kwargs.get("out"))
        except Exception as fault:
            if isinstance(fault, CaptureError) or depends_on_data(fault) or is_of_trace(fault):
                note(fault)
            raise
        if func in _WRITTEN and isinstance(made, Tensor) and made.dtype == torch.get_default_dtype():
            leaves = tree_leaves(args[-1] if args else kwargs.get("data"))
            if leaves and len(leaves) == made.numel() and all(isinstance(x, (int, float)) for x in leaves):
                self._numbers.append((made.dtype, tuple(made.shape), [float(x) for x in leaves]))
        return made

    def check(self, refused: Sequence[Exception]) -> None:
        """Say at the end what no graph shows.

        Args:
            refused: by the trace, whether forward caught it or not.
        Raises:
            CaptureError: forward has changed an array in whose memory a tensor lies.
            Exception: what was refused first.
        """
        if refused:
            raise refused[0]
        self.written.check_arrays()

    def exact(self, constant: Tensor) -> Tensor:
        """A constant of the trace in float64: as it was written, where forward wrote it out."""
        for *like, values in self._numbers:
            if like == [constant.dtype, tuple(constant.shape)]:
                written = torch.tensor(values, dtype=torch.float64).reshape(constant.shape)
                if torch.equal(written.to(constant.dtype), constant):
                    return written
        return constant


def _as_given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a call is given: arrays that forward goes on to change as they are now, and what it writes under no_grad
    without gradients."""
    name = getattr(func, "__name__", "")
    if func in _WRITTEN or name in ("__getitem__", "__setitem__"):
        args, kwargs = tree_map_only(_ARRAYS, lambda array: array.copy(), (args, kwargs))
    if args and is_write(func) and not torch.is_grad_enabled() and func is not Tensor.requires_grad_:
        rest = tree_map_only(Tensor, lambda x: x.detach() if x.is_floating_point() else x, (args[1:], kwargs))
        args, kwargs = (args[0], *rest[0]), rest[1]
    return args, kwargs


def is_write(func: Any) -> bool:
    """Whether a function of torch writes its first argument."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def _detached(x: Tensor) -> Tensor:
    """A tensor detached in place, which a trace would go on knowing as what it was."""
    made = x.detach()
    trace_as(x, traced_as(made))
    with unrecorded():
        x.detach_()
    return x


def _drops_nothing(input: Tensor, p: float = 0.5, training: bool = True, *rest: object, **named: object) -> bool:
    """Whether a dropout gives back its very argument, which a later write in place shows; a trace would copy it."""
    return (p == 0 or not named.get("train", training)) and 0 <= p <= 1


def _as_itself(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A call. Where it gives back the very tensor it was given (`x.to(x.dtype)`, `x.flatten(1)` of a matrix), that goes
    on being what it was: a trace would take every later reading of it for the call's result, and one made under no_grad
    for a constant."""
    leaves = (*args, *kwargs.values())
    before = [(x, x._version, traced_as(x)) for x in leaves if isinstance(x, Tensor) and not x.is_inference()]
    try:
        made = func(*args, **kwargs)
    except Exception:
        drop_refused()
        raise
    for x, version, node in before:
        if made is x and x._version == version and node is not None:
            trace_as(x, node)
    return made


def _assign(x: Tensor, value: Tensor) -> None:
    if x.shape != value.shape or x.dtype != value.dtype:
        raise CaptureError(
            f"forward assigns a {value.dtype} of {tuple(value.shape)} to the data of a {x.dtype} of {tuple(x.shape)}; "
            "keep its shape and dtype"
        )
    if x.requires_grad and not x.is_leaf:
        raise CaptureError(
            "forward assigns to the data of a value that a gradient flows through, whose gradient is then that of "
            "another value: give the new value a name"
        )
    with torch.no_grad():
        x.detach().copy_(value)
