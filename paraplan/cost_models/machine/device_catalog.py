"""The catalog's data: devices and the nodes they usually sit in, from data sheets.

Rates are dense (no structured sparsity): where a sheet prints only the sparse number, half of it. `float32` is the true
fp32 rate, which PyTorch computes with unless told otherwise; `tf32` stands beside it. `float64` is the matrix unit's
rate where the device has one. A dtype that is missing is one the device has no fast unit (or no data-sheet number) for.
`memory_bytes` is what the driver lets a process see, rounded down (torch's `total_memory`, as out-of-memory messages
print it). What a data sheet leaves open, the network above all, is a common configuration, named in the link's source.
"""

from __future__ import annotations

import msgspec

from paraplan.cost_models.machine import link_catalog
from paraplan.cost_models.machine.multiprocessors import capability, channels, multiprocessors
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Device, Link
from paraplan.ir.machine.reserves import cuda_reserves
from paraplan.ir.struct import Value

_GIB = 1 << 30
HOPPER_WATTS = 1170.0
"""What an H100 or H200 in SXM form would take to multiply at the clock its rates are quoted at; products alone run at
0.77 of that clock at its 700 W (boost is 1,830 MHz; large products are seen at 1,400 to 1,700 MHz), those of a step as
`cost_models.clocks` has it. Set looking at published steps of boards of 500 and 700 W (docs/benchmarks.md)."""
HOPPER_BOOST = 1980 / 1830
"""Highest clock of the multiprocessors over the one that rates of products in halves are quoted at: 132 x 4,096
operations at 1,830 MHz are 989.4 TFLOP/s; nvidia-smi gives 1,980 MHz for both boards."""
HOPPER_REST_WATTS = 300.0
"""What an H200 draws while its memory is the limit: 137 to 300 W in decoding (Ma et al. 2026, arXiv 2605.11999)."""
_T = 1e12

Row = tuple[str, float, str]
"""A rate: dtype, tera-operations per second, the data sheet's name for it."""


class CatalogEntry(Value, frozen=True, kw_only=True):
    """A device and the links of the node it usually sits in.

    Attributes:
        device: with its rates.
        vendor: collectives run among one vendor's devices only (NCCL, RCCL).
        in_node, between_nodes, host, disk: links, per device and direction.
        host_memory_bytes_per_device: host memory of the usual node.
        host_memory_bytes_per_s_per_device: its peak bandwidth, which an update of parameters there streams at.
        host_memory_source: which modules.
        nvlink: NVLink generation; 0 where the device has none.
    """

    device: Device
    vendor: str
    in_node: Link
    between_nodes: Link
    host: Link
    disk: Link
    host_memory_bytes_per_device: int
    host_memory_bytes_per_s_per_device: float
    host_memory_source: str
    nvlink: int = 0


def _device(
    kind: str,
    sheet: str,
    memory: tuple[float, str],
    bandwidth: tuple[float, str],
    rates: tuple[Row, ...],
    watts: tuple[float, float, float] = (1.0, 1.0, 0.0),
    boost: float = 0.0,
) -> Device:
    """A device of a data sheet.

    Args:
        kind: catalog name.
        sheet: the data sheet.
        memory: GiB a process sees, and what the sheet says.
        bandwidth: TB/s, and what the sheet says.
        rates: per dtype.
        watts: the board's limit, the power that holds the clock its rates are quoted at, and what kernels that only
            move bytes draw (0.0: not known).
        boost: the highest clock over the one its rates are quoted at (0.0: that is the highest).
    """
    memory_bytes = int(memory[0] * _GIB)
    spelled = [(name, tera, row) for dtype, tera, row in rates for name in _dtypes(dtype)]
    return Device(
        kind=kind,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=bandwidth[0] * _T,
        power_share=watts[0] / watts[1],
        rest_power_share=watts[2] / watts[0],
        boost_share=boost,
        multiprocessors=multiprocessors(kind),
        capability=capability(kind),
        reserves=cuda_reserves(memory_bytes, *channels(kind)),
        flops_per_s={dtype: tera * _T for dtype, tera, _ in spelled},
        source=sheet,
        sources={
            **{dtype: row for dtype, _, row in spelled},
            "memory_bytes": f"{memory[1]}; {memory[0]:g} GiB visible to a process",
            "memory_bytes_per_s": bandwidth[1],
        },
    )


