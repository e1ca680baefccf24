"""What is held outside of a model where its code can write: classes, globals, closures, attributes of functions and
objects, and the lists, mappings and arrays found there.

A trace runs the user's Python, so a grid cached in a module's dict or a counter of a class is written by it too, with
tensors that have no values. A `Snapshot` is taken before: it tells at the end of a forward what that changed, and puts
everything back. Containers are followed four deep, objects of the user's classes by their attributes, modules by their
registries. What torch's and Python's own code keeps is theirs.
"""

from __future__ import annotations

import array
import functools
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
from torch import Tensor, nn

from paraplan.capture.python_state.code import Reached, caches_restored, is_library, names_in
from paraplan.capture.python_state.outside.namespaces import Namespace, put, same, words
from paraplan.capture.python_state.setting_paths import outside_value
from paraplan.capture.python_state.values import is_opaque

_DEEPEST, _MOST_ITEMS, _MOST = 4, 1000, 20_000
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_TORCHS = frozenset({*vars(nn.Module())} - {*_REGISTRIES, "training"})


class Binding(NamedTuple):
    """A name in a namespace.

    Attributes:
        owner: a class, function, object, closure's cell, or a module's namespace.
        name: what is looked up in it.
        where: what messages call it.
    """

    owner: Any
    name: str
    where: str


class Change(NamedTuple):
    """A name, or a container under one, that differs from the snapshot.

    Attributes:
        binding: the name.
        was, now: the value, or the container's contents; of a mapping that only grew, nothing and what is new.
        held: the value or container itself.
    """

    binding: Binding
    was: object
    now: object
    held: object


class _Contents(NamedTuple):
    held: Any
    before: Any
    binding: Binding


