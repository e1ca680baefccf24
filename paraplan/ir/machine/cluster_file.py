"""Cluster files: a `ClusterSpec` read from YAML or JSON, and written as YAML."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import msgspec
import yaml

from paraplan.ir.errors import ClusterError
from paraplan.ir.machine.cluster import ClusterSpec, NodeGroup, check_cluster
from paraplan.ir.machine.device import Device, Link, did_you_mean
from paraplan.ir.machine.reserves import Reserve
from paraplan.ir.quantities import WAY_OUT
from paraplan.ir.struct import read_bytes


class _Yaml(yaml.SafeLoader):
    """YAML with the floats of its version 1.2: PyYAML alone reads 25e9 and 1e-5 as text."""


class _YamlOut(yaml.SafeDumper):
    """The same, writing numbers in the fewest digits that read back equal: 3.12e+14, not 312000000000000.0."""


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
        if str(path).endswith(".json"):
            return check_cluster(msgspec.json.decode(data, type=ClusterSpec))
        return check_cluster(msgspec.convert(yaml.load(data, Loader=_Yaml), ClusterSpec))
    except (yaml.YAMLError, msgspec.DecodeError, ValueError, RecursionError) as fault:  # of numbers, of nesting
        raise ClusterError(f"{path}: {_in_words(fault)}{_near_field(str(fault))}") from None


def _in_words(fault: Exception) -> str:
    """What is wrong in a file: of YAML, its line and what stands there."""
    mark = getattr(fault, "problem_mark", None)
    if not isinstance(fault, yaml.MarkedYAMLError) or mark is None:
        return " ".join(str(fault).split())
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
