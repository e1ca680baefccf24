"""What a machine says of its links, read from text: `nvidia-smi`, sysfs, and the environment of a launcher.

Every function takes text and gives None (or nothing) where it says nothing usable, so that detection goes on with the
catalog's numbers; none of them raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paraplan.cost_models.machine.link_catalog import NVLINK_BYTES_PER_S, NVLINKS, nvlink, pcie_peer
from paraplan.ir.machine.device import Link

Matrix = dict[tuple[int, int], str]
"""(GPU, GPU) -> how they are joined: NV4, PIX, PXB, PHB, NODE, SYS."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)$")
_NVLINK = re.compile(r"NV(\d+)$")
_THROUGH_HOST = ("PHB", "NODE", "SYS")


def parse_topology(text: str) -> Matrix:
    """The GPU part of `nvidia-smi topo -m`; empty where the text is none.

    Columns are told by the header, so NICs before, between or after the GPUs, affinity columns of any form and the
    legend do no harm.
    """
    lines = [_ANSI.sub("", line).split() for line in text.splitlines()]
    header: list[str] = []
    found: Matrix = {}
    for words in lines:
        if not header:
            # The header names GPUs and, unlike a row, joins none.
            if any(map(_GPU.match, words)) and not {"X", *_THROUGH_HOST} & set(words):
                header = words
            continue
        row = _GPU.match(words[0]) if words else None
        if row is None:
            continue
        for column, cell in zip(header, words[1:], strict=False):
            if (other := _GPU.match(column)) and other[1] != row[1]:
                found[int(row[1]), int(other[1])] = cell
    return found


def in_node_link(matrix: Matrix, gpus: tuple[int, ...], generation: int, pcie: tuple[int, int] | None) -> Link | None:
    """The link a ring through these GPUs runs at.

    NVLink, where NVLinks connect all of them: through a switch every pair shows all of a GPU's links, in a direct mesh
    they add up over its peers, so a GPU has the sum of its row, at most what its generation has. Otherwise PCIe, copied
    through the host where any pair has to cross a host bridge.

    Args:
        matrix: of `parse_topology`.
        gpus: which of its GPUs.
        generation: of NVLink; 0 where the device has none.
        pcie: generation and width, where known.
    Returns:
        None for one GPU, or where the matrix lacks a pair or the PCIe generation is not known.
    """
    pairs = {(a, b): matrix.get((a, b)) for a in gpus for b in gpus if a != b}
    if not pairs or None in pairs.values():
        return None
    links = {pair: int(match[1]) if (match := _NVLINK.match(cell or "")) else 0 for pair, cell in pairs.items()}
    if generation in NVLINK_BYTES_PER_S and _connected(links, gpus):
        fewest = min(sum(count for (a, _), count in links.items() if a == gpu) for gpu in gpus)
        link = nvlink(generation, min(fewest, NVLINKS[generation]))
        return Link(
            bytes_per_s=link.bytes_per_s, latency_s=link.latency_s, source=f"{link.source}; links: nvidia-smi topo"
        )
    if pcie is None:
        return None
    link = pcie_peer(*pcie, through_host=any(cell in _THROUGH_HOST for cell in pairs.values()))
    return Link(bytes_per_s=link.bytes_per_s, latency_s=link.latency_s, source=f"{link.source}; path: nvidia-smi topo")


def _connected(links: dict[tuple[int, int], int], gpus: tuple[int, ...]) -> bool:
    reached = [gpus[0]]
    for gpu in reached:
        reached += [other for other in gpus if other not in reached and links[gpu, other] > 0]
    return len(reached) == len(gpus)


def parse_pcie(text: str) -> tuple[int, int] | None:
    """The slowest line of `nvidia-smi --query-gpu=pcie.link.gen.max,pcie.link.width.max --format=csv,noheader`."""
    lines = [line for line in text.splitlines() if line.strip()]
    matches = [re.match(r"\s*(\d+)\s*,\s*(\d+)\s*$", line) for line in lines]
    rates = [(int(match[1]), int(match[2])) for match in matches if match]
    known = [rate for rate in rates if 3 <= rate[0] <= 6 and 1 <= rate[1] <= 16]
    return min(known, key=lambda rate: 2.0 ** rate[0] * rate[1]) if known and len(known) == len(lines) else None


def parse_port_rate(text: str) -> float:
    """Bytes per second of /sys/class/infiniband/*/ports/*/rate: "200 Gb/sec (4X HDR)"; 0.0 where it says none."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*Gb/sec", text)
    return float(match[1]) * 1e9 / 8 if match else 0.0


@dataclass(frozen=True)
class JobTopology:
    """What a launcher says of the job.

    Attributes:
        nodes: of the job; 1 where nothing is said.
        processes_per_node: devices the job uses on each; None where nothing is said.
        source: the variables read, or "".
    """

    nodes: int = 1
    processes_per_node: int | None = None
    source: str = ""


def read_launch(env: Mapping[str, str]) -> JobTopology:
    """Nodes and processes from torchrun's or SLURM's environment; malformed variables count as absent."""
    world, local = _count(env, "WORLD_SIZE"), _count(env, "LOCAL_WORLD_SIZE")
    if world and local and world % local == 0:
        return JobTopology(world // local, local, "torchrun (WORLD_SIZE, LOCAL_WORLD_SIZE)")
    nodes = _count(env, "SLURM_NNODES") or _count(env, "SLURM_JOB_NUM_NODES")
    if nodes:
        tasks = re.match(r"(\d+)(?:\(x\d+\))?$", env.get("SLURM_TASKS_PER_NODE", ""))
        gpus = _count(env, "SLURM_GPUS_ON_NODE")
        per_node = gpus or (int(tasks[1]) if tasks else None)
        return JobTopology(nodes, per_node, "SLURM (SLURM_NNODES, SLURM_GPUS_ON_NODE or SLURM_TASKS_PER_NODE)")
    return JobTopology()


def _count(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isdigit() else 0
