"""A short, honest measurement of a device: matrix rate per dtype, memory bandwidth, time to start a kernel.

All of a CPU's cores work at once and what they reach is shared out over the processes, because that is what they have
when they all run. Each number is the best of what fits into a fraction of a second: the rate of a machine that is left
alone, which is what a cluster file states.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from paraplan.kernels.float8_kernels import product

_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def matmul_flops_per_s(dtype: str, device: str = "cpu", seconds: float = 0.1) -> float | None:
    """Operations per second of the largest square matrix product that is quick enough; None where there is none.

    Args:
        dtype: torch's name, of both operands.
        device: torch's name.
        seconds: about as long as one size is repeated for.
    """
    rate = None
    for size in _SIZES:
        try:
            took = _best_s(_product(torch.ones(size, size, dtype=_DTYPES[dtype], device=device)), device, seconds)
        except RuntimeError:  # torch has no kernel for this dtype here
            return rate
        rate = max(rate or 0.0, 2 * size**3 / took)
        if 8 * took > 4 * seconds:
            break
    return rate


def _product(a: Tensor) -> Callable[[], Tensor]:
    """A matrix times itself."""
    if a.element_size() == 1:
        one = torch.ones((), device=a.device)
        return lambda: product(a, a, one, one)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


def copy_bytes_per_s(device: str = "cpu", seconds: float = 0.2, nbytes: int = 1 << 28) -> float:
    """Bytes read and written per second by a copy of more than the caches hold.

    Args:
        device: torch's name.
        seconds: about as long as it is repeated for.
        nbytes: that are copied.
    """
    source = torch.ones(nbytes // 8, dtype=torch.float64, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / _best_s(lambda: target.copy_(source), device, seconds)


def launch_s(device: str = "cpu", seconds: float = 0.05) -> float:
    """Time of an op on one element."""
    x = torch.ones(1, device=device)
    count = 100

    def many() -> Tensor:
        for _ in range(count):
            x.add_(1.0)
        return x

    return _best_s(many, device, seconds) / count


IN_A_STEP = 3.0
"""What the host takes for a kernel of a step, to one of torch's in a loop: on an H200's host (Xeon, 2.1 GHz) 28 us to
9.3, by steps of GPT-2 and smaller models that wait for it."""


ISSUE_S = 0.3
"""Seconds it is measured for; in a sixth of that, processes beside have tripled the best that was seen."""


def issue_s(device: str) -> float:
    """Time the host takes to issue a kernel of a step; 0.0 on a CPU, which runs what it issues."""
    return 0.0 if device == "cpu" else IN_A_STEP * launch_s(device, ISSUE_S)


def _best_s(run: Callable[[], Tensor], device: str, seconds: float) -> float:
    """The shortest of at least two runs, after one that warms up."""

    def once() -> float:
        started = time.perf_counter()
        run()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    once()
    until = time.perf_counter() + seconds
    best = min(once(), once())
    while time.perf_counter() < until:
        best = min(best, once())
    return best
