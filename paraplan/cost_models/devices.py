"""The catalog's data: devices and the nodes they usually sit in, from data sheets.

Rates are dense (no structured sparsity). `float32` is the true fp32 rate, not tf32, because that is what
PyTorch computes with unless told otherwise. `memory_bytes` is what the driver lets a process see, rounded
down. Links are per device and per direction; their latencies are NCCL's per-hop constants (tuning.cc: 1.9 us
NVLink ring LL128, 2.5 us PCIe, 4 us network). What a data sheet leaves open (the network) is a common
configuration, named in `source`.
"""

from __future__ import annotations

from paraplan.ir.cluster import Device, Link
from paraplan.ir.struct import Value

_GIB = 1 << 30
_T = 1e12
_NVLINK_S, _PCIE_S, _NET_S, _HOST_S = 1.9e-6, 2.5e-6, 4.0e-6, 1e-5


class CatalogEntry(Value, frozen=True, kw_only=True):
    """A device and the links of the node it usually sits in."""

    device: Device
    in_node: Link
    between_nodes: Link
    host: Link
    disk: Link
    host_memory_bytes_per_device: int


def _rates(**tera: float) -> dict[str, float]:
    rates = {name: value * _T for name, value in tera.items() if name != "float8"}
    if "float8" in tera:
        rates |= {"float8_e4m3fn": tera["float8"] * _T, "float8_e5m2": tera["float8"] * _T}
    return rates


def _entry(
    kind: str, memory_gib: float, memory_tb_per_s: float, rates: dict[str, float], in_node_gb_per_s: float,
    between_gb_per_s: float, pcie_gb_per_s: float, source: str, *, in_node_s: float = _NVLINK_S, host_gib: int = 128,
) -> CatalogEntry:  # fmt: skip
    device = Device(
        kind=kind, memory_bytes=int(memory_gib * _GIB), memory_bytes_per_s=memory_tb_per_s * _T, flops_per_s=rates,
        source=source,
    )  # fmt: skip
    return CatalogEntry(
        device=device, in_node=Link(bytes_per_s=in_node_gb_per_s * 1e9, latency_s=in_node_s),
        between_nodes=Link(bytes_per_s=between_gb_per_s * 1e9, latency_s=_NET_S),
        host=Link(bytes_per_s=pcie_gb_per_s * 1e9, latency_s=_HOST_S), disk=Link(bytes_per_s=3e9, latency_s=1e-4),
        host_memory_bytes_per_device=host_gib * _GIB,
    )  # fmt: skip


_HOPPER = _rates(float64=67, float32=67, bfloat16=989.4, float16=989.4, float8=1978.9)
_AMPERE = _rates(float64=19.5, float32=19.5, bfloat16=312, float16=312)

CATALOG: dict[str, CatalogEntry] = {
    entry.device.kind: entry
    for entry in (
        _entry(
            "V100-32", 31.7, 0.9, _rates(float64=7.8, float32=15.7, float16=125), 150, 6.25, 15.75,
            "NVIDIA V100 SXM2 data sheet; NVLink2 300 GB/s both ways; 4x EDR InfiniBand per 8 GPUs (DGX-1); PCIe 3 x16",
            host_gib=64,
        ),
        _entry(
            "A100-40", 39.4, 1.555, _AMPERE, 300, 25, 31.5,
            "NVIDIA A100 SXM data sheet (float64: tensor cores); NVLink3 600 GB/s both ways; one 200 Gb/s HDR "
            "InfiniBand per GPU (DGX A100); PCIe 4 x16",
        ),
        _entry(
            "A100-80", 79.1, 2.039, _AMPERE, 300, 25, 31.5,
            "NVIDIA A100 SXM data sheet (float64: tensor cores); NVLink3 600 GB/s both ways; one 200 Gb/s HDR "
            "InfiniBand per GPU (DGX A100); PCIe 4 x16",
        ),
        _entry(
            "H100", 79.1, 3.35, _HOPPER, 450, 50, 63,
            "NVIDIA H100 SXM data sheet (float64: tensor cores); NVLink4 900 GB/s both ways; one 400 Gb/s NDR "
            "InfiniBand per GPU (DGX H100); PCIe 5 x16",
            host_gib=256,
        ),
        _entry(
            "H100-96", 95.0, 2.4, _HOPPER, 450, 50, 63,
            "H100 96 GB HBM2e (torchtitan's benchmark pages: 2.4 TB/s, 500 W, 400 Gb/s RDMA per GPU); rates of the "
            "700 W H100 SXM data sheet",
            host_gib=256,
        ),
        _entry(
            "H200", 139.8, 4.8, _HOPPER, 450, 50, 63,
            "NVIDIA H200 SXM data sheet (float64: tensor cores); NVLink4 900 GB/s both ways; one 400 Gb/s NDR "
            "InfiniBand per GPU; PCIe 5 x16",
            host_gib=256,
        ),
        _entry(
            "B200", 178.0, 7.7, _rates(float64=37, float32=75, bfloat16=2250, float16=2250, float8=4500), 900, 50, 63,
            "NVIDIA HGX B200 data sheet, per GPU (180 GB, 62 TB/s per 8); NVLink5 1.8 TB/s both ways; one 400 Gb/s "
            "InfiniBand per GPU (DGX B200); PCIe 5 x16",
            host_gib=256,
        ),
        _entry(
            "MI300X", 191.5, 5.3, _rates(float64=163.4, float32=163.4, bfloat16=1307.4, float16=1307.4, float8=2614.9),
            448, 50, 63,
            "AMD Instinct MI300X data sheet (matrix rates); 7 Infinity Fabric links of 128 GB/s both ways; one 400 "
            "Gb/s NIC per GPU; PCIe 5 x16",
            host_gib=256,
        ),
        _entry(
            "L40S", 44.3, 0.864, _rates(float64=1.43, float32=91.6, bfloat16=362.05, float16=362.05, float8=733),
            31.5, 12.5, 31.5,
            "NVIDIA L40S data sheet; no NVLink: PCIe 4 x16; assumed one 100 Gb/s network port per GPU",
            in_node_s=_PCIE_S,
        ),
        _entry(
            "RTX4090", 23.6, 1.008, _rates(float64=1.29, float32=82.6, bfloat16=165.2, float16=165.2, float8=330.3),
            31.5, 1.56, 31.5,
            "NVIDIA Ada architecture whitepaper (16-bit and 8-bit with fp32 accumulation); no NVLink, no peer "
            "access: PCIe 4 x16 "
            "through the host; assumed one 100 Gb/s Ethernet port per 8 GPUs",
            in_node_s=2 * _PCIE_S, host_gib=32,
        ),
    )
}  # fmt: skip
