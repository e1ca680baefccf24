"""Parts of the package that load on first use, so that a light command does not wait for torch or a solver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A function from a name to the thing itself, imported from its module when first asked for."""

    def part(name: str) -> Any:
        return getattr(import_module(homes[name]), name)

    return part
