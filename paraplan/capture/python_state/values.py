"""Python values that a forward reads: which are data, whether one has changed, and their text in a plan.

Numbers, text, None, dtypes, enums, tensors, arrays, functions, and lists, tuples, sets and mappings of them are data.
Modules and objects of the user's classes are not: their attributes are read one by one and recorded so (`reads`).
"""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import itertools
import logging
import operator
import pathlib
import re
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.capture.python_state.code import code_text
from paraplan.kernels.dtypes import dtype_name
from paraplan.kernels.torch_private import is_fake


@dataclass(frozen=True)
class RegisteredTensor:
    """A parameter or buffer of the model in question, whatever it holds."""

    name: str

    def __repr__(self) -> str:
        return f"tensor {self.name!r} of the model"


PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    array.array,
    type(None),
    torch.dtype,
    enum.Enum,
    slice,
    range,
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.timedelta,
    pathlib.PurePath,
    re.Pattern,
    RegisteredTensor,
)
_GETTERS = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
"""Data whose `repr` says all."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools.partial)
_LONGEST = 120
UNKNOWN = "?"
"""Ends the text of a tensor without values (on meta): equal to any of its shape."""


class Absent:
    """An attribute that is not there."""

    def __repr__(self) -> str:
        return "no such attribute"

    def __copy__(self) -> Absent:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        return self


ABSENT = Absent()


def named(value: object, names: Mapping[int, str]) -> object:
    """A value with parameters and buffers, at any depth, replaced by their names.

    Args:
        value: data.
        names: of parameters and buffers by id; a value that holds none of them is returned itself.
    """
    if isinstance(value, Tensor):
        return RegisteredTensor(names[id(value)]) if id(value) in names else value
    if isinstance(value, dict):
        found = {key: named(item, names) for key, item in value.items()}
        return found if any(found[key] is not item for key, item in value.items()) else value
    if isinstance(value, CONTAINERS):
        items = [named(item, names) for item in value]
        if all(mine is other for mine, other in zip(items, value, strict=True)):
            return value
        return frozenset(items) if isinstance(value, (set, frozenset)) else items
    if isinstance(value, functools.partial):
        args, keywords = named(value.args, names), named(value.keywords, names)
        return value if args is value.args and keywords is value.keywords else [value.func, args, keywords]
    if isinstance(value, types.SimpleNamespace):
        held = named(vars(value), names)
        return value if held is vars(value) else held
    return value


def is_data(value: object) -> bool:
    """Whether a value is data, and is compared as a whole."""
    kinds = (*PLAIN, *CONTAINERS, *_FUNCTIONS, *_GETTERS, Tensor, Absent, types.SimpleNamespace)
    return isinstance(value, kinds) or _is_array(value) or _is_iterator(value)


def _is_iterator(value: object) -> bool:
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


def _is_array(value: object) -> bool:
    return type(value).__module__ == "numpy"


def is_plain(value: object) -> bool:
    """Whether `==` says all, at any depth."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return isinstance(value, PLAIN) or value is ABSENT


