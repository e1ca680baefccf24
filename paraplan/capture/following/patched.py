"""What export would not follow as it is written, done in a way it does: modules, modes and functions, for its time.

Whether it is being compiled or exported, forward is told as eager would tell it: no; torch's own modules and
transformers', which then avoid what cannot be traced and compute the same, are told the truth. `torch.inference_mode`
is no_grad. Batch norm with momentum=None, a cumulative average, reads its counter as a Python number: here its running
statistics move by 1 / counter, a tensor. A function of `torch.jit` runs op by op.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paraplan.capture.following.followed import Followed
from paraplan.capture.following.refusals import Refused
from paraplan.capture.following.torch_private import modules_left
from paraplan.capture.torch_private import scripts_by_op
from paraplan.kernels.torch_private import BatchNorm

_SEEDS = ("manual_seed", "seed")


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
    raise Refused(
        "torch.autograd.grad is called in forward; a captured step has one backward, that of its loss: write the "
        "derivative out in forward, or take this term's step outside of the plan"
    )


def _no_seeds(*args: object, **kwargs: object) -> None:
    raise Refused(
        "the forward seeds the generator (torch.manual_seed), so that every step draws the same numbers; draw them "
        "once and keep them in a buffer (register_buffer)"
    )


_TOLD = frozenset({"torch", "transformers"})
_ASKED = ("is_compiling", "is_exporting", "is_dynamo_compiling")


def _told(answer: Callable[[], bool]) -> Callable[[], bool]:
    def asked() -> bool:
        asking = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
        return answer() if asking in _TOLD else False

    return asked


@contextmanager
def _formatted() -> Iterator[None]:
    """Within it, a number that only data say is put into text as no number: what forward logs is no part of a step."""
    kinds = {torch.SymFloat: math.nan, torch.SymInt: 0}
    saved = [(kind, kind.__dict__.get("__format__")) for kind in kinds]

    def formatting(number: float) -> Callable[[object, str], str]:
        return lambda self, spec: format(number, spec) if spec else str(self)

    for kind, number in kinds.items():
        kind.__format__ = formatting(number)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, original in saved:
            if original is None:
                del kind.__format__
            else:
                kind.__format__ = original


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
    """Within it, batch norms of momentum=None and functions of torch.jit are followed, torch.distributions asserts
    nothing of values, and gradients inside of forward and seeds are refused.

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
    seeds = [(module, name, getattr(module, name)) for module in (torch, torch.random) for name in _SEEDS]
    for module, name, _ in seeds:
        setattr(module, name, _no_seeds)
    torch.from_numpy = own_memory
    torch.inference_mode.__enter__, torch.inference_mode.__exit__ = _enter, _leave  # type: ignore[method-assign]
    if distribution is not None:
        distribution.set_default_validate_args(False)
    try:
        with told_eager(), scripts_by_op(), modules_left(), _formatted():
            yield
    finally:
        for module, name, seed in seeds:
            setattr(module, name, seed)
        if distribution is not None:
            distribution.set_default_validate_args(validates)
        torch.inference_mode.__enter__, torch.inference_mode.__exit__ = entered, left  # type: ignore[method-assign]
        BatchNorm.forward = original  # type: ignore[method-assign]
        torch.autograd.grad, torch.from_numpy = derived, from_numpy
