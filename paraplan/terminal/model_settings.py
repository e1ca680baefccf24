"""Settings of a model as the command line gives them."""

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
