"""Launching a Triton kernel, or, on tensors without data, noting that it would be launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paraplan.kernels.torch_private import is_fake

_LIBRARY = torch.library.Library("paraplan_gpu", "DEF")
_LIBRARY.define("launch(Tensor[] read, Tensor(a!)[] written, str name) -> ()")


@torch.library.register_fake("paraplan_gpu::launch", lib=_LIBRARY)
def _launch(read: list[Tensor], written: list[Tensor], name: str) -> None:
    pass


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: Sequence[object],
    read: Sequence[Tensor],
    written: Sequence[Tensor],
    warps: int = 4,
    stages: int = 0,
) -> None:
    """Runs a kernel over a grid; without data, an op of its name passes the dispatch modes instead.

    Args:
        kernel: jitted by Triton.
        grid: programs; nothing happens where there are none.
        args: the kernel's, in order.
        read, written: the tensors among them.
        warps: of a program.
        stages: iterations of its loops whose loads are in flight at once; as Triton chooses where 0.
    """
    if 0 not in grid and not noted(written[0], read, written, kernel.fn.__name__):
        options = {"num_stages": stages} if stages else {}
        kernel[grid](*args, num_warps=warps, **options)


def noted(x: Tensor, read: Sequence[Tensor | None] = (), written: Sequence[Tensor] = (), name: str = "") -> bool:
    """Whether x has no data; then also notes that a kernel would be launched, if it is named."""
    if not is_fake(x):
        return False
    if name:
        torch.ops.paraplan_gpu.launch([each for each in read if each is not None], list(written), name)
    return True


def row_major(x: Tensor) -> Tensor:
    """x, copied where it is not contiguous."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
