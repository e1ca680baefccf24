"""An option and its value as each interface writes them: `tp=2` in Python, `--tp 2` on the command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

Flags = Mapping[str, str]
"""Keywords to flags of the command line; of Python there are none."""
PYTHON: Flags = MappingProxyType({})


@runtime_checkable
class Part(Protocol):
    """Part of a message that interfaces write differently."""

    def written(self, flags: Flags) -> str: ...


class OptionValue(NamedTuple):
    """An option with a value."""

    keyword: str
    value: Any

    def written(self, flags: Flags) -> str:
        """As an interface writes it; what the command line has no flag for, as Python does."""
        if self.keyword not in flags:
            return f"{self.keyword}={self.value!r}"
        if self.value is True:
            return flags[self.keyword]
        return f"{flags[self.keyword]} {_as_text(self.value)}"


class OptionName(NamedTuple):
    """An option without a value."""

    keyword: str

    def written(self, flags: Flags) -> str:
        """As an interface writes it."""
        return flags.get(self.keyword, self.keyword)


class Phrase:
    """Words with such parts.

    Args:
        template: the words; where parts follow, each `{}` stands for the next of them.
        parts: `Part`s, tuples of parts, which are joined by commas, and any other values, as their texts.
    """

    def __init__(self, template: str, *parts: object) -> None:
        self.template, self.parts = template, parts

    def __str__(self) -> str:
        return self.written(PYTHON)

    def written(self, flags: Flags) -> str:
        """As an interface writes it."""
        if not self.parts:
            return self.template
        return self.template.format(*(_written(each, flags) for each in self.parts))


def _written(part: object, flags: Flags) -> str:
    if isinstance(part, Part):
        return part.written(flags)
    return ", ".join(_written(each, flags) for each in part) if isinstance(part, tuple) else str(part)


def _as_text(value: Any) -> str:
    """A value as the command line reads it: axes `2,4`, stages `0:3,3:6`."""
    if isinstance(value, (tuple, list)):
        value = ",".join(":".join(map(str, each)) if isinstance(each, (tuple, list)) else str(each) for each in value)
    return shlex.quote(str(value))
