"""The base of every value in `ir`: frozen, keyword-only, strict when decoded.

One base serves the types that live in files (plan, cluster, profile) and the inner ones, so a value can
be written, read back and compared anywhere. Decoding never imports or executes anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from paraplan.ir.errors import ParaplanError

T = TypeVar("T")


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen value; equal fields make equal values."""


def to_json(value: Any) -> bytes:
    """Canonical JSON: equal values give equal bytes.

    Args:
        value: any `Value`.
    Returns:
        Indented UTF-8 JSON ending in a newline; fields in declaration order.
    """
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def from_json(data: bytes, kind: type[T], what: str, error: type[ParaplanError]) -> T:
    """Decode strictly.

    Args:
        data: JSON text.
        kind: the `Value` type expected.
        what: how messages call the source, e.g. the file's name.
        error: the exception to raise.
    Raises:
        error: malformed JSON, an unknown key, a wrong type or a missing field, with its path.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as fault:
        raise error(f"{what}: {fault}") from None


def read_bytes(path: str | Path, what: str, error: type[ParaplanError]) -> bytes:
    """A file's bytes.

    Raises:
        error: the file cannot be read; says which and why.
    """
    try:
        return Path(path).read_bytes()
    except OSError as fault:
        raise error(f"cannot read {what} {str(path)!r}: {fault.strerror}") from None
