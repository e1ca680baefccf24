"""Settings of a model, meshes, degrees and stages as the command line gives them."""

from __future__ import annotations

import json
from typing import Any

from paraplan.ir.errors import ConstraintError


def parse_settings(texts: list[str]) -> dict[str, Any]:
    """`["n_layer=2", "name=x"]` to values: JSON where it is, else text.

    Raises:
        ConstraintError: no `=`, or a key given twice.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConstraintError(f"--set {text!r}: write key=value, e.g. --set n_layer=4")
        if key in found:
            raise ConstraintError(f"--set {key} is given twice")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def parse_mesh(text: str | None) -> tuple[int, ...] | None:
    """`"8,8"` to (8, 8).

    Raises:
        ConstraintError: no such mesh.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConstraintError(f"--mesh {text!r}: write axis sizes with commas, e.g. 8,8") from None


def parse_degree(text: str | None) -> int | str | None:
    """`"4"` to 4, `"auto"` to itself.

    Raises:
        ConstraintError: no such degree.
    """
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ConstraintError(f"--pp {text!r}: give a number of groups of devices, or auto") from None


def parse_stages(text: str | None) -> tuple[tuple[int, int], ...] | None:
    """`"0:3,3:6"` to ((0, 3), (3, 6)).

    Raises:
        ConstraintError: no such stages.
    """
    if text is None:
        return None
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((int(first), int(stop)) for first, stop in pairs)
    except ValueError:
        raise ConstraintError(f"--stages {text!r}: write first:stop segments with commas, e.g. 0:3,3:6") from None
