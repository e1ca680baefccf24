"""Versions of the libraries that shape a plan."""

from __future__ import annotations

from importlib import metadata

_LIBRARIES = ("torch", "transformers", "ortools", "pulp")


def library_versions() -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
