"""The machine this runs on, as a cluster file: CUDA devices where there are any, else CPU processes.

Devices the catalog knows get its rates with the memory the driver reports; others are measured. Links are those
`nvidia-smi` and sysfs name, else the catalog's; of other nodes a job's launcher only says how many there are, so they
are taken to be equal to this one. Each number's source is in the file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from paraplan.cost_models.machine.device_catalog import CATALOG, CatalogEntry
from paraplan.cost_models.machine.link_catalog import NETWORK_S, pcie_host
from paraplan.ir.errors import ClusterError, ConstraintError
from paraplan.ir.machine.cluster import ClusterSpec, NodeGroup, check_cluster
from paraplan.ir.machine.device import Device, Link
from paraplan.ir.machine.reserves import cpu_reserves, cuda_reserves
from paraplan.ir.process.cores import num_cores
from paraplan.jobs.measuring.measure import copy_bytes_per_s, issue_s, launch_s, matmul_flops_per_s
from paraplan.jobs.measuring.topology import (
    JobTopology,
    in_node_link,
    parse_pcie,
    parse_port_rate,
    parse_topology,
    read_launch,
)

_NAMES = (
    (r"V100-SXM\d-32GB", "V100-32"),
    (r"A100-SXM4-40GB", "A100-40"),
    (r"A100-SXM4-80GB", "A100-80"),
    (r"A100-PCIE-40GB", "A100-40-PCIe"),
    (r"A100 80GB PCIe", "A100-80-PCIe"),
    (r"H100 80GB HBM3", "H100"),
    (r"H100 PCIe", "H100-PCIe"),
    (r"\bH100$", "H100-HBM2e-96"),
    (r"\bH200$", "H200"),
    (r"\bB200$", "B200"),
    (r"MI300X", "MI300X"),
    (r"L40S$", "L40S"),
    (r"RTX 4090$", "RTX4090"),
)
"""What the driver calls a device (the end of its name), and the catalog."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Gpu:
    """What the driver reports of one device."""

    name: str
    memory_bytes: int


def detect(processes: int | None = None, env: Mapping[str, str] | None = None) -> ClusterSpec:
    """Describe this machine, and the job's other nodes where a launcher says how many there are.

    Args:
        processes: CPU processes, where there is no CUDA device; what the launcher starts on a node, else one per core.
        env: the environment; this process' own where not given.
    Raises:
        ClusterError: the devices of this node are unequal.
        ConstraintError: processes is below 1, or given on a machine with CUDA devices.
    """
    environment = os.environ if env is None else env
    launch = read_launch(environment)
    if torch.cuda.is_available():
        if processes is not None:
            raise ConstraintError("--processes counts CPU processes, and this machine has CUDA devices; leave it out")
        gpus = tuple(
            Gpu(torch.cuda.get_device_name(index), torch.cuda.get_device_properties(index).total_memory)
            for index in range(torch.cuda.device_count())
        )
        return gpu_cluster(gpus, launch, environment, _rounded(issue_s("cuda")))
    count = processes if processes is not None else launch.processes_per_node or num_cores()
    if count < 1:
        raise ConstraintError(f"--processes {count}: at least 1")
    return cpu_cluster(count, launch)


def catalog_name(name: str) -> str | None:
    """The catalog's name of a device as the driver calls it; None for one the catalog lacks."""
    return next((kind for pattern, kind in _NAMES if re.search(pattern, name.strip(), re.IGNORECASE)), None)


def gpu_cluster(
    gpus: tuple[Gpu, ...], launch: JobTopology, env: Mapping[str, str], issue_s: float = 0.0
) -> ClusterSpec:
    """Equal nodes of these devices.

    Args:
        gpus: of this node.
        launch: what the launcher says of the job.
        env: the environment.
        issue_s: what this host takes to issue a kernel; 0.0: not known.
    Raises:
        ClusterError: they are of several kinds.
    """
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        raise ClusterError(
            f"this node has {' and '.join(names)}, but devices of a node are equal in a cluster file; choose "
            "those of one kind with CUDA_VISIBLE_DEVICES"
        )
    kind = catalog_name(names[0])
    entry = CATALOG[kind] if kind is not None else None
    pcie = parse_pcie(_run("nvidia-smi", "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader"))
    matrix = parse_topology(_run("nvidia-smi", "topo", "-m"))
    found = in_node_link(matrix, visible(env, len(gpus)), entry.nvlink if entry else 0, pcie)
    usual = entry or CATALOG["L40S"]  # a device of no NVLink and 16 lanes of PCIe 4
    count = len(gpus)
    used = min(launch.processes_per_node or count, count)
    group = NodeGroup(
        nodes=launch.nodes,
        devices_per_node=used,
        device=msgspec.structs.replace(gpu_device(gpus, entry), issue_s=issue_s),
        in_node=found or _assumed(usual.in_node),
        host=_host(usual, pcie),
        disk=_assumed(usual.disk),
        host_memory_bytes=memory_bytes() * used // count,
        disk_bytes=_disk_bytes(),
        host_memory_bytes_per_s=usual.host_memory_bytes_per_s_per_device * used,
        host_memory_source=f"assumed: {usual.host_memory_source}",
    )
    return _cluster(group, launch, usual)


