"""What export would not follow as it is written, done in a way it does.

Whether it is being compiled or exported, forward is told as eager would tell it: no; torch's own modules and
transformers', which then avoid what cannot be traced and compute the same, are told the truth.
`x.data` is no op: it becomes `x.detach()`, and an assignment to it a copy into that. Numbers that forward writes out
(`torch.tensor(0.1)`) are kept as they were written, for fp64. An einsum that only turns a tensor's dims is a
permutation of them, for it is a view. What gives back the very tensor it was given (a dropout
of nothing, too) is no op either, nor is what torch refuses, where forward catches the error and goes on; where only a
trace refuses it, forward goes on as eager would not, and capture ends with that error.
`torch.inference_mode` is no_grad, and what is written under no_grad has no gradient, also to a part of a tensor. Arrays
of numpy become tensors as they are then: what is made of them later does not show in a graph. Batch norm with
momentum=None, a cumulative average, reads its counter as a Python number: here its running statistics move by
1 / counter, a tensor. A function of `torch.jit` runs op by op.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from paraplan.capture.python_state.outside.written import Written
from paraplan.capture.source_lines import depends_on_data
from paraplan.capture.torch_private import drop_refused, scripts_by_op, trace_as, traced_as
from paraplan.ir.errors import CaptureError
from paraplan.kernels.torch_private import BatchNorm, tree_leaves, tree_map_only

_DATA = torch.Tensor.data
_DROPOUTS = frozenset({F.dropout, torch.dropout, torch.dropout_})
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
        self.refused: Exception | None = None  # by a trace, whatever forward did then
        self.written = Written(cached)
        self._numbers: list[tuple[tuple[int, ...], list[float]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every other function as it is."""
        data = args[0] if args else (kwargs or {}).get("data")
        args, kwargs = _as_given(func, args, kwargs or {})
        if getattr(func, "__self__", None) is _DATA:
            return args[0].detach() if func.__name__ == "__get__" else _assign(*args)
        if func in _DROPOUTS and _drops_nothing(*args, **kwargs):
            return args[0] if args else kwargs["input"]
        if func is torch.einsum and (turned := _turned(*args)) is not None:
            return turned
        try:
            made = _as_itself(func, args, kwargs)
            if func is torch.as_tensor:
                self.written.share(data, made)
            self.written.check(args[0] if args and _is_write(func) else kwargs.get("out"))
        except Exception as fault:
            if self.refused is None and (isinstance(fault, CaptureError) or depends_on_data(fault)):
                self.refused = fault
            raise
        if func in _WRITTEN and isinstance(made, Tensor) and made.dtype == torch.get_default_dtype():
            leaves = tree_leaves(args[-1] if args else kwargs.get("data"))
            if leaves and len(leaves) == made.numel() and all(isinstance(x, (int, float)) for x in leaves):
                self._numbers.append((tuple(made.shape), [float(x) for x in leaves]))
        return made

    def check(self) -> None:
        """Say at the end what a trace has refused and forward has caught: it went on as eager would not.

        Raises:
            CaptureError: likewise, or forward has changed an array in whose memory a tensor lies.
        """
        if self.refused is not None:
            raise self.refused
        self.written.check_arrays()

    def exact(self, constant: Tensor) -> Tensor:
        """A constant of the trace in float64: as it was written, where forward wrote it out."""
        for shape, values in self._numbers:
            written = torch.tensor(values, dtype=torch.float64).reshape(shape)
            if shape == tuple(constant.shape) and torch.equal(written.to(constant.dtype), constant):
                return written
        return constant


def _as_given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a call is given: arrays that forward goes on to change as they are now, and what it writes under no_grad
    without gradients."""
    name = getattr(func, "__name__", "")
    if func in _WRITTEN or name in ("__getitem__", "__setitem__"):
        args, kwargs = tree_map_only(_ARRAYS, lambda array: array.copy(), (args, kwargs))
    if args and _is_write(func) and not torch.is_grad_enabled() and func is not Tensor.requires_grad_:
        rest = tree_map_only(Tensor, lambda x: x.detach() if x.is_floating_point() else x, (args[1:], kwargs))
        args, kwargs = (args[0], *rest[0]), rest[1]
    return args, kwargs


def _is_write(func: Any) -> bool:
    """Whether a function of torch writes its first argument."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def _drops_nothing(input: Tensor, p: float = 0.5, training: bool = True, *rest: object, **named: object) -> bool:
    """Whether a dropout gives back its very argument, which a later write in place shows; a trace would copy it."""
    return (p == 0 or not named.get("train", training)) and 0 <= p <= 1


