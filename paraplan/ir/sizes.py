"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from paraplan.ir.errors import ConstraintError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|kB|KB|MB|GB|TB)?$")
_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_bytes(text: int | str) -> int:
    """`"2GiB"` to bytes.

    Raises:
        ConstraintError: no such size.
    """
    match = _SIZE.match(str(text).strip())
    if match is None:
        raise ConstraintError(f"{text!r} is no size in bytes; write e.g. 2GiB, 512MiB or 1000000")
    return int(float(match[1]) * _UNITS[match[2] or "B"])