def _dtypes(name: str) -> tuple[str, ...]:
    both = {"float8": ("float8_e4m3fn", "float8_e5m2"), "half": ("bfloat16", "float16")}
    return both.get(name, (name,))


_V100_SHEET = "NVIDIA V100 data sheet (Jan 2020), column V100 SXM2"
_A100_SHEET = "NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4, 2021)"
_H100_SHEET = "NVIDIA H100 data sheet (2023) and H100 architecture white paper, table of peak rates"
_H200_SHEET = "NVIDIA H200 data sheet (2024)"
_B200_SHEET = "NVIDIA Blackwell data sheet (2024), individual GPU of HGX B200"
_MI300X_SHEET = "AMD Instinct MI300X data sheet (2023)"
_L40S_SHEET = "NVIDIA L40S data sheet (2023)"
_ADA_SHEET = "NVIDIA Ada GPU architecture white paper V2.01, table of GeForce RTX 4090"


PORT_CHANNELS = 2
"""Of a communicator between nodes for every port it goes through: 16 in nodes of eight, as NCCL logs there."""

_AMPERE: tuple[Row, ...] = (
    ("float64", 19.5, "FP64 Tensor Core"),
    ("float32", 19.5, "FP32"),
    ("tf32", 156, "Tensor Float 32"),
    ("half", 312, "BFLOAT16 / FP16 Tensor Core"),
    ("int8", 624, "INT8 Tensor Core"),
)
_HOPPER: tuple[Row, ...] = (
    ("float64", 67, "FP64 Tensor Core"),
    ("float32", 67, "FP32"),
    ("tf32", 494.7, "TF32 Tensor Core, dense"),
    ("half", 989.4, "BFLOAT16 / FP16 Tensor Core, dense"),
    ("float8", 1978.9, "FP8 Tensor Core, dense"),
    ("int8", 1978.9, "INT8 Tensor Core, dense"),
)
_HOPPER_PCIE: tuple[Row, ...] = (
    ("float64", 51, "FP64 Tensor Core"),
    ("float32", 51, "FP32"),
    ("tf32", 378, "TF32 Tensor Core, dense"),
    ("half", 756, "BFLOAT16 / FP16 Tensor Core, dense"),
    ("float8", 1513, "FP8 Tensor Core, dense"),
    ("int8", 1513, "INT8 Tensor Core, dense"),
)

_V100_32 = _device(
    "V100-32",
    _V100_SHEET,
    (31.7, "32 GB HBM2"),
    (0.9, "900 GB/s"),
    (("float64", 7.8, "Double-Precision"), ("float32", 15.7, "Single-Precision"), ("float16", 125, "Deep Learning")),
)
_B200 = _device(
    "B200",
    _B200_SHEET,
    (178.0, "180 GB HBM3e"),
    (7.7, "7.7 TB/s"),
    (
        ("float64", 37, "FP64 / FP64 Tensor Core"),
        ("float32", 75, "FP32"),
        ("tf32", 1100, "TF32 Tensor Core, half of the sparse 2.2 PFLOPS"),
        ("half", 2250, "FP16/BF16 Tensor Core, half of the sparse 4.5 PFLOPS"),
        ("float8", 4500, "FP8/FP6 Tensor Core, half of the sparse 9 PFLOPS"),
        ("int8", 4500, "INT8 Tensor Core, half of the sparse 9 POPS"),
    ),
)
_MI300X = _device(
    "MI300X",
    _MI300X_SHEET,
    (191.5, "192 GB HBM3"),
    (5.3, "5.3 TB/s"),
    (
        ("float64", 163.4, "FP64 matrix"),
        ("float32", 163.4, "FP32 matrix"),
        ("tf32", 653.7, "TF32 matrix"),
        ("half", 1307.4, "FP16 / BF16 matrix"),
        ("float8", 2614.9, "FP8 matrix"),
        ("int8", 2614.9, "INT8 matrix"),
    ),
)
_L40S = _device(
    "L40S",
    _L40S_SHEET,
    (44.3, "48 GB GDDR6 with ECC"),
    (0.864, "864 GB/s"),
    (
        ("float64", 1.43, "FP32 / 64 (1:64 units: Ada white paper)"),
        ("float32", 91.6, "FP32"),
        ("tf32", 183, "TF32 Tensor Core"),
        ("half", 362.05, "BFLOAT16 / FP16 Tensor Core"),
        ("float8", 733, "FP8 Tensor Core"),
        ("int8", 733, "Peak INT8 Tensor"),
    ),
)
_RTX4090 = _device(
    "RTX4090",
    _ADA_SHEET,
    (23.6, "24 GB GDDR6X"),
    (1.008, "1008 GB/s"),
    (
        ("float64", 1.29, "Peak FP32 / 64 (1:64 units)"),
        ("float32", 82.6, "Peak FP32"),
        ("tf32", 82.6, "Peak TF32 Tensor, dense"),
        ("half", 165.2, "Peak FP16/BF16 Tensor, FP32 accumulate, dense"),
        ("float8", 330.3, "Peak FP8 Tensor, FP32 accumulate, dense"),
        ("int8", 660.6, "Peak INT8 Tensor, dense"),
    ),
)