class Snapshot:
    """What is held outside of a model.

    Args:
        reached: the functions and classes that its code reaches.
        roots: objects that are not copied for a trace (a loss function).
    """

    def __init__(self, reached: Sequence[Reached], roots: Iterable[object] = ()) -> None:
        self._namespaces: dict[int, Namespace] = {}
        self._contents: dict[int, _Contents] = {}
        self._met: dict[int, object] = {}
        self._mentioned = frozenset().union(*(each.mentioned for each in reached))
        functions = [function for each in reached for function in each.functions.values()]
        for function in functions:
            module = function.__globals__.get("__name__", "")
            self._enter_some(Namespace(function.__globals__, f"module {module}", _NONE), names_in(function.__code__))
        for function in functions:
            self._enter_function(function)
        for each in reached:
            for value in (*each.classes, *each.objects.values(), *map(outside_value, each.outside.values())):
                self._walk(value, _unnamed(type(value).__name__), 0)
        for root in roots:
            self._walk(root, _unnamed(type(root).__name__), 0)

    def _enter(self, namespace: Namespace, depth: int = 0) -> None:
        if id(namespace.owner) not in self._namespaces and len(self._namespaces) < _MOST:
            self._namespaces[id(namespace.owner)] = namespace
            self._walk_names(namespace, namespace.before, depth)

    def _enter_some(self, namespace: Namespace, names: frozenset[str]) -> None:
        """Looks at more names of a namespace that is looked at in parts."""
        known = self._namespaces.setdefault(id(namespace.owner), namespace)
        fresh = names - known.names if known.names is not None else _NONE
        if fresh:
            known.add(fresh)
            self._walk_names(known, fresh, 0)

    def _enter_function(self, function: Any, depth: int = 0) -> None:
        self._enter(Namespace(function, f"function {function.__qualname__}"), depth)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._enter(Namespace(cell, f"variable {name} around {function.__qualname__}"), depth)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._walk(value, _unnamed(f"a default argument of {function.__qualname__}"), depth)

    def _walk_names(self, namespace: Namespace, names: Iterable[str], depth: int) -> None:
        for name in sorted(names, key=str):
            if name in namespace.before:
                self._walk(namespace.before[name], Binding(namespace.owner, name, words(namespace, name)), depth)

    def _walk(self, value: Any, binding: Binding, depth: int) -> None:
        if isinstance(value, _LEAVES) or id(value) in self._met or depth > _DEEPEST or len(self._met) > _MOST:
            return
        self._met[id(value)] = value
        if copied := _COPIES.get(_kind(value)):
            self._contents[id(value)] = _Contents(value, copied(value), binding)
            if not isinstance(value, _ARRAYS) and len(value) <= _MOST_ITEMS:
                for item in list(value.values() if isinstance(value, dict) else value):
                    self._walk(item, binding, depth + 1)
        elif isinstance(value, tuple):
            for item in value:
                self._walk(item, binding, depth + 1)
        elif isinstance(value, functools.partial):
            self._walk((value.func, *value.args, *value.keywords.values()), binding, depth)
        elif isinstance(value, types.MethodType):
            self._walk(value.__self__, binding, depth)
        else:
            self._walk_object(value, depth)

    def _walk_object(self, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._enter(Namespace(module, type(module).__name__, without=_TORCHS), depth)
        elif isinstance(value, (type, types.FunctionType, types.ModuleType)):
            if is_library(value):
                return
            if isinstance(value, types.ModuleType):
                self._enter_some(Namespace(vars(value), f"module {value.__name__}", _NONE), self._mentioned)
            elif isinstance(value, type):
                self._enter(Namespace(value, f"class {value.__qualname__}"), depth + 1)
            else:
                self._enter_function(value, depth + 1)
        elif is_opaque(value) or isinstance(value, (threading.local, types.SimpleNamespace)):
            self._enter(Namespace(value, type(value).__qualname__), depth + 1)

    def changes(self) -> list[Change]:
        """What differs just now, registries of modules aside."""
        found = []
        for namespace in self._namespaces.values():
            for name, was, now in namespace.differences():
                if not same(was, now):
                    found.append(Change(Binding(namespace.owner, name, words(namespace, name)), was, now, now))
        for held, before, binding in self._contents.values():
            if binding.name not in _REGISTRIES and _differs(held, before):
                found.append(Change(binding, *_grown(before, _COPIES[_kind(held)](held)), held))
        return found

    def tensors(self) -> Iterator[Tensor]:
        """Tensors in what differs just now."""
        for each in self.changes():
            items = each.now.values() if isinstance(each.now, dict) else each.now
            yield from (x for x in (items if isinstance(items, Iterable) else ()) if isinstance(x, Tensor))
            if isinstance(each.now, Tensor):
                yield each.now

    def restore(self) -> None:
        """Puts everything back: the objects themselves, and what was in containers into these."""
        for namespace in self._namespaces.values():
            for name, was, _ in namespace.differences():
                put(namespace.owner, name, was)
        for held, before, _ in self._contents.values():
            if _differs(held, before):
                _refill(held, before)


@contextmanager
def outside_kept(root: object) -> Iterator[None]:
    """After it, what the code of a model or function reaches outside of it is what it was before, caches of
    functools.lru_cache included."""
    reached = Reached([root])
    snapshot = Snapshot([reached])
    with caches_restored(reached.caches):
        try:
            yield
        finally:
            snapshot.restore()


_NONE: frozenset[str] = frozenset()
_LEAVES = (str, bytes, int, float, complex, bool, type(None), Tensor)
_ARRAYS = (bytearray, array.array, numpy.ndarray)
_COPIES: dict[type, Callable[[Any], Any]] = {
    dict: dict,
    list: list,
    set: set,
    deque: list,
    bytearray: bytes,
    array.array: bytes,
    numpy.ndarray: numpy.ndarray.copy,
}


def _unnamed(where: str) -> Binding:
    return Binding(None, "", where)


def _kind(value: object) -> type | None:
    return next((kind for kind in _COPIES if isinstance(value, kind)), None)


def _differs(held: Any, before: Any) -> bool:
    if isinstance(held, numpy.ndarray):
        return held.shape != before.shape or held.tobytes() != before.tobytes()
    if isinstance(held, _ARRAYS):
        return bytes(held) != before
    if len(held) != len(before):
        return True
    if isinstance(held, set):
        return held != before
    pairs = zip(_flat(held), _flat(before), strict=True)
    return any(mine is not other for mine, other in pairs)


def _flat(value: Any) -> Iterator[object]:
    if isinstance(value, dict):
        for item in value.items():
            yield from item
    else:
        yield from value


def _grown(was: Any, now: Any) -> tuple[object, object]:
    """Contents before and after; of a mapping in which all is what it was, nothing and what is new."""
    if isinstance(was, dict) and all(key in now and now[key] is item for key, item in was.items()):
        return {}, {key: item for key, item in now.items() if key not in was}
    return was, now


def _refill(held: Any, before: Any) -> None:
    if isinstance(held, numpy.ndarray):
        if held.shape == before.shape and held.flags.writeable:
            held[...] = before
    elif isinstance(held, array.array):
        del held[:]
        held.frombytes(before)
    elif isinstance(held, (list, bytearray)):
        held[:] = before
    else:
        held.clear()
        (held.extend if isinstance(held, deque) else held.update)(before)
