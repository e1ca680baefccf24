"""JSON Schema of the files people write, from the types themselves.

Descriptions are the docstrings' and units those of the fields' names, so that neither is said twice.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec

from paraplan.ir.struct import Value

_UNITS = {
    "flops_per_s": "operations per second",
    "bytes_per_s": "bytes per second",
    "_bytes": "bytes",
    "_s": "seconds",
}
_FIELD = re.compile(r"^(\w+(?:, \w+)*): (.*)$")


def field_docs(kind: type) -> dict[str, str]:
    """Field -> what its class' docstring says of it, under "Attributes:"."""
    found: dict[str, str] = {}
    names: list[str] = []
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        text = line.strip()
        if match := _FIELD.match(text) if line.startswith("    ") and not line.startswith("     ") else None:
            names = match[1].split(", ")
            found |= dict.fromkeys(names, match[2])
        elif text:
            found |= {name: f"{found[name]} {text}" for name in names}
    return found


def unit_of(field: str) -> str:
    """The unit a field's name ends in; empty where it has none."""
    return next((unit for suffix, unit in _UNITS.items() if field.endswith(suffix)), "")


def json_schema(kind: type[Value]) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a type's files.

    Args:
        kind: a `Value`; the types it holds are described too.
    Returns:
        The schema; every property has a description, quantities have a "unit" and what must be above 0 says so.
    """
    schema = msgspec.json.schema(kind)
    for name, component in schema.get("$defs", {}).items():
        if "properties" not in component:
            continue  # an enum, or a value written as an array: no fields to describe
        of = _holds(kind, name)
        docs = field_docs(of)
        component["description"] = inspect.cleandoc(of.__doc__ or "").partition("\n\nAttributes:")[0]
        for field in msgspec.structs.fields(of):
            _describe(component["properties"][field.encode_name], field.name, docs.get(field.name, ""))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _describe(entry: dict[str, Any], field: str, text: str) -> None:
    if text:
        entry["description"] = text
    if unit := unit_of(field):
        entry["unit"] = unit
    number = entry.get("additionalProperties", entry)
    if isinstance(number, dict) and number.get("type") in ("number", "integer"):
        # A field with a default may be left at 0: nothing to offload to, nothing to wait for.
        number.update({"minimum": 0} if "default" in entry or field == "latency_s" else {"exclusiveMinimum": 0})


def _holds(kind: type, name: str) -> type:
    """The struct of a name among those a type holds."""
    seen = [kind]
    for struct in seen:
        if struct.__name__ == name:
            return struct
        seen += [
            inner for field in msgspec.structs.fields(struct) for inner in _structs(field.type) if inner not in seen
        ]
    raise KeyError(name)


def _structs(kind: Any) -> list[type]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [inner for part in getattr(kind, "__args__", ()) for inner in _structs(part)]
