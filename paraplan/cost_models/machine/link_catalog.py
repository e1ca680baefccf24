"""The catalog's data: links by standard, with what one device gets of them in one direction.

Bandwidths are those of the standards and data sheets; latencies are what NCCL's own tuner charges one step of a ring
(src/graph/tuning.cc, hwLat, Ring: NVLink LL128 1.9 us, PCIe LL128 2.5 us, network LL128 4.0 us), because that is what a
collective pays. A host copy or a disk read pays its submission: order of magnitude, marked as assumed.
"""

from __future__ import annotations

from paraplan.ir.machine.device import Link

NVLINK_S, PCIE_S, NETWORK_S = 1.9e-6, 2.5e-6, 4.0e-6
HOST_S, DISK_S, TCP_S = 1e-5, 1e-4, 3e-5

NVLINK_BYTES_PER_S = {2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""One NVLink in one direction, by generation."""

NVLINKS = {2: 6, 3: 12, 4: 18, 5: 18}
"""Links of the largest device of a generation (V100, A100, H100, B200)."""

_PCIE_TRANSFERS_PER_S = {3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
_INFINIBAND_BITS_PER_S = {"FDR": 56e9, "EDR": 100e9, "HDR": 200e9, "NDR": 400e9, "XDR": 800e9}


def nvlink(generation: int, links: int | None = None) -> Link:
    """NVLinks of one device, all of its generation where not said."""
    count = NVLINKS[generation] if links is None else links
    each = NVLINK_BYTES_PER_S[generation]
    return Link(
        bytes_per_s=count * each,
        latency_s=NVLINK_S,
        source=f"NVLink {generation}: {count} links of {each / 1e9:.0f} GB/s each way; latency: NCCL tuning.cc",
    )


def infinity_fabric() -> Link:
    """AMD MI300X: seven peers, one link of 128 GB/s (both ways) to each."""
    return Link(
        bytes_per_s=7 * 64e9,
        latency_s=NVLINK_S,
        source="AMD MI300X data sheet: 7 Infinity Fabric links of 64 GB/s each way; latency: as NVLink (RCCL)",
    )


def pcie_bytes_per_s(generation: int, width: int = 16) -> float:
    """Payload bits of the line code: 128 of 130 up to generation 5, 242 of 256 (flits) in generation 6."""
    code = 128 / 130 if generation < 6 else 242 / 256
    return _PCIE_TRANSFERS_PER_S[generation] * width * code / 8


def pcie_peer(generation: int, width: int = 16, through_host: bool = False) -> Link:
    """Two devices over PCIe; through_host: no peer access, so each message is copied twice.

    Args:
        generation: of PCIe.
        width: lanes.
        through_host: no peer access: each message is copied twice.
    """
    how = "copied through host memory" if through_host else "peer to peer"
    return Link(
        bytes_per_s=pcie_bytes_per_s(generation, width),
        latency_s=PCIE_S * (2 if through_host else 1),
        source=f"PCI Express {generation}.0 x{width}, {how}; latency: NCCL tuning.cc",
    )


COPIED_SHARE = {3: 0.8, 4: 0.82, 5: 0.87, 6: 0.87}
"""Of a generation's payload, what copies from and to pinned memory reach beside packets' headers and flow control:
CUDA's bandwidthTest prints 12.3 to 13 and 25 to 26 GB/s; an H200 copied at 54.8 GB/s either way (`benchmarks.gpu`)."""


def pcie_host(generation: int, width: int = 16) -> Link:
    """A device and its host's memory."""
    share = COPIED_SHARE[generation]
    return Link(
        bytes_per_s=share * pcie_bytes_per_s(generation, width),
        latency_s=HOST_S,
        source=f"PCI Express {generation}.0 x{width}, {share:.0%} of it; latency of an asynchronous copy: assumed",
    )


def infiniband(rate: str, share: float = 1.0, setting: str = "") -> Link:
    """A 4x port of a data rate, `share` of it per device.

    Args:
        rate: "EDR", "HDR", "NDR" or "XDR" (100, 200, 400, 800 Gb/s).
        share: ports per device.
        setting: in which machine.
    """
    bits = _INFINIBAND_BITS_PER_S[rate]
    return Link(
        bytes_per_s=bits / 8 * share,
        latency_s=NETWORK_S,
        source=f"InfiniBand {rate} {bits / 1e9:.0f} Gb/s, {_ports(share, setting)}; latency: NCCL tuning.cc",
    )


def ethernet(gbit_per_s: float, share: float = 1.0, setting: str = "", rdma: bool = True) -> Link:
    """An Ethernet port, `share` of it per device; without rdma a message goes through the kernel's TCP.

    Args:
        gbit_per_s: of the port.
        share: of it that a device has.
        setting: words on who shares the port, for the source.
        rdma: without, a message goes through the kernel's TCP.
    """
    how = "RDMA (RoCE), latency: NCCL tuning.cc" if rdma else "TCP, latency: assumed"
    return Link(
        bytes_per_s=gbit_per_s * 1e9 / 8 * share,
        latency_s=NETWORK_S if rdma else TCP_S,
        source=f"Ethernet {gbit_per_s:g} Gb/s, {_ports(share, setting)}; {how}",
    )


def _ports(share: float, setting: str) -> str:
    return f"{share:g} port{'' if share == 1 else 's'} per device{f' ({setting})' if setting else ''}"


def local_disk() -> Link:
    """One data-centre NVMe drive per device."""
    return Link(bytes_per_s=3e9, latency_s=DISK_S, source="one PCIe 4 x4 NVMe drive per device, writing: assumed")
