"""From a few words to a `ClusterSpec`: a file, `local:4`, or a catalog name such as `8xH100:4`.

In: text from a user. Out: the cluster with every rate it will be judged by, and where the rates come from.
"""

from __future__ import annotations

import re
from pathlib import Path

from paraplan.cost_models.devices import CATALOG, CatalogEntry
from paraplan.ir.cluster import ClusterSpec, Device, NodeGroup, check_cluster, read_cluster
from paraplan.ir.errors import ClusterError

_FORMS = (
    'a cluster is given as a .yaml/.yml/.json file, as "local:4" (4 CPU processes here), '
    'or as "8xH100:4" (4 nodes of 8 H100; "8xH100" is one node)'
)
_SUFFIXES = (".yaml", ".yml", ".json")
_NAME = re.compile(r"(\d+)x([A-Za-z][A-Za-z0-9_-]*)(?::(\d+))?$")
_LOCAL = re.compile(r"local:(\d+)$")


def catalog_entry(name: str) -> CatalogEntry:
    """A device and its usual node, by catalog name in any case.

    Raises:
        ClusterError: no such device; lists those that exist and the three ways to name a cluster.
    """
    for kind, entry in CATALOG.items():
        if kind.lower() == name.lower():
            return entry
    raise ClusterError(f"no device {name!r} in the catalog ({', '.join(CATALOG)}); {_FORMS}")


def catalog_device(name: str) -> Device:
    """A device by catalog name; raises as `catalog_entry`."""
    return catalog_entry(name).device


def catalog_cluster(name: str, devices_per_node: int, nodes: int = 1) -> ClusterSpec:
    """Equal nodes of one catalog device, with its usual links.

    Raises:
        ClusterError: no such device, or a count below 1.
    """
    entry = catalog_entry(name)
    text = f"{devices_per_node}x{entry.device.kind}" + (f":{nodes}" if nodes != 1 else "")
    group = NodeGroup(
        nodes=nodes, devices_per_node=devices_per_node, device=entry.device, in_node=entry.in_node, host=entry.host,
        disk=entry.disk, host_memory_bytes=entry.host_memory_bytes_per_device * devices_per_node, disk_bytes=4 << 40,
    )  # fmt: skip
    between = entry.between_nodes if nodes != 1 else None
    return check_cluster(ClusterSpec(name=text, groups=(group,), between_nodes=between))


def parse_cluster(text: str) -> ClusterSpec:
    """The cluster a text stands for: a file, `local:<n>`, or `<devices>x<kind>[:<nodes>]`.

    Raises:
        ClusterError: a file that is missing or malformed, an unknown device, a count below 1, or none of
            the three forms; each message says which and what would be accepted.
    """
    text = text.strip()
    if text.lower().endswith(_SUFFIXES):
        if not Path(text).is_file():
            raise ClusterError(f"no cluster file {text!r} (looked in {Path.cwd()}); {_FORMS}")
        return read_cluster(text)
    if "/" in text or Path(text).is_file():
        raise ClusterError(f"{text!r} looks like a file, but a cluster file ends in {', '.join(_SUFFIXES)}; {_FORMS}")
    if match := _LOCAL.match(text):
        return ClusterSpec.local(int(match[1]))
    if match := _NAME.match(text):
        return catalog_cluster(match[2], int(match[1]), int(match[3] or 1))
    if text.lower() in {kind.lower() for kind in CATALOG}:
        raise ClusterError(f'cluster {text!r} does not say how many devices a node has; write "8x{text}"; {_FORMS}')
    raise ClusterError(f"cannot read cluster {text!r}; {_FORMS}; devices in the catalog: {', '.join(CATALOG)}")
