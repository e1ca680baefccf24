"""What others than a plan's tensors have of a device's memory: driver, communicators, what the allocator loses.

A plan is made for what is left (`ClusterSpec.plan_bytes`). Numbers are per kind of device, each with its source.
Limits: of communicators there are three (two axes of a mesh, and messages between stages). An all-to-all over NVLink
joins every pair of a node and takes 3.3 GB more on 8 H100 (NVIDIA/nccl issue 1685): plan for more by `reserve`.
"""

from __future__ import annotations

from paraplan.ir.struct import Value

_CONTEXT_BYTES = 640 << 20
_COMMUNICATORS, _NEIGHBOURS, _CHANNEL_BYTES = 3, 2, 10 << 20
_MISSED_SHARE = 1 / 32
_PROCESS_BYTES = 512 << 20
_PIECES_SHARE = 1 / 16


class Reserve(Value, frozen=True, kw_only=True):
    """Device memory that a plan's tensors cannot have.

    Attributes:
        what: who has it, in a few words.
        nbytes: how much.
        joined: whether only where a cluster has several devices.
        source: where the number comes from.
    """

    what: str
    nbytes: int
    joined: bool = False
    source: str = ""


def cuda_reserves(memory_bytes: int, channels: int, said_of_channels: str) -> tuple[Reserve, ...]:
    """Of a GPU.

    Args:
        memory_bytes: what a process sees.
        channels: how many a communicator has in a node.
        said_of_channels: where that number comes from.
    """
    return (
        Reserve(
            what="CUDA context",
            nbytes=_CONTEXT_BYTES,
            source="driver, and kernels loaded as they are used: 300 MB by pytorch issue 107667; 1.06 GB on an H100, "
            "with a communicator's own, by NVIDIA/nccl issue 1685",
        ),
        Reserve(
            what="NCCL buffers",
            nbytes=_COMMUNICATORS * channels * _NEIGHBOURS * _CHANNEL_BYTES,
            joined=True,
            source=f"{_COMMUNICATORS} communicators of {channels} channels ({said_of_channels}), each with 10 MiB of "
            "buffers (NVIDIA/nccl issue 1685) for either neighbour",
        ),
        Reserve(
            what="allocator",
            nbytes=int(memory_bytes * _MISSED_SHARE),
            source="what the replay of the caching allocator does not see: cuBLAS' workspaces (32 MiB for every handle "
            "and stream on Hopper), streams, pieces; of the size of its errors on published rows (docs/benchmarks.md)",
        ),
    )


def cpu_reserves(plan_bytes: int) -> tuple[Reserve, ...]:
    """Of a CPU process whose plan may hold so much; there is no context, and Gloo's buffers are the process'."""
    said = "what plans at the edge of a hard limit took beyond their peaks (python -m benchmarks.hard_limit)"
    return (
        Reserve(
            what="process",
            nbytes=_PROCESS_BYTES,
            source=f"Python, torch and their objects, threads, scratch of kernels: {said}",
        ),
        Reserve(
            what="allocator", nbytes=int(plan_bytes * _PIECES_SHARE), source=f"malloc's rounding up and pieces: {said}"
        ),
    )
