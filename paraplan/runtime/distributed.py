"""The transport over torch.distributed: one process per rank, NCCL on cuda, Gloo on cpu.

Emitted modules reach the process groups by name (`groups`, one per mesh axis). The port serves recordings: it
exchanges private copies of what it is given, so that no tensor of the program is held by the backend and what
the account says died did die; values are those of the fast path. Checked on torch 2.13 Gloo: all collectives
used here exist for float64, float32, bfloat16 and int64.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paraplan.ir.errors import RuntimeFailure
from paraplan.ir.mesh import Mesh
from paraplan.runtime import ops
from paraplan.runtime.tracker import Ledger, Tracker
from paraplan.runtime.transport import Handle, Route

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass
class _Pending(Handle):
    """A handle whose copy is on its way."""

    pending: Tensor | None = None


class DistributedTransport:
    """This process' rank among those of a mesh.

    Args:
        mesh: its devices are ranks. Every rank of the job makes the transport, in the same order.
        device: "cpu" or "cuda" (the current device).

    Attributes:
        rank: of this process; 0 where torch.distributed is not initialised.
        groups: process group name per mesh axis, "" where the axis has one rank.
        device_mesh: the mesh as DTensor knows it; None for a single process.
    """

    def __init__(self, mesh: Mesh, device: str = "cpu") -> None:
        self.mesh, self.device = mesh, device
        self.tracker = Tracker()
        self.device_mesh: DeviceMesh | None = None
        self.rank = dist.get_rank() if dist.is_initialized() else mesh.devices[0]
        if dist.is_initialized():
            if dist.get_world_size() <= max(mesh.devices):
                raise RuntimeFailure(
                    f"the plan needs {max(mesh.devices) + 1} ranks, this job has {dist.get_world_size()}; "
                    "start torchrun with as many processes"
                )
            if mesh.shape:
                grid = torch.tensor(mesh.devices).reshape(mesh.shape)
                self.device_mesh = DeviceMesh(device, grid, mesh_dim_names=mesh.axes)
        elif mesh.size > 1:
            raise RuntimeFailure(
                f"the plan needs {mesh.size} ranks and torch.distributed is not initialised; start under torchrun and "
                "call paraplan.runtime.launch.init_distributed()"
            )
        self.groups = tuple(self._group_name(axis) for axis in range(len(mesh.shape)))

    def _group(self, axis: int) -> dist.ProcessGroup:
        assert self.device_mesh is not None
        return self.device_mesh.get_group(axis)

    def _group_name(self, axis: int) -> str:
        return "" if self.mesh.shape[axis] == 1 else str(self._group(axis).group_name)

    def issue(
        self, kind: str, x: Tensor, reduction: str, axis: int, in_place: bool = False, route: Route | None = None
    ) -> Handle:
        """Start a collective on a private copy of x; `in_place`: its result is written into x."""
        size, what = self.mesh.shape[axis], f"{kind} over axis {self.mesh.axes[axis]}"
        if size == 1:
            return Handle(x if in_place else ops.fresh(x), what, done=True)
        shape = ops.collective_shape(kind, x.shape, size) if route is None else (route.rows, *x.shape[1:])
        out = x if in_place else torch.empty(shape, dtype=x.dtype, device=x.device)
        with self.tracker.booking(None):
            pending = (
                self._start(kind, ops.fresh(x), reduction, size, self.groups[axis])
                if route is None
                else ops.route(ops.fresh(x), *route, self.groups[axis])
            )
        return _Pending(out, what, pending=pending)

    def _start(self, kind: str, x: Tensor, reduction: str, size: int, group: str) -> Tensor:
        c10d = torch.ops._c10d_functional
        if kind == "all_reduce":
            return c10d.all_reduce(x, reduction, group)  # type: ignore[no-any-return]
        if kind == "all_gather":
            return c10d.all_gather_into_tensor(x, size, group)  # type: ignore[no-any-return]
        if kind == "reduce_scatter":
            return c10d.reduce_scatter_tensor(x, reduction, size, group)  # type: ignore[no-any-return]
        if kind == "permute":
            return ops.permute(x, size, group)
        rows = [x.shape[0] // size] * size
        return c10d.all_to_all_single(x, rows, rows, group)  # type: ignore[no-any-return]

    def ready(self, handle: Handle) -> bool:
        """Waits."""
        if isinstance(handle, _Pending) and handle.pending is not None:
            with self.tracker.booking(None):
                handle.out.copy_(torch.ops._c10d_functional.wait_tensor(handle.pending))
            handle.pending = None
        return True

    def booking(self, ledger: Ledger | None) -> AbstractContextManager[None]:
        """Book to a ledger."""
        return self.tracker.booking(ledger)

    def reduce(self, x: Tensor, axis: int, reduction: str = "sum") -> Tensor:
        """x reduced over a mesh axis, at once and in place."""
        if self.mesh.shape[axis] > 1:
            dist.all_reduce(x, _REDUCE[reduction], group=self._group(axis))
        return x

    def gather(self, x: Tensor, axis: int) -> list[Tensor]:
        """x of every rank along a mesh axis, in order of the coordinate, at once."""
        if self.mesh.shape[axis] == 1:
            return [x]
        x = ops.fresh(x)  # the backend's threads may hold what they are given a moment longer than the call
        parts = [torch.empty_like(x) for _ in range(self.mesh.shape[axis])]
        dist.all_gather(parts, x, group=self._group(axis))
        return parts