def gpu_device(gpus: tuple[Gpu, ...], entry: CatalogEntry | None) -> Device:
    """The catalog's device with the smallest memory found; a measured one where the catalog has none."""
    memory = min(gpu.memory_bytes for gpu in gpus)
    reported = {"memory_bytes": "reported by the driver"}
    if entry is not None:
        return msgspec.structs.replace(entry.device, memory_bytes=memory, sources={**entry.device.sources, **reported})
    return measured_device(gpus[0].name, "cuda", memory, reported["memory_bytes"], 1)


def cpu_cluster(processes: int, launch: JobTopology) -> ClusterSpec:
    """CPU processes that share this machine's cores and memory, measured; links are `ClusterSpec.local`'s."""
    usual = CATALOG["cpu"]
    cores, memory = num_cores(), memory_bytes()
    said = f"{memory / 2**30:.1f} GiB of this machine shared by {processes} processes"
    device = measured_device("cpu", "cpu", max(1, memory // processes), said, processes, cores)
    group = NodeGroup(
        nodes=launch.nodes,
        devices_per_node=processes,
        in_node=_assumed(usual.in_node),
        host=_assumed(usual.host),
        device=device,
        disk=_assumed(usual.disk),
        host_memory_bytes=memory,
        disk_bytes=_disk_bytes(),
        host_memory_bytes_per_s=device.memory_bytes_per_s * processes,
        host_memory_source="the processes' own memory",
    )
    return _cluster(group, launch, usual)


def measured_device(
    kind: str, backend: str, memory: int, said_of_memory: str, processes: int, cores: int = 1
) -> Device:
    """A device by its measured rates, shared out over the processes that use it at once.

    Args:
        kind: what it is called.
        backend: "cpu" or "cuda".
        memory: bytes that one process may have.
        said_of_memory: where that number is from.
        processes: that use the device at once.
        cores: of one process.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        dtypes = ("float64", "float32", "bfloat16", *(("float16",) if backend == "cuda" else ()), "float8_e4m3fn")
        rates = {dtype: rate for dtype in dtypes if (rate := matmul_flops_per_s(dtype, backend)) is not None}
        rates |= {"float8_e5m2": rates["float8_e4m3fn"]} if "float8_e4m3fn" in rates else {}
        bandwidth = copy_bytes_per_s(backend, nbytes=min(1 << 28, memory * processes // 16))
    finally:
        torch.set_num_threads(before)
    shared = f", {cores} cores shared by {processes} processes" if backend == "cpu" else ""
    said = (4, "as over PCIe: assumed")
    return Device(
        kind=kind,
        memory_bytes=memory,
        memory_bytes_per_s=_rounded(bandwidth / processes),
        backend=backend,
        flops_per_s={dtype: _rounded(rate / processes) for dtype, rate in rates.items()},
        launch_s=_rounded(launch_s(backend)),
        reserves=cpu_reserves(memory) if backend == "cpu" else cuda_reserves(memory, *said),
        source=f"measured here with torch {torch.__version__}{shared}",
        sources={
            **dict.fromkeys(rates, "torch.mm, measured"),
            "memory_bytes": said_of_memory,
            "memory_bytes_per_s": "torch copy, measured",
        },
    )


def _rounded(value: float) -> float:
    """Three digits: more would not repeat."""
    return float(f"{value:.3g}")


def _cluster(group: NodeGroup, launch: JobTopology, usual: CatalogEntry) -> ClusterSpec:
    between = None
    if launch.nodes > 1:
        ports = [parse_port_rate(_read(path)) for path in sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate"))]
        between = _assumed(usual.between_nodes)
        if sum(ports) > 0:
            source = f"{len(ports)} RDMA ports of {sum(ports) / 1e9:.0f} GB/s in all; latency: NCCL tuning.cc"
            rate = sum(ports) / group.devices_per_node
            between = Link(bytes_per_s=min(rate, group.host.bytes_per_s), latency_s=NETWORK_S, source=source)
    nodes = f":{launch.nodes}" if launch.nodes > 1 else ""
    name = f"detected {group.devices_per_node}x{group.device.kind}{nodes}"
    return check_cluster(ClusterSpec(name=name, groups=(group,), between_nodes=between))


def _assumed(link: Link) -> Link:
    return msgspec.structs.replace(link, source=f"not measured, usual for such a device: {link.source}")


def _host(usual: CatalogEntry, pcie: tuple[int, int] | None) -> Link:
    if pcie is None:
        return _assumed(usual.host)
    link = pcie_host(*pcie)
    return msgspec.structs.replace(link, source=f"{link.source}; reported by nvidia-smi")


def visible(env: Mapping[str, str], count: int) -> tuple[int, ...]:
    """The machine's numbers of the devices torch sees, from CUDA_VISIBLE_DEVICES; the first ones where it has none."""
    parts = [part.strip() for part in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    numbers = tuple(int(part) for part in parts if part.isdigit())
    return numbers if len(numbers) == count else tuple(range(count))


def memory_bytes() -> int:
    """Memory of this machine, or what its container may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [int(text) for path in _CGROUP_LIMITS if (text := _read(Path(path)).strip()).isdigit()]
    return min([total, *limits])


def _disk_bytes() -> int:
    return shutil.disk_usage(Path.cwd()).free


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _run(*command: str) -> str:
    """What a command prints; nothing where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""
