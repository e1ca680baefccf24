"""What `nvidia-smi topo -m` prints on machines of several kinds, shortened to their form."""

DGX_H100 = """\
        GPU0    GPU1    GPU2    GPU3    NIC0    NIC1    NIC2    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    NV18    NV18    PXB     NODE    SYS     0-55,112-167    0               N/A
GPU1    NV18     X      NV18    NV18    PXB     NODE    SYS     0-55,112-167    0               N/A
GPU2    NV18    NV18     X      NV18    NODE    PXB     SYS     56-111,168-223  1               N/A
GPU3    NV18    NV18    NV18     X      NODE    PXB     SYS     56-111,168-223  1               N/A
NIC0    PXB     PXB     NODE    NODE     X      NODE    SYS
NIC1    NODE    NODE    PXB     PXB     NODE     X      SYS
NIC2    SYS     SYS     SYS     SYS     SYS     SYS      X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
  NIC2: mlx5_2
"""

DGX1_V100 = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tmlx5_0\tmlx5_1\tCPU Affinity
GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS\tPIX\tSYS\t0-19,40-59
GPU1\tNV1\t X \tNV2\tNV1\tSYS\tNV2\tSYS\tSYS\tPIX\tSYS\t0-19,40-59
GPU2\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNV1\tSYS\tPHB\tSYS\t0-19,40-59
GPU3\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tSYS\tNV1\tPHB\tSYS\t0-19,40-59
GPU4\tNV2\tSYS\tSYS\tSYS\t X \tNV1\tNV1\tNV2\tSYS\tPIX\t20-39,60-79
GPU5\tSYS\tNV2\tSYS\tSYS\tNV1\t X \tNV2\tNV1\tSYS\tPIX\t20-39,60-79
GPU6\tSYS\tSYS\tNV1\tSYS\tNV1\tNV2\t X \tNV2\tSYS\tPHB\t20-39,60-79
GPU7\tSYS\tSYS\tSYS\tNV1\tNV2\tNV1\tNV2\t X \tSYS\tPHB\t20-39,60-79
mlx5_0\tPIX\tPIX\tPHB\tPHB\tSYS\tSYS\tSYS\tSYS\t X \tSYS\t
mlx5_1\tSYS\tSYS\tSYS\tSYS\tPIX\tPIX\tPHB\tPHB\tSYS\t X \t
"""

FOUR_A100_BOARD = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      NV4     NV4     NV4     24-31           3
GPU1    NV4      X      NV4     NV4     16-23           2
GPU2    NV4     NV4      X      NV4     8-15            1
GPU3    NV4     NV4     NV4      X      0-7             0
"""

# Bridges join pairs only; the driver underlines the header where it writes to a terminal.
BRIDGED_PAIRS = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\t0-15\t0
GPU1\tNV12\t X \tSYS\tSYS\t0-15\t0
GPU2\tSYS\tSYS\t X \tNV12\t16-31\t1
GPU3\tSYS\tSYS\tNV12\t X \t16-31\t1
"""

ONE_SWITCH = """\
        GPU0    GPU1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      PIX     0-31    0               N/A
GPU1    PIX      X      0-31    0               N/A
"""

NIC_FIRST = """\
        NIC0    GPU0    GPU1    CPU Affinity
NIC0     X      PIX     PIX
GPU0    PIX      X      NV2     0-7
GPU1    PIX     NV2      X      0-7
"""

ONE_GPU = """\
\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \t0-15\t0\t\tN/A
"""
