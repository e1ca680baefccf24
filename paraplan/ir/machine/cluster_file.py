"""Cluster files: a `ClusterSpec` read from YAML or JSON, and written as YAML."""

from __future__ import annotations

import re
from collections.abc import Hashable
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import yaml

from paraplan.ir.errors import ClusterError
from paraplan.ir.machine.cluster import ClusterSpec, NodeGroup, check_cluster
from paraplan.ir.machine.device import Device, Link, did_you_mean
from paraplan.ir.machine.reserves import Reserve
from paraplan.ir.quantities import WAY_OUT
from paraplan.ir.struct import read_bytes


class _Yaml(yaml.SafeLoader):
    """YAML with the floats of its version 1.2 (PyYAML alone reads 25e9 and 1e-5 as text), and with every key once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping; refused where a key is there twice, of which PyYAML would take the last."""
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if (name := str(key.value)) in seen:
                first = seen[name].start_mark
                raise yaml.MarkedYAMLError("it is there already", first, f"{name!r} is given twice", key.start_mark)
            seen[name] = key
        return super().construct_mapping(node, deep)


class _YamlOut(yaml.SafeDumper):
    """The same, writing numbers in the fewest digits that read back equal: 3.12e+14, not 312000000000000.0."""


NEAR = 40
"""Characters said of what stands before a fault."""
_FLOAT_TAG = "tag:yaml.org,2002:float"
for _side in (_Yaml, _YamlOut):
    _side.add_implicit_resolver(_FLOAT_TAG, re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def read_cluster(path: str | Path) -> ClusterSpec:
    """A cluster from a YAML or JSON file, decoded strictly.

    Raises:
        ClusterError: unreadable, malformed, an unknown key or a wrong value, with its place.
    """
    data = read_bytes(path, "cluster file", ClusterError)
    try:
        if not data.strip():
            raise ClusterError(f"{path}: it is empty; {WAY_OUT}")
        if str(path).endswith(".json"):
            return check_cluster(msgspec.json.decode(data, type=ClusterSpec))
        return check_cluster(msgspec.convert(yaml.load(data, Loader=_Yaml), ClusterSpec))
    except (yaml.YAMLError, msgspec.DecodeError, ValueError, RecursionError) as fault:  # of numbers, of nesting
        raise ClusterError(f"{path}: {_in_words(fault, data)}{_near_field(str(fault))}") from None


def _in_words(fault: Exception, data: bytes) -> str:
    """What is wrong in a file: of YAML, its line and what stands there; of JSON, the line that is malformed."""
    mark = getattr(fault, "problem_mark", None)
    if not isinstance(fault, yaml.MarkedYAMLError) or mark is None:
        said = " ".join(str(fault).split())
        at = re.search(r" \(byte (\d+)\)$", said)
        if at is None:
            return said
        before = data[: int(at[1]) + 1].decode(errors="replace")
        near = " ".join(before[-NEAR:].split())
        number = "; a number is written in digits" if re.search(r"[:,\[-]\s*[NI]$", before) else ""
        return f"line {before.count(chr(10)) + 1}: {said[: at.start()]} after {near[:-1]!r}{number}"
    within = f" ({fault.context}, line {fault.context_mark.line + 1})" if fault.context and fault.context_mark else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {fault.problem}{within}"


def _near_field(fault: str) -> str:
    match = re.search(r"unknown field `([^`]*)`", fault)
    fields = [name for kind in (ClusterSpec, NodeGroup, Device, Link, Reserve) for name in kind.__struct_fields__]
    return f"{did_you_mean(match[1], dict.fromkeys(fields))}; {WAY_OUT}" if match else ""


def _short_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = f"{Decimal(repr(value)).normalize():e}" if abs(value) >= 1e5 or 0 < abs(value) < 1e-3 else repr(value)
    return dumper.represent_scalar(_FLOAT_TAG, text)


_YamlOut.add_representer(float, _short_float)


def cluster_yaml(cluster: ClusterSpec, comment: str = "") -> str:
    """A cluster file's text, which `read_cluster` reads back equal.

    Args:
        cluster: what is written.
        comment: lines for the file's head.
    """
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + yaml.dump(msgspec.to_builtins(cluster), Dumper=_YamlOut, sort_keys=False, width=120)