_DDR4 = (8 * 25.6e9 * 2 / 8, "DDR4-3200, 8 channels of 2 sockets (DGX A100) per 8 devices")
_DDR5 = (8 * 38.4e9 * 2 / 8, "DDR5-4800, 8 channels of 2 sockets (DGX H100) per 8 devices")
_BROADWELL = (4 * 19.2e9 * 2 / 8, "DDR4-2400, 4 channels of 2 sockets (DGX-1) per 8 devices")
_EMERALD = (8 * 44.8e9 * 2 / 8, "DDR5-5600, 8 channels of 2 sockets (DGX B200) per 8 devices")


def _nvidia(
    device: Device,
    pcie: int,
    network: Link,
    *,
    nvlink: int = 0,
    host_gib: int = 128,
    in_node: Link | None = None,
    host_rate: tuple[float, str] | None = None,
) -> CatalogEntry:
    """An NVIDIA device; in its node over NVLink where it has a generation, else peer to peer over PCIe.

    A channel of NCCL's is a multiprocessor while a collective is under way.
    """
    inside = in_node or (link_catalog.nvlink(nvlink) if nvlink else link_catalog.pcie_peer(pcie))
    inside, network = (
        msgspec.structs.replace(link, device_share=channels / device.multiprocessors)
        for link, channels in ((inside, channels(device.kind)[0]), (network, PORT_CHANNELS))
    )
    rate, source = host_rate or (_DDR5 if pcie >= 5 else _DDR4)
    return CatalogEntry(
        device=device,
        vendor="NVIDIA",
        in_node=inside,
        between_nodes=network,
        host=link_catalog.pcie_host(pcie),
        disk=link_catalog.local_disk(),
        host_memory_bytes_per_device=host_gib * _GIB,
        nvlink=nvlink,
        host_memory_bytes_per_s_per_device=rate,
        host_memory_source=source,
    )


def _cpu() -> CatalogEntry:
    """A CPU process as `ClusterSpec.local` describes it, between nodes over plain Ethernet."""
    group = ClusterSpec.local(1).groups[0]
    assert group.disk is not None
    return CatalogEntry(
        device=group.device,
        vendor="CPU",
        in_node=group.in_node,
        host=group.host,
        disk=group.disk,
        between_nodes=link_catalog.ethernet(10, 1 / 8, "one 10 Gb/s port per 8 processes: assumed", rdma=False),
        host_memory_bytes_per_device=group.host_memory_bytes,
        host_memory_bytes_per_s_per_device=group.host_memory_bytes_per_s,
        host_memory_source=group.host_memory_source,
    )


_HDR = link_catalog.infiniband("HDR", 1, "DGX A100: one port per GPU")
_NDR = link_catalog.infiniband("NDR", 1, "DGX H100 and B200: one port per GPU")
_ONE_HDR = link_catalog.infiniband("HDR", 0.25, "one port per 4 GPUs: assumed")
_ONE_NDR = link_catalog.infiniband("NDR", 0.25, "one port per 4 GPUs: assumed")

