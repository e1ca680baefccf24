"""The schema of cluster files: every field described, every quantity with its unit, and nothing but the truth."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.machine.cluster import ClusterSpec, NodeGroup
from paraplan.ir.machine.device import Device, Link
from paraplan.ir.plan import Plan, Split
from paraplan.ir.schema import field_docs, json_schema, unit_of
from paraplan.ir.struct import Value, from_json, to_json

SCHEMA = json_schema(ClusterSpec)
KINDS = (ClusterSpec, NodeGroup, Device, Link)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_described_as_its_docstring_says(kind: type[Value]) -> None:
    entry = SCHEMA["$defs"][kind.__name__]
    assert entry["description"] and "Attributes" not in entry["description"]
    assert list(entry["properties"]) == list(kind.__struct_fields__)
    for name, field in entry["properties"].items():
        assert field["description"] in " ".join((kind.__doc__ or "").split())
        assert field.get("unit", "") == unit_of(name)


def test_units_and_bounds() -> None:
    device, link = (SCHEMA["$defs"][name]["properties"] for name in ("Device", "Link"))
    assert device["memory_bytes"]["unit"] == "bytes" and device["memory_bytes"]["exclusiveMinimum"] == 0
    assert device["flops_per_s"]["unit"] == "operations per second"
    assert device["flops_per_s"]["additionalProperties"]["exclusiveMinimum"] == 0
    assert device["launch_s"]["unit"] == "seconds" and device["launch_s"]["minimum"] == 0
    assert link["bytes_per_s"]["unit"] == "bytes per second" and link["latency_s"]["minimum"] == 0
    assert not unit_of("nodes") and not unit_of("sources")


def test_unknown_keys_are_forbidden_and_what_has_no_default_is_required() -> None:
    for kind in KINDS:
        entry = SCHEMA["$defs"][kind.__name__]
        assert entry["additionalProperties"] is False
        assert entry["required"] == [field.name for field in msgspec.structs.fields(kind) if field.required]


def test_other_files_have_one_too() -> None:
    found = json_schema(Plan)
    assert found["$defs"]["ClusterSpec"] == SCHEMA["$defs"]["ClusterSpec"]


def test_a_key_that_differs_from_its_field_is_the_one_in_files_and_schema() -> None:
    """Plans keep the key `letter` of a split's dim."""
    split = Split(op=3, dim="a", chunks=2)
    data = to_json(split)
    assert json.loads(data) == {"op": 3, "letter": "a", "chunks": 2, "at_once": False}
    assert from_json(data, Split, "split", InvalidPlanError) == split
    properties = json_schema(Plan)["$defs"]["Split"]["properties"]
    assert "dim" not in properties and properties["letter"]["description"].startswith("the named dim")


def test_docstrings_with_several_fields_on_a_line_and_long_ones() -> None:
    class Example(Value, frozen=True, kw_only=True):
        """What it is.

        Attributes:
            one, two: said once,
                over two lines.
            three: alone.

        Something else: not a field.
        """

        one: int
        two: int
        three: dict[str, Any]

    said = "said once, over two lines."
    assert field_docs(Example) == {"one": said, "two": said, "three": "alone."}
