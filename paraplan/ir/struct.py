"""The base of every value in `ir`: frozen, keyword-only, strict when decoded.

One base serves the types that live in files (plan, cluster, profile) and the inner ones, so a value can
be written, read back and compared anywhere. Decoding never imports or executes anything.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from paraplan.ir.errors import ParaplanError

T = TypeVar("T")
_CONTROLS = re.compile("[\x1b\x90\x9b\x9d]")
_MAYBE_CONTROLS = re.compile(rb"\\u001[bB]|\\u009[0bBdD]|\xc2[\x90\x9b\x9d]")
"""What begins a sequence that terminals obey; and what may be one in JSON, escaped or as it is."""


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen value; equal fields make equal values.

    Attributes:
        left_out: fields that files do not have where they are empty, so that what was written before they were is the
            same file still.
        written_first: fields that files begin with, the others following in the order of declaration.
    """

    left_out: ClassVar[tuple[str, ...]] = ()
    written_first: ClassVar[tuple[str, ...]] = ()


def written_fields(value: msgspec.Struct) -> dict[str, Any]:
    """The fields of a value that its file has, in order, by their names there."""
    left_out = getattr(value, "left_out", ())
    names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    fields = [(key, name, getattr(value, name)) for key, name in names]
    first = {name: place for place, name in enumerate(getattr(value, "written_first", ()))}
    fields.sort(key=lambda field: first.get(field[1], len(first)))
    return {key: held for key, name, held in fields if held or name not in left_out}


def to_json(value: Any) -> bytes:
    """Canonical JSON: equal values give equal bytes.

    Args:
        value: any `Value`.
    Returns:
        UTF-8 ending in a newline; fields in the order of `written_fields`, the outer levels one item a line.
    """
    return _pretty(value, 0, 3).encode() + b"\n"


def _pretty(value: Any, depth: int, levels: int) -> str:
    if depth >= levels or getattr(getattr(value, "__struct_config__", None), "array_like", False):
        return msgspec.json.encode(value).decode()
    if isinstance(value, msgspec.Struct):
        pairs = list(written_fields(value).items())
    elif isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, (tuple, list)) and value and not isinstance(value[0], (int, float, str)):
        return _block("[", (_pretty(item, depth + 1, levels) for item in value), "]", depth)
    else:
        return msgspec.json.encode(value).decode()
    items = (f"{msgspec.json.encode(key).decode()}: {_pretty(item, depth + 1, levels)}" for key, item in pairs)
    return _block("{", items, "}", depth)


def _block(start: str, items: Iterable[str], stop: str, depth: int) -> str:
    lines = list(items)
    if not lines:
        return start + stop
    pad = " " * (depth + 1)
    return start + "\n" + ",\n".join(pad + line for line in lines) + "\n" + " " * depth + stop


def from_json(data: bytes, kind: type[T], what: str, error: type[ParaplanError]) -> T:
    """Decode strictly.

    Args:
        data: JSON text.
        kind: the `Value` type expected.
        what: how messages call the source, e.g. the file's name.
        error: the exception to raise.
    Raises:
        error: malformed or too deeply nested JSON, an unknown key, a wrong type or a missing field, with its path; or
            text with sequences that terminals obey.
    """
    try:
        made = msgspec.json.decode(data, type=kind)
        controls = _controls(msgspec.json.decode(data)) if _MAYBE_CONTROLS.search(data) else ""
    except (msgspec.DecodeError, RecursionError) as fault:  # of nesting
        raise error(f"{what}: {fault}") from None
    if controls:
        raise error(f"{what}: text that would drive a terminal, {controls!r:.80}: the file was edited or damaged")
    return made


def _controls(value: Any) -> str:
    """The first text in some data that would drive a terminal; "" where none does."""
    if isinstance(value, str):
        return value if _CONTROLS.search(value) else ""
    parts = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(_controls, parts)), "")


def read_bytes(path: str | Path, what: str, error: type[ParaplanError]) -> bytes:
    """A file's bytes.

    Args:
        path: of the file.
        what: it is, for the error.
        error: that is raised.
    Raises:
        error: the file cannot be read; says which and why.
    """
    try:
        return Path(path).read_bytes()
    except OSError as fault:
        raise error(f"cannot read {what} {str(path)!r}: {fault.strerror}") from None


def check_writable(path: str | Path, what: str, error: type[ParaplanError]) -> None:
    """Refuse, before the work for it is done, a file that cannot be written.

    Args:
        path, what, error: as of `write_bytes`.
    Raises:
        error: so it is; says which and why.
    """
    target = Path(path).resolve()
    at = target if target.exists() else target.parent
    if target.is_dir() or not at.exists() or not os.access(at, os.W_OK):
        code = errno.EISDIR if target.is_dir() else errno.EACCES if at.exists() else errno.ENOENT
        raise error(
            f"cannot write {what} {str(path)!r}: {os.strerror(code)}; give a file in a folder that can be written"
        )


def write_bytes(path: str | Path, data: bytes, what: str, error: type[ParaplanError]) -> None:
    """Write a file so that at any time it is as it was or whole: beside it, then in its place.

    Args:
        path: of the file.
        data: to be written.
        what: it is, for the error.
        error: that is raised.
    Raises:
        error: the file cannot be written, and is as it was; says which and why.
    """
    target = Path(path).resolve()
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if target.exists() and not target.is_file():  # a terminal, a pipe
            target.write_bytes(data)
            return
        if target.exists() and not os.access(target, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        try:
            beside.write_bytes(data)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as fault:
        raise error(f"cannot write {what} {str(path)!r}: {fault.strerror}") from None