CATALOG: dict[str, CatalogEntry] = {
    entry.device.kind: entry
    for entry in (
        _nvidia(
            _V100_32,
            3,
            link_catalog.infiniband("EDR", 0.5, "DGX-1: 4 ports per 8 GPUs"),
            nvlink=2,
            host_gib=64,
            host_rate=_BROADWELL,
        ),
        _nvidia(
            _device("A100-40", _A100_SHEET, (39.4, "40 GB HBM2"), (1.555, "1,555 GB/s"), _AMPERE),
            4,
            _HDR,
            nvlink=3,
        ),
        _nvidia(
            _device("A100-80", _A100_SHEET, (79.1, "80 GB HBM2e"), (2.039, "2,039 GB/s (SXM)"), _AMPERE),
            4,
            _HDR,
            nvlink=3,
        ),
        _nvidia(
            _device("A100-40-PCIe", _A100_SHEET, (39.4, "40 GB HBM2"), (1.555, "1,555 GB/s"), _AMPERE),
            4,
            _ONE_HDR,
        ),
        _nvidia(
            _device(
                "A100-80-PCIe",
                _A100_SHEET,
                (79.1, "80 GB HBM2e"),
                (1.935, "1,935 GB/s (PCIe)"),
                _AMPERE,
            ),
            4,
            _ONE_HDR,
        ),
        _nvidia(
            _device(
                "H100",
                _H100_SHEET,
                (79.1, "80 GB HBM3"),
                (3.35, "3.35 TB/s (SXM5)"),
                _HOPPER,
                watts=(700, HOPPER_WATTS, HOPPER_REST_WATTS),
                boost=HOPPER_BOOST,
            ),
            5,
            _NDR,
            nvlink=4,
            host_gib=256,
        ),
        _nvidia(
            _device("H100-PCIe", _H100_SHEET, (79.1, "80 GB HBM2e"), (2.0, "2 TB/s (PCIe)"), _HOPPER_PCIE),
            5,
            _ONE_NDR,
            host_gib=256,
        ),
        _nvidia(
            _device(
                "H100-HBM2e-96",
                f"{_H100_SHEET}: 700 W SXM5 rates; memory and its bandwidth: torchtitan's benchmark "
                "pages (H100 96 GB HBM2e, 500 W)",
                (94.9, "96 GB HBM2e"),
                (2.4, "2.4 TB/s, torchtitan's benchmark pages"),
                _HOPPER,
                watts=(500, HOPPER_WATTS, HOPPER_REST_WATTS),
                boost=HOPPER_BOOST,
            ),
            5,
            link_catalog.infiniband("NDR", 1, "400 Gb/s RDMA per GPU, torchtitan's benchmark pages"),
            nvlink=4,
            host_gib=256,
        ),
        _nvidia(
            _device(
                "H200",
                _H200_SHEET,
                (139.7, "141 GB HBM3e"),
                (4.8, "4.8 TB/s"),
                _HOPPER,
                watts=(700, HOPPER_WATTS, HOPPER_REST_WATTS),
                boost=HOPPER_BOOST,
            ),
            5,
            _NDR,
            nvlink=4,
            host_gib=256,
        ),
        _nvidia(_B200, 5, _NDR, nvlink=5, host_gib=256, host_rate=_EMERALD),
        CatalogEntry(
            device=_MI300X,
            vendor="AMD",
            in_node=link_catalog.infinity_fabric(),
            between_nodes=link_catalog.ethernet(400, 1, "one NIC per GPU: the usual 8-GPU server"),
            host=link_catalog.pcie_host(5),
            disk=link_catalog.local_disk(),
            host_memory_bytes_per_device=256 * _GIB,
            host_memory_bytes_per_s_per_device=12 * 38.4e9 * 2 / 8,
            host_memory_source="DDR5-4800, 12 channels of 2 sockets per 8 devices: the usual server",
        ),
        _nvidia(_L40S, 4, link_catalog.ethernet(100, 1, "one port per GPU: assumed")),
        _nvidia(
            _RTX4090,
            4,
            link_catalog.ethernet(100, 1 / 8, "one port per 8 GPUs: assumed"),
            host_gib=32,
            in_node=link_catalog.pcie_peer(4, through_host=True),
        ),
        _cpu(),
    )
}

ALIASES: dict[str, str] = {
    **{"V100-32-SXM": "V100-32", "V100-SXM2-32": "V100-32", "A100-40-SXM": "A100-40", "A100-80-SXM": "A100-80"},
    **{"H100-80": "H100", "H100-SXM": "H100", "H100-SXM-80": "H100", "H100-80-PCIe": "H100-PCIe"},
    **{"H100-96": "H100-HBM2e-96", "H200-141": "H200", "B200-180": "B200", "MI300X-192": "MI300X"},
    **{"4090": "RTX4090", "RTX-4090": "RTX4090"},
}
"""Other ways people write a device's name; a name that fits two devices (A100) is not one of them."""
