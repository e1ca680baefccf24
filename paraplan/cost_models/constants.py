"""Every efficiency constant of the cost model, with its meaning and its source; and the allocator's block.

A cluster's rates are peaks from data sheets; these numbers say what share of a peak real kernels reach.
There are seven, one of Hopper's power (`device_catalog.HOPPER_WATTS`), and a table of kernels that are slower than
streams (`ops.access_patterns`); none is fitted per model or per published row.
Bandwidths and latencies of links stand with the links (`link_catalog.py`). A CPU "cluster" carries measured rates
(`ClusterSpec.local`), so its shares are 1.
"""

from __future__ import annotations

from paraplan.ir.struct import Value


class Efficiency(Value, frozen=True, kw_only=True):
    """Shares of the peak that software reaches on a kind of machine.

    Attributes:
        matmul: share of the peak matrix rate a large, well-shaped GEMM reaches (power and clock limits).
        attention: the same for fused attention (softmax between two matmuls, masked tiles).
        half_dim: Hockney's half-performance length, of a GEMM's tile edge and of its inner dim (see `tiles`); where
            multiprocessors are not known, of its narrowest dim.
        memory: share of the memory bandwidth a streaming kernel reaches, on the device and on the host.
        in_node, between_nodes: share of a link's bandwidth a collective's ring reaches.
        collective_start_s: time before a collective's first byte moves (kernel, rendezvous of channels).
    """

    matmul: float
    attention: float
    half_dim: int
    memory: float
    in_node: float
    between_nodes: float
    collective_start_s: float


GPU = Efficiency(
    # What a product reaches of which all tiles are busy (`tiles` says what is lost where they are not). cuBLAS at
    # 8192^3, alone and cool, is commonly measured at 250-270 of 312 TFLOP/s on A100, which holds its boost clock; below
    # that, since a training step keeps the board hot and its operands are not as kind. By how much was set on steps of
    # A100 whose layout and recomputation the source states (docs/benchmarks.md). Boards that do not hold their clock
    # lose more (`Device.power_share`, `clocks`).
    matmul=0.78,
    # Forward and backward together, weighed by their work (2 to 5), causal, head dim 128, 4k to 8k: FlashAttention-2 is
    # at 0.55-0.6 on A100 and at 0.3 on H100, cuDNN at 0.4-0.45 there, FlashAttention-3 at 0.45-0.5 (Dao 2023, arXiv
    # 2307.08691, figures 4-7; Shah et al. 2024, arXiv 2407.08608, figures 5-6). On H100 power leaves four fifths of
    # this, which is between the two that frameworks call.
    attention=0.46,
    # Hockney & Jesshope 1988 (n-half). Of cuBLAS' tiles on A100, those of 128 x 128 reach 0.9 of what 256 x 128 do, and
    # those of 64 x 64 0.7 (NVIDIA, Matrix Multiplication Background User's Guide, tile efficiency).
    half_dim=64,
    # Row misses, refresh and turnarounds of DRAM: STREAM-like kernels reach 0.88-0.92 on A100 and H100 (triad 3.09 of
    # 3.35 TB/s); framework pointwise kernels lie slightly below, others far (`ops.access_patterns`). Servers of two
    # sockets reach 0.75-0.85 of their modules' peak.
    memory=0.85,
    # Packet headers and flow control: NCCL's tuner caps A100's NVLink3 at 235 of 300 GB/s (src/graph/tuning.cc,
    # compCap80), nccl-tests print as much at 1 GB, and 360-370 of 450 on H100's NVLink4 without SHARP.
    in_node=0.8,
    # The same on a network port: nccl-tests over 200/400 Gb/s InfiniBand with GPUDirect reach 0.85-0.95 of its rate.
    between_nodes=0.88,
    # Starting the kernel on all ranks and meeting: NCCL src/graph/tuning.cc (2.18 and later), baseLat of ring LL.
    collective_start_s=6.6e-6,
)

CPU = Efficiency(
    matmul=1.0,
    attention=1.0,
    half_dim=16,
    memory=1.0,
    in_node=1.0,
    between_nodes=1.0,
    collective_start_s=0.0,
)

CUDA_BLOCK_BYTES = 512
"""What CUDA's caching allocator rounds every allocation up to (kMinBlockSize, c10/cuda/CUDACachingAllocator.h, torch
2.11 to 2.13); `torch.cuda.memory_allocated` counts rounded blocks. Its segments (2 MiB, 20 MiB, multiples of 2 MiB) are
memory_reserved (`allocator.py`)."""


def efficiency_of(backend: str) -> Efficiency:
    """The shares for a device's backend ("cuda" or "cpu")."""
    return CPU if backend == "cpu" else GPU
