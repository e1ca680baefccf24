"""Which functions a forward may call that have loops over time, and their code changed for the length of an export."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from paraplan.capture.recurrences.loop_code import HELPER, looped_code
from paraplan.capture.recurrences.loop_runs import Loops
from paraplan.capture.recurrences.markers import NotALoop
from paraplan.ir.process.memo import SESSION

_NOT_FOLLOWED = ("torch", "builtins", "functools", "typing", "collections", "contextlib", "paraplan", "numpy", "math")
MOST = 5000


@contextmanager
def loops_followed(model: nn.Module, loss_fn: object, loops: Loops) -> Iterator[None]:
    """Has loops over time begin in `loops`, unless that takes none.

    Args:
        model: whose forward is exported.
        loss_fn: what is called besides.
        loops: of this export.
    """
    if loops.apart is None:
        yield
        return
    NotALoop.made.clear()
    changed: list[tuple[types.FunctionType, types.CodeType]] = []
    spaces: list[dict[str, Any]] = []
    try:
        for function in _functions(model, loss_fn):
            code = _code(function)
            if code is not None:
                changed.append((function, function.__code__))
                spaces.append(function.__globals__)
                function.__globals__[HELPER] = loops.begin
                function.__code__ = code
        loops.watched = bool(changed) or any(isinstance(module, nn.RNNBase) for module in model.modules())
        yield
    finally:
        for function, code in changed:
            function.__code__ = code
        for space in spaces:
            space.pop(HELPER, None)


@SESSION.cached(1024)
def _code(function: types.FunctionType) -> types.CodeType | None:
    return looped_code(function)


def _functions(model: nn.Module, loss_fn: object) -> Iterator[types.FunctionType]:
    """Functions with a loop over numbers or parts, reached from the forwards by the names their code mentions."""
    classes = dict.fromkeys(type(module) for module in model.modules())
    own = [kind for each in classes for kind in each.__mro__ if not _is_foreign(kind.__module__)]
    kept = [each for module in model.modules() for each in vars(module).values()]
    queue: list[object] = [each for each in kept if isinstance(_plain(each), (types.FunctionType, functools.partial))]
    queue += [loss_fn, *(vars(kind).get("forward") for kind in dict.fromkeys(own))]
    methods = dict.fromkeys(own)
    seen: set[int] = set()
    mentioned: set[str] = set()
    while queue and len(seen) < MOST:
        found = _plain(queue.pop())
        if not isinstance(found, types.FunctionType) or id(found) in seen or _is_foreign(found.__module__):
            queue += _wrapped(found, seen)
            continue
        seen.add(id(found))
        names = _names(found.__code__)
        if not names.isdisjoint(("range", "unbind")):
            yield found
        queue += [found.__globals__[name] for name in names if callable(found.__globals__.get(name))]
        queue += [vars(kind)[name] for name in names - mentioned for kind in methods if name in vars(kind)]
        mentioned |= names
        queue += _wrapped(found, set())


def _plain(found: object) -> object:
    """The function of a method."""
    return found.__func__ if isinstance(found, types.MethodType | staticmethod | classmethod) else found


def _wrapped(found: object, seen: set[int]) -> list[object]:
    """What a decorator has put something around."""
    if isinstance(found, functools.partial):
        return [found.func]
    if id(found) in seen or not isinstance(found, types.FunctionType):
        return []
    inner: list[object] = [found.__wrapped__] if hasattr(found, "__wrapped__") else []
    for cell in found.__closure__ or ():
        try:
            if isinstance(cell.cell_contents, types.FunctionType):
                inner.append(cell.cell_contents)
        except ValueError:
            continue
    seen.add(id(found))
    return inner


def _names(code: types.CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _is_foreign(module: object) -> bool:
    return str(module).split(".")[0] in _NOT_FOLLOWED
