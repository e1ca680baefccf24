"""This machine as a cluster: GPUs as the driver would report them, and CPU processes as measured here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paraplan.cost_models.machine.device_catalog import CATALOG
from paraplan.ir.errors import ClusterError, ConstraintError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.jobs.measuring import detect as module
from paraplan.jobs.measuring import measure
from paraplan.jobs.measuring.detect import Gpu, catalog_name, cpu_cluster, detect, gpu_cluster, visible
from paraplan.jobs.measuring.measure import copy_bytes_per_s, launch_s, matmul_flops_per_s
from paraplan.jobs.measuring.topology import JobTopology

from . import topologies

GIB = 1 << 30
Says = Callable[..., None]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Lets `nvidia-smi` print a topology and the PCIe of every GPU."""

    def set_up(topology: str = "", pcie: str = "") -> None:
        monkeypatch.setattr(module, "_run", lambda *command: topology if "topo" in command else pcie)

    return set_up


def test_a_node_of_known_gpus(says: Says) -> None:
    says(topologies.DGX_H100, "5, 16\n" * 4)
    gpus = (*[Gpu("NVIDIA H100 80GB HBM3", 84_900_000_000)] * 3, Gpu("NVIDIA H100 80GB HBM3", 84_000_000_000))
    cluster = gpu_cluster(gpus, JobTopology(nodes=2, processes_per_node=4, source="torchrun"), {}, 2.8e-5)
    (group,) = cluster.groups
    assert group.device.issue_s == 2.8e-5
    assert (group.nodes, group.devices_per_node, cluster.name) == (2, 4, "detected 4xH100:2")
    assert group.device.memory_bytes == 84_000_000_000  # of the smallest, as the driver says
    assert group.device.flops_per_s == CATALOG["H100"].device.flops_per_s
    assert group.device.sources["memory_bytes"] == "reported by the driver"
    assert group.in_node.bytes_per_s == 450e9 and "nvidia-smi" in group.in_node.source
    assert group.host.bytes_per_s == pytest.approx(0.87 * 63e9, rel=1e-3) and "nvidia-smi" in group.host.source
    assert cluster.between_nodes is not None


def test_without_nvidia_smi_the_catalog_speaks_and_says_so(says: Says) -> None:
    says()
    cluster = gpu_cluster((Gpu("AMD Instinct MI300X", 206_000_000_000),) * 8, JobTopology(), {})
    (group,) = cluster.groups
    assert cluster.between_nodes is None and group.device.kind == "MI300X"
    assert group.in_node.bytes_per_s == CATALOG["MI300X"].in_node.bytes_per_s
    assert all("not measured" in link.source for link in (group.in_node, group.host))


def test_a_job_on_some_of_a_nodes_gpus(says: Says) -> None:
    says(topologies.FOUR_A100_BOARD)
    gpus = (Gpu("NVIDIA A100-SXM4-40GB", 42 * GIB),) * 4
    assert gpu_cluster(gpus, JobTopology(2, 2, "SLURM"), {}).num_devices == 4
    assert gpu_cluster(gpus, JobTopology(1, 9, "SLURM"), {}).num_devices == 4  # never more than there are


def test_unequal_gpus_are_refused(says: Says) -> None:
    says()
    with pytest.raises(ClusterError, match=r"NVIDIA H100 PCIe and NVIDIA L40S.*CUDA_VISIBLE_DEVICES"):
        gpu_cluster((Gpu("NVIDIA H100 PCIe", 80 * GIB), Gpu("NVIDIA L40S", 44 * GIB)), JobTopology(), {})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Tesla V100-SXM2-32GB", "V100-32"), ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"), ("NVIDIA A100-PCIE-40GB", "A100-40-PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100-80-PCIe"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100", "H100-HBM2e-96"), ("NVIDIA H200", "H200"), ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"), ("NVIDIA L40S", "L40S"), ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA L40", None),
        ("Tesla V100-SXM2-16GB", None), ("NVIDIA H100 NVL", None), ("NVIDIA GB200", None), ("", None),
    ],
)  # fmt: skip
def test_names_of_the_driver(name: str, kind: str | None) -> None:
    assert catalog_name(name) == kind


def test_every_gpu_of_the_catalog_has_a_driver_name() -> None:
    assert {kind for _, kind in module._NAMES} == set(CATALOG) - {"cpu"}


def test_visible_devices() -> None:
    assert visible({}, 2) == (0, 1)
    assert visible({"CUDA_VISIBLE_DEVICES": "3,1"}, 2) == (3, 1)
    assert visible({"CUDA_VISIBLE_DEVICES": "GPU-8f2a,GPU-11"}, 2) == (0, 1)
    assert visible({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 2) == (0, 1)


def test_measurements_are_rates_of_this_machine() -> None:
    """Any machine that runs tests lies within these; a slip of a unit does not."""
    flops = matmul_flops_per_s("float32", seconds=0.01)
    assert flops is not None and 1e7 < flops < 1e15
    assert 1e7 < copy_bytes_per_s(seconds=0.01, nbytes=1 << 22) < 1e13
    assert 1e-8 < launch_s(seconds=0.01) < 1e-1


def test_a_cpu_runs_what_it_issues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "launch_s", lambda device, seconds: 1e-5)
    assert measure.issue_s("cpu") == 0.0 and measure.issue_s("cuda") == pytest.approx(measure.IN_A_STEP * 1e-5)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "matmul_flops_per_s", lambda dtype, device: {"float32": 4.123456e10}.get(dtype))
    monkeypatch.setattr(module, "copy_bytes_per_s", lambda device, nbytes: 2e10)
    monkeypatch.setattr(module, "launch_s", lambda device: 2e-6)


def test_processes_share_the_machine(measured: None) -> None:
    one, four = cpu_cluster(1, JobTopology()), cpu_cluster(4, JobTopology(nodes=2))
    assert (one.num_devices, four.num_devices) == (1, 8)
    alone, shared = one.groups[0].device, four.groups[0].device
    assert alone.flops_per_s == {"float32": 4.12e10} and shared.flops_per_s == {"float32": 1.03e10}
    assert alone.memory_bytes_per_s == 4 * shared.memory_bytes_per_s
    assert alone.memory_bytes // 4 == shared.memory_bytes
    assert alone.backend == "cpu" and set(alone.sources) == {"float32", "memory_bytes", "memory_bytes_per_s"}
    assert four.between_nodes is not None and "not measured" in four.groups[0].in_node.source


def test_detect_follows_the_launcher_and_the_option(measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    launched = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}
    assert [detect(env=launched).num_devices, detect(2, launched).num_devices, detect(5, {}).num_devices] == [6, 4, 5]
    assert isinstance(detect(env={}), ClusterSpec)
    with pytest.raises(ConstraintError, match="--processes 0"):
        detect(0, {})
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConstraintError, match="leave it out"):
        detect(2, {})
