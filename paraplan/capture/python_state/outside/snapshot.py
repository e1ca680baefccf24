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
from paraplan.capture.python_state.outside.spaces import Space, put, same, words
from paraplan.capture.python_state.values import is_opaque

_DEEPEST, _MOST_ITEMS, _MOST = 4, 1000, 20_000
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_TORCHS = frozenset({*vars(nn.Module())} - {*_REGISTRIES, "training"})


class Place(NamedTuple):
    """A name in a space.

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
        place: the name.
        was, now: the value, or the container's contents; of a mapping that only grew, nothing and what is new.
        held: the value or container itself.
    """

    place: Place
    was: object
    now: object
    held: object


class _Contents(NamedTuple):
    held: Any
    before: Any
    place: Place


class Snapshot:
    """What is held outside of a model.

    Args:
        reached: the functions and classes that its code reaches.
        roots: objects that are not copied for a trace (a loss function).
    """

    def __init__(self, reached: Sequence[Reached], roots: Iterable[object] = ()) -> None:
        self._spaces: dict[int, Space] = {}
        self._contents: dict[int, _Contents] = {}
        self._met: dict[int, object] = {}
        self._mentioned = frozenset().union(*(each.mentioned for each in reached))
        for each in reached:
            for function in each.functions.values():
                self._globals(function)
            for function in each.functions.values():
                self._function(function)
            for cls in each.classes:
                self._space(Space(cls, f"class {cls.__qualname__}"))
        for root in roots:
            self._walk(root, Place(None, "", type(root).__name__), 0)

    def _globals(self, function: Any) -> None:
        space = Space(function.__globals__, f"module {function.__globals__.get('__name__', '')}", frozenset())
        self._add_names(space, names_in(function.__code__))

    def _add_names(self, space: Space, names: frozenset[str]) -> None:
        """Looks at more names of a namespace that is looked at in parts."""
        kept = self._spaces.setdefault(id(space.owner), space)
        fresh = names - kept.names if kept.names is not None else frozenset()
        if fresh:
            kept.add(fresh)
            self._values(kept, fresh, 0)

    def _function(self, function: Any) -> None:
        self._space(Space(function, f"function {function.__qualname__}"))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._space(Space(cell, f"variable {name} around {function.__qualname__}"))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._walk(value, Place(None, "", f"a default argument of {function.__qualname__}"), 0)

    def _space(self, space: Space, depth: int = 0) -> None:
        if id(space.owner) not in self._spaces and len(self._spaces) < _MOST:
            self._spaces[id(space.owner)] = space
            self._values(space, frozenset(space.before), depth)

    def _values(self, space: Space, names: frozenset[str], depth: int) -> None:
        for name in sorted(names):
            if name in space.before:
                self._walk(space.before[name], Place(space.owner, name, words(space, name)), depth)

    def _walk(self, value: Any, place: Place, depth: int) -> None:
        if isinstance(value, _LEAVES) or id(value) in self._met or depth > _DEEPEST or len(self._met) > _MOST:
            return
        self._met[id(value)] = value
        if copied := _COPIES.get(_kind(value)):
            self._contents[id(value)] = _Contents(value, copied(value), place)
            if not isinstance(value, _ARRAYS) and len(value) <= _MOST_ITEMS:
                for item in list(value.values() if isinstance(value, dict) else value):
                    self._walk(item, place, depth + 1)
        elif isinstance(value, tuple):
            for item in value:
                self._walk(item, place, depth + 1)
        elif isinstance(value, functools.partial):
            self._walk((value.func, *value.args, *value.keywords.values()), place, depth)
        elif isinstance(value, types.MethodType):
            self._walk(value.__self__, place, depth)
        else:
            self._walk_object(value, depth)

    def _walk_object(self, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._space(Space(module, type(module).__name__, without=_TORCHS), depth)
        elif isinstance(value, (types.FunctionType, types.ModuleType)):
            if is_library(value):
                return
            if isinstance(value, types.ModuleType):
                self._add_names(Space(vars(value), f"module {value.__name__}", frozenset()), self._mentioned)
            else:
                self._space(Space(value, f"function {value.__qualname__}"), depth + 1)
        elif is_opaque(value) or isinstance(value, (threading.local, types.SimpleNamespace)):
            self._space(Space(value, type(value).__qualname__), depth + 1)

    def changes(self) -> list[Change]:
        """What differs just now."""
        found = []
        for space in self._spaces.values():
            for name, was, now in space.differences():
                if not same(was, now):
                    found.append(Change(Place(space.owner, name, words(space, name)), was, now, now))
        for held, before, place in self._contents.values():
            if _differs(held, before):
                found.append(Change(place, *_grown(before, _COPIES[_kind(held)](held)), held))
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
        for space in self._spaces.values():
            for name, was, _ in space.differences():
                put(space.owner, name, was)
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


_LEAVES = (str, bytes, int, float, complex, bool, type(None), Tensor, type)
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
