"""Launching a Triton kernel, or, on tensors without data, noting that it would be launched.

Triton asks at every launch what each argument is, to find what it compiled: some 10 to 40 µs on the host. A `Prepared`
launch has all arguments but the tensors once and for all and remembers what Triton found, by the tensors' dtypes and
whether they are aligned, which is all that may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paraplan.ir.process.memo import SESSION
from paraplan.kernels.torch_private import is_fake

ALIGNED = 16
"""Bytes: what Triton compiles a kernel for is whether addresses are multiples of these."""

KEPT_LAUNCHES = 4096
"""Prepared launches a function keeps, the last used ones."""

_COMPILED: dict[tuple[object, ...], Callable[..., None]] = SESSION.owned("kernels.gpu.triton_launch.compiled", {})
"""What `launch` launched, by all that Triton would ask: the kernel, the device, and what the arguments are."""

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
    if 0 in grid or noted(written[0], read, written, kernel.fn.__name__):
        return
    kinds = [(x.dtype, x.data_ptr() % ALIGNED) if isinstance(x, Tensor) else x for x in args]
    key = kernel.fn, grid, warps, stages, written[0].get_device(), *map(type, args), *kinds
    found = _COMPILED.get(key)
    if found is not None:
        found(*[x.data_ptr() if isinstance(x, Tensor) else x for x in args])
        return
    options = {"num_stages": stages} if stages else {}
    compiled = kernel[grid](*args, num_warps=warps, **options)
    if compiled is not None:  # it is None in Triton's interpreter
        if len(_COMPILED) >= KEPT_LAUNCHES:
            _COMPILED.clear()
        _COMPILED[key] = compiled[(*grid, 1, 1)[:3]]


class Prepared:
    """A launch of which only the tensors are not known yet.

    Args:
        kernel, grid, warps, stages: as `launch` takes them.
        rest: the kernel's arguments after the tensors.
        num_written: how many tensors it writes, which are the last ones.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        rest: tuple[object, ...],
        num_written: int,
        warps: int = 4,
        stages: int = 0,
    ) -> None:
        self.kernel, self.grid, self.rest, self.num_written = kernel, grid, rest, num_written
        self.warps, self.stages = warps, stages
        self._found: dict[object, Callable[..., None]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Runs the kernel on its tensors."""
        if is_fake(tensors[-1]) or 0 in self.grid:
            read, written = tensors[: -self.num_written], tensors[-self.num_written :]
            launch(self.kernel, self.grid, (*tensors, *self.rest), read, written, self.warps, self.stages)
            return
        places = [x.data_ptr() for x in tensors]
        key = tensors[-1].get_device(), *[x.dtype for x in tensors], *[place % ALIGNED for place in places]
        found = self._found.get(key)
        if found is not None:
            found(*places, *self.rest)
            return
        options = {"num_stages": self.stages} if self.stages else {}
        compiled = self.kernel[self.grid](*tensors, *self.rest, num_warps=self.warps, **options)
        if compiled is not None:  # it is None in Triton's interpreter
            self._found[key] = compiled[(*self.grid, 1, 1)[:3]]


def noted(x: Tensor, read: Sequence[Tensor | None] = (), written: Sequence[Tensor] = (), name: str = "") -> bool:
    """Whether x has no data; then also notes that a kernel would be launched, if it is named.

    Args:
        x: any of the kernel's tensors.
        read, written: the tensors that the kernel reads and writes; None where an argument is absent.
        name: of the kernel; "" where nothing is to be noted.
    """
    if not is_fake(x):
        return False
    if name:
        torch.ops.paraplan_gpu.launch([each for each in read if each is not None], list(written), name)
    return True


def row_major(x: Tensor) -> Tensor:
    """x, copied where it is not contiguous."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
