"""From a few words to a `ClusterSpec`: a file, `local:4`, or catalog names (`8xH100:4`, `8xA100-80:2+8xH100:2`).

In: text from a user. Out: the cluster with every rate it will be judged by, and where the rates come from.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from paraplan.cost_models.machine.device_catalog import ALIASES, CATALOG, CatalogEntry
from paraplan.ir.errors import ClusterError
from paraplan.ir.machine.cluster import ClusterSpec, NodeGroup, check_cluster
from paraplan.ir.machine.cluster_file import read_cluster
from paraplan.ir.machine.device import Device, Link, did_you_mean
from paraplan.ir.process.cores import num_cores

_FORMS = (
    'a cluster is given as a .yaml/.yml/.json file, as "local:4" (4 CPU processes here), '
    'or as "8xH100:4" (4 nodes of 8 H100; "8xH100" is one node; "8xA100-80:2+8xH100:2" is two groups)'
)
_SUFFIXES = (".yaml", ".yml", ".json")
_NAME = re.compile(r"(\d+)x([A-Za-z0-9][A-Za-z0-9_-]*)(?::(\d+))?$")
_LOCAL = re.compile(r"local:(\d+)$")
_DISK_BYTES = 4 << 40


def catalog_entry(name: str) -> CatalogEntry:
    """A device and its usual node, by catalog name or alias in any case.

    Raises:
        ClusterError: no such device; names near ones, lists those that exist and the ways to name a cluster.
    """
    entry = _find(name)
    if entry is None:
        near = _beginning(name) or did_you_mean(name, (*CATALOG, *ALIASES))
        raise ClusterError(f"no device {name!r} in the catalog{near}; it has {', '.join(CATALOG)}; {_FORMS}")
    return entry


def devices_with(dtype: str) -> tuple[str, ...]:
    """Names of the catalog's devices that have a rate for a dtype."""
    return tuple(kind for kind, entry in CATALOG.items() if dtype in entry.device.flops_per_s)


def _find(name: str) -> CatalogEntry | None:
    by_lower = {kind.lower(): kind for kind in CATALOG} | {other.lower(): kind for other, kind in ALIASES.items()}
    kind = by_lower.get(name.lower())
    return CATALOG[kind] if kind is not None else None


def _beginning(name: str) -> str:
    """What an unfinished name may become: A100 begins several."""
    found = [kind for kind in CATALOG if kind.lower().startswith(name.lower())][:4]
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def catalog_device(name: str) -> Device:
    """A device by catalog name; raises as `catalog_entry`."""
    return catalog_entry(name).device


def catalog_cluster(name: str, devices_per_node: int, nodes: int = 1) -> ClusterSpec:
    """Equal nodes of one catalog device, with its usual links.

    Args:
        name: a device's, as in `CATALOG`.
        devices_per_node, nodes: counts, at least 1.
    Raises:
        ClusterError: no such device, or a count below 1.
    """
    entry = catalog_entry(name)
    between = entry.between_nodes if nodes != 1 else None
    text = _text(entry, devices_per_node, nodes)
    return check_cluster(
        ClusterSpec(name=text, groups=(_group(entry, devices_per_node, nodes),), between_nodes=between)
    )


def mixed_cluster(parts: tuple[tuple[str, int, int], ...]) -> ClusterSpec:
    """Groups of equal nodes of catalog devices.

    Nodes of a group talk over the group's usual network; between groups everything goes at the slowest of them.

    Args:
        parts: per group, the device's name, devices per node, nodes.
    Raises:
        ClusterError: no such device, a count below 1, or devices of two vendors.
    """
    entries = [catalog_entry(name) for name, _, _ in parts]
    vendors = list(dict.fromkeys(entry.vendor for entry in entries))
    name = "+".join(_text(entry, count, nodes) for entry, (_, count, nodes) in zip(entries, parts, strict=True))
    if len(vendors) > 1:
        raise ClusterError(
            f"cluster {name!r}: no collective library joins {' and '.join(vendors)} devices; plan for each on its own"
        )
    groups = tuple(
        msgspec.structs.replace(_group(entry, count, nodes), between_nodes=entry.between_nodes)
        for entry, (_, count, nodes) in zip(entries, parts, strict=True)
    )
    slowest = min((entry.between_nodes for entry in entries), key=lambda link: link.bytes_per_s)
    between = Link(
        bytes_per_s=slowest.bytes_per_s,
        latency_s=max(entry.between_nodes.latency_s for entry in entries),
        source=f"the slowest group's network: {slowest.source}",
    )
    return check_cluster(ClusterSpec(name=name, groups=groups, between_nodes=between))


def _group(entry: CatalogEntry, devices_per_node: int, nodes: int) -> NodeGroup:
    return NodeGroup(
        nodes=nodes,
        devices_per_node=devices_per_node,
        device=entry.device,
        in_node=entry.in_node,
        host=entry.host,
        disk=entry.disk,
        host_memory_bytes=entry.host_memory_bytes_per_device * devices_per_node,
        disk_bytes=_DISK_BYTES,
        host_memory_source=entry.host_memory_source,
        host_memory_bytes_per_s=entry.host_memory_bytes_per_s_per_device * devices_per_node,
    )


def _text(entry: CatalogEntry, devices_per_node: int, nodes: int) -> str:
    return f"{devices_per_node}x{entry.device.kind}" + (f":{nodes}" if nodes != 1 else "")


def parse_cluster(text: str) -> ClusterSpec:
    """The cluster a text stands for: a file, `local:<n>`, or `<devices>x<kind>[:<nodes>]`, several joined by `+`.

    Raises:
        ClusterError: a file that is missing or malformed, an unknown device, a count below 1, or none of
            the forms; each message says which and what would be accepted.
    """
    text = text.strip()
    if text.lower().endswith(_SUFFIXES):
        if not Path(text).is_file():
            raise ClusterError(f"no cluster file {text!r} (looked in {Path.cwd()}); {_FORMS}")
        return read_cluster(text)
    if "/" in text or Path(text).is_file():
        raise ClusterError(f"{text!r} looks like a file, but a cluster file ends in {', '.join(_SUFFIXES)}; {_FORMS}")
    if match := _LOCAL.match(text):
        return ClusterSpec.local(int(match[1]), cores=num_cores())
    parts = [part.strip() for part in text.split("+")]
    matches = [_NAME.match(part) for part in parts]
    for part, match in zip(parts, matches, strict=True):
        if match is None:
            raise _unreadable(text, part)
    named = tuple((match[2], int(match[1]), int(match[3] or 1)) for match in matches if match is not None)
    return mixed_cluster(named) if len(named) > 1 else catalog_cluster(*named[0])


def _unreadable(text: str, part: str) -> ClusterError:
    of = f" of {text!r}" if part != text else ""
    if _find(part) is not None:
        return ClusterError(
            f'cluster {part!r}{of} does not say how many devices a node has; write "8x{part}"; {_FORMS}'
        )
    if part.startswith("local:") and of:
        return ClusterError(f"cluster {text!r}: {part!r} stands alone, it joins no other group; {_FORMS}")
    return ClusterError(f"cannot read cluster {part!r}{of}; {_FORMS}; devices in the catalog: {', '.join(CATALOG)}")
