"""Namespaces of a process: what a class, function, object, closure's cell or module holds under names."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

from paraplan.capture.python_state.setting_paths import is_slot
from paraplan.capture.python_state.values import ABSENT, is_plain

_CELL = "cell_contents"


class Namespace:
    """The names of one owner, and what they held when they were first looked at.

    Args:
        owner: a class, function, object, closure's cell, or a module's namespace (a dict).
        where: what messages call it.
        names: those looked at; None for all.
        without: those that are not.
    """

    def __init__(
        self, owner: Any, where: str, names: frozenset[str] | None = None, without: frozenset[str] = frozenset()
    ) -> None:
        self.owner, self.where, self.names, self._without = owner, where, names, without
        self.before = self._now()

    def add(self, names: frozenset[str]) -> None:
        """Looks at more names."""
        self.names = (self.names or frozenset()) | names
        self.before |= {name: self.owner[name] for name in names if name in self.owner}

    def _now(self) -> dict[str, object]:
        held = names_of(self.owner)
        if self.names is not None:
            return {name: held[name] for name in self.names if name in held}
        return {name: value for name, value in held.items() if name not in self._without and not _is_pythons(name)}

    def differences(self) -> Iterator[tuple[str, object, object]]:
        """Names with what they held and hold; `ABSENT` for nothing."""
        now = self._now()
        for name in self.before.keys() | now.keys():
            was, is_now = self.before.get(name, ABSENT), now.get(name, ABSENT)
            if was is not is_now:
                yield name, was, is_now


def names_of(owner: Any) -> Mapping[str, object]:
    """What an owner holds, past the recorder of what a forward reads."""
    if isinstance(owner, dict):
        return owner
    if isinstance(owner, types.CellType):
        return {} if owner == types.CellType() else {_CELL: owner.cell_contents}
    if isinstance(owner, (type, types.FunctionType)):
        return vars(owner)
    found: dict[str, object] = {}
    for name in (name for cls in type(owner).__mro__ for name in _slots(cls)):
        try:
            found[name] = object.__getattribute__(owner, name)
        except AttributeError:
            continue
    return found | (_dict_of(owner) or {})


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def put(owner: Any, name: str, value: object) -> None:
    """Has an owner hold a value under a name.

    Args:
        owner, name: as in a `Namespace`.
        value: `ABSENT` for nothing.
    """
    held = None if isinstance(owner, type) or is_slot(type(owner), name) else _dict_of(owner)
    if held is None:
        base = type if isinstance(owner, type) else object
        base.__delattr__(owner, name) if value is ABSENT else base.__setattr__(owner, name, value)
    elif value is ABSENT:
        held.pop(name, None)
    else:
        held[name] = value


def _dict_of(owner: Any) -> dict[str, object] | None:
    if isinstance(owner, dict):
        return owner
    try:
        found = owner.__dict__ if isinstance(owner, threading.local) else object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _is_pythons(name: object) -> bool:
    return isinstance(name, str) and name.startswith("__") and name.endswith("__")


def same(was: object, now: object) -> bool:
    """Whether two values are one, or equal where that says all."""
    if was is now:
        return True
    return is_plain(was) and is_plain(now) and type(was) is type(now) and was == now


def words(namespace: Namespace, name: str) -> str:
    """What messages call a name of a namespace."""
    if name == _CELL:
        return namespace.where
    if isinstance(namespace.owner, dict):
        return f"global {name} of {namespace.where}"
    return f"{name} of {namespace.where}"
