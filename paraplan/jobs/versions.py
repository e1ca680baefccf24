"""What a plan is made with."""

from __future__ import annotations

from importlib import metadata

from paraplan import __version__

_LIBRARIES = ("torch", "transformers", "ortools", "pulp")


def versions() -> dict[str, str]:
    """Of paraplan and the libraries that shape a plan, as far as they are installed."""
    found = {"paraplan": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
