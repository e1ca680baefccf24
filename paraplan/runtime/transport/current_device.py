"""The GPU of this process: "cuda" means the current one everywhere, which torch keeps for each thread apart."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch

from paraplan.ir.errors import RuntimeFailure


def local_gpu() -> int:
    """The number of this rank's GPU: LOCAL_RANK, or 0 where a launcher shows each process its own alone.

    Raises:
        RuntimeFailure: this process sees several GPUs, and fewer than ranks.
    """
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count == 1:
        return 0
    if rank >= count:
        raise RuntimeFailure(
            f"LOCAL_RANK is {rank} and this process sees {count} GPUs; start as many processes on this machine as it "
            "has GPUs, or show each process its own (CUDA_VISIBLE_DEVICES)"
        )
    return rank


def choose_gpu() -> None:
    """Make this rank's GPU the current one under torchrun, unless another than the first was chosen already."""
    if "LOCAL_RANK" in os.environ and torch.cuda.current_device() == 0:
        torch.cuda.set_device(local_gpu())


def on_this_device(device: str) -> Callable[[], None]:
    """What a thread calls first to work on the device of the thread that started it.

    Args:
        device: "cpu", for which nothing is to be done, or "cuda".
    """
    return partial(torch.cuda.set_device, torch.cuda.current_device()) if device == "cuda" else _stay


def _stay() -> None:
    """A CPU has no current device."""
