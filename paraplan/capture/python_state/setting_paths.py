"""Where the settings of a program are in a model: "layers.*:attention.heads" and back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from paraplan.capture.python_state.code import Outside
from paraplan.capture.python_state.setting_keys import SettingKind, setting_key
from paraplan.capture.python_state.values import ABSENT
from paraplan.ir.errors import CaptureError
from paraplan.ir.model.program import Program

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def pattern_of(name: str) -> str:
    """A module's name with its numbers left out."""
    return _NUMBER.sub("*", name)


class Place(NamedTuple):
    """Where a program's setting is in a model.

    Attributes:
        owner, name, item: as of a `Read`.
        path: from the model, as `dynamic` takes it.
        where: what messages call it.
        chain: (owner, attribute) of the objects on the way from the module.
    """

    owner: Any
    name: str
    item: tuple[Any, ...]
    path: str
    where: str
    chain: tuple[tuple[Any, str], ...] = ()


def settings_in(model: nn.Module, program: Program) -> Iterator[tuple[str, Place]]:
    """The places of a program's settings in a model, but for attributes that are its inputs."""
    declared = {entry.attribute for entry in program.batch.values()}
    return ((key, place) for key, place in places(model, program.settings) if place.path not in declared)


_STEP = re.compile(r"\[((?:'[^']*'|\"[^\"]*\"|[^\]])*)\]|\.?([^.\[\]]+)")


def places(model: nn.Module, keys: Iterable[str]) -> Iterator[tuple[str, Place]]:
    """(key, place) of the settings that are attributes; a key may have several places, or none.

    Nothing of the model is called: properties are no settings.
    """
    modules: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for key in dict.fromkeys((name, pattern_of(name))):
            modules.setdefault(key, []).append((name, module))
    for key in keys:
        kind, pattern, path = setting_key(key)
        if kind is not SettingKind.ATTRIBUTE or not path:
            continue
        steps = [_item(m[1]) if m[2] is None else m[2] for m in _STEP.finditer(path)]
        for name, module in modules.get(pattern, ()):
            found = _walk(module, steps)
            if found is not None:
                (owner, attribute, item), chain = found
                if name != pattern and value_at(owner, attribute) is ABSENT:
                    continue  # layers of several classes have numbers for names
                whole = f"{name}.{path}" if name else path
                yield key, Place(owner, attribute, item, whole, where_of(owner, attribute, item, (name, path)), chain)


def _item(text: str) -> tuple[Any, ...]:
    try:
        return (ast.literal_eval(text),)
    except (ValueError, SyntaxError):
        return (text,)


def _walk(owner: Any, steps: list[Any]) -> tuple[tuple[Any, str, tuple[Any, ...]], tuple[tuple[Any, str], ...]] | None:
    """The last owner, attribute and item of a path, and what is on the way; None where it is none of data."""
    chain: list[tuple[Any, str]] = []
    for index, step in enumerate(steps):
        if isinstance(step, tuple):
            try:
                owner = owner[step[0]]
            except (LookupError, TypeError):
                return None
            continue
        static = static_of(type(owner), step)
        held = step in getattr(owner, "__dict__", {})
        if not held and hasattr(static, "__get__") and not is_slot(type(owner), step):
            return None
        rest = steps[index + 1 :]
        if not rest or (len(rest) == 1 and isinstance(rest[0], tuple)):
            return (owner, step, rest[0] if rest else ()), tuple(chain)
        chain.append((owner, step))
        owner = value_at(owner, step)
    return None


def value_at(owner: object, name: str, item: tuple[Any, ...] = ()) -> object:
    """An attribute, or an item of it; `ABSENT` where it is not there.

    Args:
        owner: the object that has it.
        name: of the attribute.
        item: a one-tuple with a key or an index into it; () for the attribute itself.
    """
    try:
        found = getattr(owner, name)
        return found[item[0]] if item else found
    except (AttributeError, LookupError, TypeError):
        return ABSENT


def set_at(owner: Any, name: str, item: tuple[Any, ...], value: object) -> None:
    """Set an attribute, or an item of it.

    Args:
        owner, name, item: as `value_at` takes them.
        value: where it is `ABSENT`, nothing is set.
    """
    if value is ABSENT:
        return
    if item:
        getattr(owner, name)[item[0]] = value
    else:
        setattr(owner, name, value)


def put_at(owner: Any, name: str, item: tuple[Any, ...], value: object) -> None:
    """Set an attribute, or an item of it, to a value that its class might refuse (a field whose type is checked).

    Args:
        owner, name, item, value: as `set_at` takes them.
    Raises:
        CaptureError: it is another value that is read then.
    """
    try:
        set_at(owner, name, item, value)
    except Exception as fault:  # what a class raises of a value is its own
        if item or not hasattr(owner, "__dict__"):
            raise CaptureError(f"{where_of(owner, name, item, None)} takes no other value") from fault
        object.__setattr__(owner, name, value)
    if value is not ABSENT and value_at(owner, name, item) is not value:
        raise CaptureError(f"{where_of(owner, name, item, None)} takes no other value")


def static_of(cls: type, name: str) -> object:
    """What a class says of an attribute, nothing being called."""
    return next((vars(each)[name] for each in cls.__mro__ if name in vars(each)), None)


def is_slot(cls: type, name: str) -> bool:
    """Whether a class keeps an attribute in a slot."""
    return type(static_of(cls, name)).__name__ == "member_descriptor"


def outside_value(each: Outside) -> object:
    """What a global or closure is now; `ABSENT` where it is not there."""
    try:
        return each.value()
    except (LookupError, AttributeError, ValueError, TypeError):
        return ABSENT


def where_of(owner: object, name: str, item: tuple[Any, ...], place: tuple[str, str] | None) -> str:
    """What messages call an attribute: "tau of Encoder 'layers.0'".

    Args:
        owner, name, item: as `value_at` takes them.
        place: name of the module it is reached from, and the path from there; None where it is not of the model.
    """
    shown = name + "".join(f"[{each!r}]" for each in item)
    if place is None:
        return f"{shown} of {type(owner).__name__}"
    module = f" {place[0]!r}" if place[0] else ""
    inner = f" ({place[1]})" if place[1] != shown else ""
    return f"{shown} of {type(owner).__name__}{module}{inner}"