def token(value: object, tracing: bool = False) -> object:
    """What a value is now: equal to a later token of it exactly while nothing was changed.

    Args:
        value: data.
        tracing: within a trace, where a tensor's address cannot be asked for.
    """
    if isinstance(value, Tensor):
        return _Held(value), 0 if value.is_inference() else value._version, 0 if tracing else _address(value)
    if isinstance(value, (list, tuple, deque)):
        return type(value), tuple(token(item, tracing) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((token(key), token(item, tracing)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(token(item, tracing) for item in value)
    if isinstance(value, types.FunctionType):
        return code_text(value), _cells(value)
    if isinstance(value, types.BuiltinMethodType):  # made anew whenever it is read
        return _Held(value.__self__), value.__name__
    if isinstance(value, PLAIN):
        return type(value), bytes(value) if isinstance(value, (bytearray, array.array)) else value
    if isinstance(value, types.SimpleNamespace):
        return type(value), token(vars(value), tracing)
    if isinstance(value, _GETTERS):
        return repr(value)
    if _is_iterator(value):
        return _progress(value, tracing)
    return text_of(value) if _is_array(value) else _Held(value)


def _progress(value: Any, tracing: bool) -> object:
    """How far an iterator is; equal to no other where that cannot be known (a generator)."""
    if isinstance(value, (itertools.count, itertools.repeat)):
        return repr(value)
    if type(value).__module__ == "itertools" or isinstance(value, types.GeneratorType):
        return object()
    return _Held(value), token(value.__reduce__(), tracing)


def _address(value: Tensor) -> int:
    return 0 if is_fake(value) or value.is_meta or value.layout is not torch.strided else value.data_ptr()


def _cells(function: Any) -> tuple[object, ...]:
    return tuple(map(id, function.__closure__ or ()))


class _Held:
    """An object by its identity, kept so that no other gets it."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def text_of(value: object) -> str:
    """A value as a plan's text, the same in every process; long ones by their digest."""
    text = _text(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:40]}... ({type(value).__name__} of {len(text)} characters, {_digest(text.encode())})"


def _text(value: object) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, (list, tuple, deque)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, pathlib.PurePath):
        return repr(str(value))
    if isinstance(value, re.Pattern):  # its repr is cut off
        return f"re.compile({value.pattern!r}, {int(value.flags)})"
    if isinstance(value, types.SimpleNamespace):
        return f"{type(value).__name__}({_text(vars(value))})"
    if isinstance(value, (*PLAIN, *_GETTERS, Absent)):
        return repr(value)
    return _TEXTS.get(_kind(value), _name)(value)


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return "tensor"
    return "array" if _is_array(value) else "partial" if isinstance(value, functools.partial) else ""


def _tensor_text(value: Any) -> str:
    dtype, shape = dtype_name(value.dtype), list(value.shape)
    if is_fake(value) or value.is_meta or value.layout is not torch.strided:
        return f"tensor {dtype}{shape} {UNKNOWN}"
    if value.numel() == 1:
        return f"tensor {dtype}{shape} {value.detach().item()!r}"
    plain = value.detach().cpu().contiguous().reshape(-1)
    return f"tensor {dtype}{shape} {_digest(bytes(plain.view(torch.uint8).numpy().data))}"


def _array_text(value: Any) -> str:
    return f"array {value.dtype}{list(value.shape)} {_digest(value.tobytes())}"


def _partial_text(value: Any) -> str:
    return f"partial({_text(value.func)}, {_text(value.args)}, {_text(value.keywords)})"


def _name(value: Any) -> str:
    """A function or another object by what its definition is called."""
    named = value if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)) else type(value)
    return str(getattr(named, "__qualname__", named))


_TEXTS: dict[str, Callable[[Any], str]] = {
    "tensor": _tensor_text,
    "array": _array_text,
    "partial": _partial_text,
}


def same_text(one: str, other: str) -> bool:
    """Whether two texts may be of equal values."""
    if one == other:
        return True
    unknown = one if one.endswith(UNKNOWN) else other
    return unknown.endswith(UNKNOWN) and (one if unknown is other else other).startswith(unknown[: -len(UNKNOWN)])


def is_opaque(value: object) -> bool:
    """Whether a value is an object of a user's class, whose attributes are read one by one: not of a class written in C
    (a cached function, a lock), nor a logger, whose attributes say nothing of a model."""
    cls = type(value)
    if is_data(value) or isinstance(value, (type, nn.Module, types.ModuleType, types.MethodType, *_LOGGING)):
        return False
    can_be_watched = cls.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE
    return can_be_watched and cls.__module__.partition(".")[0] not in _LIBRARIES


_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
"""Py_TPFLAGS of classes made at run time, and of those whose attributes cannot be set."""
_LOGGING = (logging.Filterer, logging.LoggerAdapter, logging.Manager)
_LIBRARIES = frozenset({"torch", "numpy", "builtins"})


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