def _turned(equation: object, *operands: Any) -> Tensor | None:
    """What an einsum of one tensor gives that only turns its dims: a view, which a trace would take for a new tensor;
    None of any other."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or len(given) != 1 or not isinstance(given[0], Tensor):
        return None
    dims, _, order = equation.replace(" ", "").partition("->")
    if sorted(dims) != sorted(order) or not dims.isalpha() or len({*dims}) != len(dims) or len(dims) != given[0].dim():
        return None
    return given[0].permute([dims.index(dim) for dim in order])


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


def _cumulative(self: BatchNorm, x: Tensor) -> Tensor:
    """`BatchNorm.forward` of momentum=None in training."""
    self._check_input_dim(x)
    count, mean, var = self.num_batches_tracked, self.running_mean, self.running_var
    assert count is not None and mean is not None and var is not None
    with torch.no_grad():
        count.add_(1)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        share = count.to(mean.dtype).reciprocal()
        mean.add_((x.mean(dims) - mean) * share)
        var.add_((x.var(dims, correction=1) - var) * share)
    return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


def _enter(self: torch.inference_mode) -> None:
    """`inference_mode.__enter__`, which no graph has, as no_grad."""
    self._inference_mode_context = torch.set_grad_enabled(not self.mode)


def _leave(self: torch.inference_mode, *fault: object) -> None:
    self._inference_mode_context.__exit__(*fault)


def _no_gradients(*args: object, **kwargs: object) -> None:
    raise RuntimeError(
        "torch.autograd.grad is called in forward; a captured step has one backward, that of its loss: write the "
        "derivative out in forward, or take this term's step outside of the plan"
    )


_TOLD = frozenset({"torch", "transformers"})
_ASKED = ("is_compiling", "is_exporting", "is_dynamo_compiling")


def _told(answer: Callable[[], bool]) -> Callable[[], bool]:
    def asked() -> bool:
        asking = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
        return answer() if asking in _TOLD else False

    return asked


@contextmanager
def told_eager() -> Iterator[None]:
    """Within it, code asks in vain whether it is compiled or exported, but for `_TOLD`."""
    modules = (torch.compiler, sys.modules.get("torch._dynamo"), sys.modules.get("torch._dynamo.external_utils"))
    saved = [(module, name, getattr(module, name)) for module in modules for name in _ASKED if hasattr(module, name)]
    for module, name, answer in saved:
        setattr(module, name, _told(answer))
    try:
        yield
    finally:
        for module, name, answer in saved:
            setattr(module, name, answer)


@contextmanager
def followed_modules(followed: Followed) -> Iterator[None]:
    """Within it, batch norms of momentum=None and functions of torch.jit are followed, and torch.distributions asserts
    nothing of values.

    Args:
        followed: told of arrays that tensors are made of.
    """
    original, derived, from_numpy = BatchNorm.forward, torch.autograd.grad, torch.from_numpy
    entered, left = torch.inference_mode.__enter__, torch.inference_mode.__exit__
    distribution: Any = getattr(sys.modules.get("torch.distributions"), "Distribution", None)
    validates = getattr(distribution, "_validate_args", False)

    def own_memory(array: Any) -> Tensor:
        made = from_numpy(array.copy())
        followed.written.share(array, made)
        return made

    def forward(self: BatchNorm, input: Tensor) -> Tensor:
        cumulative = self.momentum is None and self.training and self.track_running_stats
        return _cumulative(self, input) if cumulative else original(self, input)

    BatchNorm.forward = forward  # type: ignore[method-assign]
    torch.autograd.grad = _no_gradients
    torch.from_numpy = own_memory
    torch.inference_mode.__enter__, torch.inference_mode.__exit__ = _enter, _leave  # type: ignore[method-assign]
    if distribution is not None:
        distribution.set_default_validate_args(False)
    try:
        with told_eager(), scripts_by_op():
            yield
    finally:
        if distribution is not None:
            distribution.set_default_validate_args(validates)
        torch.inference_mode.__enter__, torch.inference_mode.__exit__ = entered, left  # type: ignore[method-assign]
        BatchNorm.forward = original  # type: ignore[method-assign]
        torch.autograd.grad, torch.from_numpy = derived, from_numpy
