"""Names of the outer namespace for programs made by hand."""

from __future__ import annotations

from paraplan.ir.execution.name import Name, Role


def named(text: str) -> Name:
    """The name of a value that prints so."""
    return Name(Role.VALUE, text)


def all_named(texts: str) -> tuple[Name, ...]:
    """Names separated by blanks."""
    return tuple(map(named, texts.split()))


def some_named(texts: str) -> tuple[Name | None, ...]:
    """Names separated by blanks, of which "-" is None."""
    return tuple(None if text == "-" else named(text) for text in texts.split())
