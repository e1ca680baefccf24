"""Multiprocessors of devices, the channels that NCCL runs over them within a node, and compute capabilities."""

from __future__ import annotations


def multiprocessors(kind: str) -> int:
    return _MULTIPROCESSORS.get(kind, 0) or _MULTIPROCESSORS[kind.partition("-")[0]]


def capability(kind: str) -> int:
    """The larger number of a kind's compute capability; 0: not NVIDIA's."""
    return _CAPABILITIES.get(kind.partition("-")[0], 0)


def channels(kind: str) -> tuple[int, str]:
    """Of a communicator within a node, and who says so."""
    return _CHANNELS.get(kind) or _CHANNELS.get(kind.partition("-")[0]) or _NVLINK4


_MULTIPROCESSORS = {
    "V100": 80,
    "A100": 108,
    "H100": 132,
    "H200": 132,
    "B200": 148,
    "MI300X": 304,
    "L40S": 142,
    "RTX4090": 128,
    "H100-PCIe": 114,
}
"""Streaming multiprocessors or compute units, from the architectures' white papers; of a kind by its first word."""


_NVLINK2 = (12, "six NVLinks, each twice, as NCCL logs on 8 x V100")
_NVLINK3 = (24, "twelve NVLinks, each twice, as NCCL logs on 8 x A100")
_NVLINK4 = (32, "8 x H100: NVIDIA/nccl issue 1685")
_PCIE = (4, "two rings over PCIe, each twice: NCCL src/graph/connect.cc")


_CHANNELS = {
    "V100": _NVLINK2,
    "A100": _NVLINK3,
    "L40S": _PCIE,
    "RTX4090": _PCIE,
    "A100-40-PCIe": _PCIE,
    "A100-80-PCIe": _PCIE,
    "H100-PCIe": _PCIE,
}
"""By kind or its first word."""

_CAPABILITIES = {"V100": 7, "A100": 8, "L40S": 8, "RTX4090": 8, "H100": 9, "H200": 9, "B200": 10}
"""By a kind's first word: CUDA C++ programming guide, "Compute Capabilities"."""
