"""Sizes in bytes as people write and read them."""

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
_SAID = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def parse_bytes(text: int | str) -> int:
    """`"2GiB"` to bytes.

    Raises:
        ConstraintError: no such size.
    """
    match = _SIZE.match(str(text).strip()) if isinstance(text, int | str) else None
    if match is None or ("." in match[1] and match[2] in (None, "B")):
        raise ConstraintError(f"{text!r} is no size in bytes; write e.g. 2GiB, 512MiB or 1000000")
    return int(float(match[1]) * _UNITS[match[2] or "B"])


def say_size(nbytes: float) -> str:
    """Bytes as a message says them: `1610612736` as "1.50 GiB"."""
    size, unit = next((size, unit) for size, unit in _SAID if nbytes >= size / 8 or size == 1)
    return f"{nbytes / size:.2f} {unit}" if size > 1 else f"{nbytes:.0f} {unit}"
