"""What a forward and its loss function read of Python: numbers, text, lists, tensors held by modules and by objects of
the user's classes, globals and variables around functions. All of it is a constant of the captured graphs.

Attributes are seen as they are read, while the fake copy is exported: `nn.Module`, and the classes of objects found on
the way, look attributes up through the recorder then. What is kept is the value of the caller's own object, not the
copy's. Globals and closures are found in the code of what is called (`code`).

An attribute that forward changes after it read it carries something from step to step that no graph has. It is refused,
unless nothing is made of it (a counter: shown by running the forward once more with a value that cannot be used) or it
is a constant made once where there was None.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from paraplan.capture.python_state.aliases import names_of
from paraplan.capture.python_state.carried_attributes import tensors_in
from paraplan.capture.python_state.code import Outside, is_library, is_users, read_next
from paraplan.capture.python_state.dynamic import find_owner
from paraplan.capture.python_state.left_state import TORCHS, ModuleAttributes, is_cached_property
from paraplan.capture.python_state.outside.around import Around
from paraplan.capture.python_state.setting_paths import (
    is_slot,
    outside_value,
    pattern_of,
    places,
    set_at,
    static_of,
    value_at,
    where_of,
)
from paraplan.capture.python_state.values import (
    ABSENT,
    CONTAINERS,
    is_data,
    is_opaque,
    is_plain,
    named,
    text_of,
    token,
)
from paraplan.kernels.torch_private import is_fake

_OURS = "paraplan.ir."
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Read(NamedTuple):
    """An attribute, or a constant item of one, of a module or object.

    Attributes:
        owner: the caller's own.
        name: of the attribute.
        item: a one-tuple with the item that was read of it, or ().
        place: name of the module it was reached from, and the path from there; None where it is not of the model.
        line: where it was first read.
    """

    owner: Any
    name: str
    item: tuple[Any, ...]
    place: tuple[str, str] | None
    line: str

    def value(self, names: Mapping[int, str]) -> object:
        """What it is now; `names` as for `named`."""
        return named(value_at(self.owner, self.name, self.item), names)

    @property
    def where(self) -> str:
        """What messages call it."""
        return where_of(self.owner, self.name, self.item, self.place)


class _Seen(NamedTuple):
    owner: Any
    name: str
    item: tuple[Any, ...]
    before: object
    was: object
    line: str
    held: object = ABSENT


_UNSEEN = _Seen(None, "", (), None, None, "")


class Recorder:
    """The reads of one export.

    Args:
        model: the fake copy that is exported.
        original: the caller's object for an object of the copy; None for what was not copied.
        loss_fn: or None.
        declared: (id of an object of the copy or the caller's, attribute) that are inputs and not constants.
    """

    def __init__(
        self,
        model: nn.Module,
        original: Callable[[object], object | None],
        loss_fn: object,
        declared: frozenset[tuple[int, str]] = frozenset(),
    ) -> None:
        self.model, self.original, self.declared, self.loss_fn = model, original, declared, loss_fn
        self._shared: set[int] = set()
        self.active = False
        self.around = Around(model, loss_fn)
        self._seen: dict[tuple[int, str, tuple[Any, ...]], _Seen | None] = {}
        self._names = names_of(model)
        self.links: dict[tuple[int, str], Any] = {}
        self._places: dict[int, tuple[str, str]] = {id(m): (name, "") for name, m in reversed(list(_named(model)))}
        self._changed: list[_Seen] = []
        self._past: set[tuple[int, str]] = set()
        self.written: list[_Seen] = []
        self._undo: list[Callable[[], None]] = []
        self._watched: set[type] = set()
        self._modules = ModuleAttributes(model)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Under it, attributes are looked up through the recorder; what is read while `active` is noted."""
        try:
            self._watch(nn.Module)
            self._meet(self.loss_fn, None)
            for found in self.around.met():
                self._meet(found, None)
            with self.around.kept():
                yield
        finally:
            while self._undo:
                self._undo.pop()()
            self._watched.clear()
            self._restore()

    def _watch(self, cls: type) -> None:
        if any(each in self._watched for each in cls.__mro__ if each is not object):
            return
        self._watched.add(cls)
        read, write, recorder = cls.__getattribute__, cls.__setattr__, self

        def __getattribute__(self: Any, name: str) -> Any:
            if recorder.active and name == "__dict__":
                recorder.note_all(self, sys._getframe(1))
            if not recorder.active or name in TORCHS or name.startswith("__"):
                return read(self, name)
            try:
                value = read(self, name)
            except AttributeError:
                recorder.note_absent(self, name)
                raise
            recorder.note(self, name, value)
            return value

        def __setattr__(self: Any, name: str, value: Any) -> None:
            if recorder.active:
                recorder.note_write(self, name)
            write(self, name, value)

        for name, new in (("__getattribute__", __getattribute__), ("__setattr__", __setattr__)):
            self._undo.append(_set(cls, name, new))

    def note(self, owner: Any, name: str, value: object) -> None:
        """An attribute is read; noted the first time, unless it is declared dynamic.

        Args:
            owner: the object it is read from, of the copy or the caller's.
            name: of the attribute.
            value: what it gave.
        """
        if (id(owner), name, ()) in self._seen or (id(owner), name) in self.declared:
            return
        self.active = False
        try:
            self._note(owner, name, value)
        finally:
            self.active = True

    def _note(self, owner: Any, name: str, value: object) -> None:
        if type(owner).__module__.startswith(_OURS):
            return
        held = getattr(owner, "__dict__", {})
        if name not in held and hasattr(static_of(type(owner), name), "__get__") and not is_slot(type(owner), name):
            return  # a method, or a property: what it reads is seen itself
        if is_cached_property(owner, name) and name not in vars(self._live(owner)):
            return  # computed just now
        if not is_data(value):
            self._meet(value, self._place(owner, name))
            self._seen[id(owner), name, ()] = None
            if is_opaque(value):
                self.links[id(owner), name] = owner
            return
        frame = _caller()
        item = read_next(frame) if frame is not None and isinstance(value, dict | list | tuple) else None
        key = (id(owner), name, item or ())
        if key in self._seen:
            return
        self._meet(value, self._place(owner, name))
        line = "" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        now = value_at(owner, name, item or ())
        before = token(named(now, self._names), tracing=True)
        self._seen[key] = _Seen(owner, name, item or (), before, _shown(now), line, now)

    def note_all(self, owner: Any, frame: types.FrameType) -> None:
        """All of an object's attributes are looked at, in the user's code or, of an object of theirs, anywhere."""
        if isinstance(owner, nn.Module) and not is_users(frame):
            return
        self.active = False
        names = [name for name in owner.__dict__ if name not in TORCHS]
        self.active = True
        for name in names:
            getattr(owner, name)

    def note_absent(self, owner: Any, name: str) -> None:
        """An attribute is looked for and not there."""
        if isinstance(owner, nn.Module) and any(name in vars(owner).get(kind, ()) for kind in _REGISTRIES):
            return
        key = (id(owner), name, ())
        if key not in self._seen and (id(owner), name) not in self.declared and not name.startswith("_"):
            self._seen[key] = _Seen(owner, name, (), token(ABSENT), ABSENT, "")

    def note_write(self, owner: Any, name: str) -> None:
        """An attribute is written: a read that follows sees what this forward made."""
        self._seen.setdefault((id(owner), name, ()), None)

    def _place(self, owner: object, name: str) -> tuple[str, str] | None:
        place = self._places.get(id(owner))
        return None if place is None else (place[0], f"{place[1]}.{name}" if place[1] else name)

    def _meet(self, value: object, place: tuple[str, str] | None, depth: int = 0) -> None:
        """Watch the objects in a value, and remember where they are."""
        if isinstance(value, CONTAINERS) and depth < 4 and len(value) <= 1000:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                self._meet(item, None if place is None else (place[0], f"{place[1]}[{key!r}]"), depth + 1)
            return
        if isinstance(value, functools.partial):
            self._meet([value.func, *value.args, *value.keywords.values()], None, depth + 1)
        if isinstance(value, types.MethodType):
            self._meet(value.__self__, place, depth)
        if isinstance(value, nn.Module) or is_opaque(value):
            users = not is_library(type(value)) or isinstance(value, nn.Module)
            parts = value.modules() if isinstance(value, nn.Module) else (value,)
            self._shared.update(map(id, parts if users else ()))
            if place is not None:
                self._places.setdefault(id(value), place)
            if not isinstance(value, nn.Module):
                self._watch(type(value))

    def reads(self, names: Mapping[int, str]) -> list[Read]:
        """What was read before it was written, of objects that were there before the forward; `names` are those of the
        caller's parameters and buffers."""
        changed = set(map(id, self._changed))
        return [
            Read(owner, each.name, each.item, self.place_of(each), each.line)
            for each in self._seen.values()
            if each is not None and id(each) not in changed and (id(each.owner), each.name) not in self._past
            for owner in (self._live(each.owner),)
            if owner is not None and not _has_fake(named(value_at(owner, each.name, each.item), names))
        ]

    def linked(self) -> tuple[tuple[Any, str], ...]:
        """The attributes that hold the objects whose attributes were read."""
        return tuple((self._live(owner), name) for (_, name), owner in self.links.items())

    def _live(self, owner: object) -> object:
        found = self.original(owner)
        return owner if found is None else found

    def place_of(self, each: _Seen) -> tuple[str, str] | None:
        """Module and path of what was seen."""
        place = self._place(each.owner, each.name)
        return place and (place[0], place[1] + "".join(f"[{item!r}]" for item in each.item))

    def changed(self) -> list[_Seen]:
        """Of the model, the loss and their objects, what this forward read and then changed; to be called at its end
        (export undoes it)."""
        past = list(self._changed_past())
        self._past = keys = {(id(each.owner), each.name) for each in past}
        self._changed = past + [
            each
            for each in self._seen.values()
            if each is not None
            and (id(each.owner), each.name) not in keys
            and (self.original(each.owner) is not None or id(each.owner) in self._shared)
            and token(named(value_at(each.owner, each.name, each.item), self._names), tracing=True) != each.before
        ]
        return self._changed

    def _changed_past(self) -> Iterator[_Seen]:
        """Attributes of modules that are others than at the start and were written past `__setattr__`
        (`self.__dict__[...]`), and the modes of modules; those written first are noted in `written`."""
        self.written = []
        for module, name, was, now in self._modules.differences():
            if not is_cached_property(module, name) or tensors_in(now):
                seen = self._seen.get((id(module), name, ()), _UNSEEN)
                start = token(named(was, self._names), tracing=True)
                if name == "training" or seen is _UNSEEN or (seen is not None and seen.before != start):
                    yield _Seen(module, name, (), start, _shown(was), "", was)
                elif seen is None:
                    self.written.append(_Seen(module, name, (), start, _shown(was), "", was))

    def _restore(self) -> None:
        """What is no copy gets back what this forward replaced."""
        for each in self._changed:
            if self.original(each.owner) is None and value_at(each.owner, each.name, each.item) is not each.held:
                set_at(each.owner, each.name, each.item, each.held)

    def outside(self) -> list[Outside]:
        """The data of globals and closures that the code names and this forward left as it was."""
        values = [(each, outside_value(each)) for each in self.around.constant()]
        return [each for each, value in values if is_data(value) and not _has_fake(value)]


def _has_fake(value: object) -> bool:
    if isinstance(value, Tensor):
        return is_fake(value)
    value = vars(value) if isinstance(value, types.SimpleNamespace) else value
    if isinstance(value, dict):
        return any(map(_has_fake, value.values()))
    return isinstance(value, CONTAINERS) and any(map(_has_fake, value))


def _shown(value: object) -> object:
    """A value as it is now, whatever becomes of it."""
    return copy.copy(value) if is_plain(value) else f"a {type(value).__name__}"


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return model.named_modules()


def _set(cls: type, name: str, new: object) -> Callable[[], None]:
    """Sets a class' attribute; returns what undoes it."""
    if name not in vars(cls):
        setattr(cls, name, new)
        return functools.partial(delattr, cls, name)
    old = vars(cls)[name]
    setattr(cls, name, new)
    return functools.partial(setattr, cls, name, old)


def _caller() -> Any:
    """The frame that reads the attribute: the first outside of this file."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame


def settings_of(
    model: nn.Module, reads: Sequence[Read], outside: Sequence[Outside]
) -> tuple[dict[str, str], tuple[Read, ...]]:
    """Reads as a program keeps them, of equal modules with equal values one; and those that no key leads to.

    A pattern stands for modules of which each that has the attribute was read: another value elsewhere is nobody's.

    Args:
        model: the caller's own.
        reads: what was read of it, of the loss function and of objects they hold.
        outside: globals and closures that were read; those with a key become settings.
    Returns:
        Texts of values by key (`setting_keys`), sorted; the reads that no key leads to.
    """
    names = names_of(model)
    texts = {each.place: text_of(each.value(names)) for each in reads if each.place is not None}
    grouped: dict[tuple[str, str], set[str]] = {}
    for (module, path), text in texts.items():
        grouped.setdefault((pattern_of(module), path), set()).add(text)
    read = {(id(each.owner), each.name, each.item) for each in reads}
    patterns = {f"{pattern}:{path}" for (pattern, path), all_texts in grouped.items() if len(all_texts) == 1}
    unread = {key for key, at in places(model, patterns) if (id(at.owner), at.name, at.item) not in read}
    shared, keys = patterns - unread, {}
    for module, path in texts:
        key = f"{pattern_of(module)}:{path}"
        keys[module, path] = key if key in shared else f"{module}:{path}"
    found = {keys[place]: text for place, text in texts.items()}
    reached = {(id(place.owner), place.name, place.item) for _, place in places(model, found)}
    unnamed = tuple(each for each in reads if (id(each.owner), each.name, each.item) not in reached)
    lost = {keys[each.place] for each in unnamed if each.place is not None}
    found = {key: text for key, text in found.items() if key not in lost}
    found |= {each.key: text_of(outside_value(each)) for each in outside if each.key}
    return dict(sorted(found.items())), unnamed


def declared_of(models: Iterable[nn.Module], paths: Iterable[str]) -> frozenset[tuple[int, str]]:
    """(id of the owner, attribute) of declared attributes, in a model and in its copy."""
    found = [find_owner(model, path) for model in models for path in paths]
    return frozenset((id(owner), name) for owner, name in found)
