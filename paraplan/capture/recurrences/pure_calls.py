"""What a step of a loop may call, judged by its value: it changes none of its arguments and keeps nothing."""

from __future__ import annotations

import functools
import inspect
import math
import types

import torch
from torch import Tensor, nn

from paraplan.ir.process.memo import SESSION

_LAYERS: frozenset[type[nn.Module]] = frozenset(
    {
        *(nn.Linear, nn.Bilinear, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d),
        *(nn.LSTMCell, nn.GRUCell, nn.RNNCell, nn.Embedding, nn.Flatten, nn.Unflatten),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.GLU),
        *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softplus),
        *(nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softsign, nn.Softshrink, nn.Tanhshrink, nn.Threshold),
    }
)
"""torch's layers that are functions of their parameters, where they do not work in place."""
_BUILTINS: tuple[object, ...] = (tuple, slice)
_OF_NUMBERS: tuple[object, ...] = (
    *(float, int, len, abs, min, max),
    *(each for name, each in vars(math).items() if callable(each) and not name.startswith("_")),
)
"""Functions of what is the same in every step, if it is a number or something that nobody changes."""
_PLAIN = (
    *(Tensor, nn.Module, int, float, complex, str, list, tuple, dict, type, torch.dtype, torch.device, torch.layout),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
)
"""What has no operators of a user's own, but for modules."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_pure_call(called: object, count: int) -> bool:
    """Whether something may be called in a step that stands for others.

    Args:
        called: a function, a method or a module.
        count: of what it is given by place, a flag for "in place" perhaps among it.
    """
    if isinstance(called, nn.Module):
        return _is_pure_layer(called)
    name = getattr(called, "__name__", "_")
    if isinstance(getattr(called, "__self__", None), Tensor) and not name.endswith("_"):
        own = getattr(called, "__func__", None)
        return isinstance(called, types.BuiltinMethodType) or (own is not None and own is getattr(Tensor, name, None))
    if id(called) in _functions():
        names = list(inspect.signature(called).parameters) if isinstance(called, types.FunctionType) else []
        return "inplace" not in names[:count]
    return any(called is each for each in _BUILTINS)


def is_of_numbers(called: object) -> bool:
    """Whether something is a function of numbers, and of how many something has."""
    return any(called is each for each in _OF_NUMBERS)


def is_plain(value: object) -> bool:
    """Whether a value's operators are those that everyone knows: an object of one's own may count how often it is used.

    Args:
        value: of a variable that a step reads.
    """
    return value is None or isinstance(value, _PLAIN)


def is_fixed(whole: object) -> bool:
    """Whether parts of something are the same in every step: of what a list or an object of one's own holds another
    name may tell otherwise."""
    several = type(whole) in (tuple, torch.Size) or type(whole).__module__ == "torch.return_types"
    return several or isinstance(whole, (Tensor, nn.ModuleList, nn.ParameterList))


def _is_pure_layer(layer: nn.Module) -> bool:
    if any(getattr(layer, each, None) for each in _HOOKS) or "forward" in vars(layer):
        return False
    if type(layer) is nn.Sequential:
        return all(map(_is_pure_layer, layer))
    changes = getattr(layer, "inplace", False) or getattr(layer, "max_norm", None) is not None
    return type(layer) in _LAYERS and not changes


@SESSION.cached(1)
def _functions() -> frozenset[int]:
    """The public functions of torch, none put in their place by others, that do not work in place, by identity."""
    spaces = torch, torch.special, torch.linalg, nn.functional
    named = ((name, getattr(space, name)) for space in spaces for name in dir(space) if name[0] != "_" != name[-1])
    return frozenset(id(each) for _, each in named if callable(each) and not _is_replaced(each))


def _is_replaced(function: object) -> bool:
    return isinstance(function, types.FunctionType) and not function.__module__.startswith("torch")
