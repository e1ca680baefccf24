"""The transport over torch.distributed: one process per rank, NCCL on cuda, Gloo on cpu.

Emitted modules reach the process groups by name (`groups`, one per mesh axis); messages between ranks of different
meshes go by a group for every pair and direction. The port serves recordings: it
exchanges private copies of what it is given, so that no tensor of the program is held by the backend and what
the account says died did die; values are those of the fast path. Checked on torch 2.13 Gloo: all collectives
used here exist for float64, float32, bfloat16 and int64.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paraplan.ir.errors import RuntimeFailure
from paraplan.ir.machine.collectives import COLLECTIVES
from paraplan.ir.machine.mesh import Mesh
from paraplan.runtime.executing import instructions
from paraplan.runtime.executing.tracker import Tracker
from paraplan.runtime.transport.collectives import IMPLEMENTATIONS, UnevenRoute, as_sent
from paraplan.runtime.transport.process_groups import limit_group, make_group
from paraplan.runtime.transport.transport import Handle

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass
class _Pending(Handle):
    """A handle whose copy is on its way."""

    pending: Tensor | None = None


@dataclass
class _Message(Handle):
    """A message on its way, and where it is received."""

    work: dist.Work | None = None
    buffer: Tensor | None = None


class DistributedTransport:
    """This process' rank among those of a mesh.

    Args:
        meshes: their devices are ranks; no two share one. Every rank of the job makes the transport with the same ones.
        device: "cpu" or "cuda" (the current device).

    Attributes:
        rank: of this process; 0 where torch.distributed is not initialised.
        groups: process group name per mesh axis, "" where the axis has one rank.
        mesh: this rank's.
        device_mesh: the mesh as DTensor knows it; None for a single process.
    """

    def __init__(self, *meshes: Mesh, device: str = "cpu") -> None:
        self.device, self.num_meshes = device, len(meshes)
        self.tracker, self.num_issued = Tracker(), 0
        self.device_mesh: DeviceMesh | None = None
        self._mesh_beside: DeviceMesh | None = None
        self.rank = dist.get_rank() if dist.is_initialized() else meshes[0].devices[0]
        self.mesh = next((mesh for mesh in meshes if self.rank in mesh.devices), meshes[0])
        needed = 1 + max(device for mesh in meshes for device in mesh.devices)
        if dist.is_initialized():
            if dist.get_world_size() < needed:
                raise RuntimeFailure(
                    f"the plan needs {needed} ranks, this job has {dist.get_world_size()}; "
                    "start torchrun with as many processes"
                )
            for mesh in meshes:
                if mesh.shape:
                    grid = torch.tensor(mesh.devices).reshape(mesh.shape)
                    made = DeviceMesh(device, grid, mesh_dim_names=mesh.axes)
                    if mesh == self.mesh:
                        self.device_mesh = made
                        for axis in range(len(mesh.shape)):
                            limit_group(made.get_group(axis))
        elif needed > 1:
            raise RuntimeFailure(
                f"the plan needs {needed} ranks and torch.distributed is not initialised; start under torchrun and "
                "call paraplan.runtime.transport.launch.init_distributed()"
            )
        self._lanes: dict[tuple[int, int], dist.ProcessGroup] = {}
        self.groups = tuple(self._group_name(axis) for axis in range(len(self.mesh.shape)))

    def _group(self, axis: int) -> dist.ProcessGroup:
        assert self.device_mesh is not None
        return self.device_mesh.get_group(axis)

    def mesh_on(self, kind: str) -> DeviceMesh:
        """The mesh for DTensors on a kind of device, "cpu" or "cuda", over the same groups.

        One for another kind than the transport's says where shards belong, as checkpoints ask; its collectives work
        only where the groups' backend serves that kind.
        """
        if self._mesh_beside is None and kind != self.device:
            groups = [self._group(axis) for axis in range(len(self.mesh.shape))]
            grid = torch.tensor(self.mesh.devices).reshape(self.mesh.shape)
            self._mesh_beside = DeviceMesh.from_group(groups, kind, grid, mesh_dim_names=self.mesh.axes)
        found = self.device_mesh if kind == self.device else self._mesh_beside
        assert found is not None
        return found

    def _group_name(self, axis: int) -> str:
        return "" if self.mesh.shape[axis] == 1 else str(self._group(axis).group_name)

    def issue(
        self, kind: str, x: Tensor, reduction: str, axis: int, in_place: bool = False, route: UnevenRoute | None = None
    ) -> Handle:
        """Start a collective on a private copy of x; `in_place`: its result is written into x.

        Args:
            kind: name of the collective.
            x: what this rank puts in.
            reduction: "sum", "max" ..., where it reduces.
            axis: of the mesh.
            in_place: whether the result is written into x.
            route: rows to and from each rank, of uneven ones.
        """
        size, what = self.mesh.shape[axis], f"{kind} over axis {self.mesh.axes[axis]}"
        if size == 1:
            return Handle(x if in_place else instructions.fresh(x), what, done=True)
        shape = COLLECTIVES[kind].result_shape(x.shape, size, 0 if route is None else route.rows)
        out = x if in_place else torch.empty(shape, dtype=x.dtype, device=x.device)
        start = IMPLEMENTATIONS[kind].start
        with self.tracker.booking(None):
            pending = start(instructions.fresh(x), reduction, size, self.groups[axis], *(route or ()))
        return _Pending(out, what, pending=pending)

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make a group for every (source, target) pair of ranks, the same ones on all ranks of the job, and exchange a
        first message by each, in one order.

        NCCL runs what one communicator is given one after another, so that a send that waits for its receive would hold
        up collectives, other pairs and what comes the other way; and connects a pair on its first message, at which
        both have to be present.
        """
        for pair in sorted(set(pairs)):
            group = make_group(sorted(pair))
            if self.rank in pair:
                self._lanes[pair] = group
        for (source, target), group in self._lanes.items():
            first = torch.zeros(1, device=self.device)
            dist.send(first, target, group) if self.rank == source else dist.recv(first, source, group)

    def send(self, x: Tensor, peer: int, what: str) -> Handle:
        """Start to send, a private copy where an account is kept.

        Args:
            x: contiguous.
            peer: the rank that receives.
            what: both ends call it.
        """
        with self.tracker.booking(None):
            kept = instructions.fresh(x) if self._is_recording else x
            work = dist.isend(as_sent(kept), peer, group=self._lanes[self.rank, peer])
        return _Message(kept, what, work=work)

    def receive(self, out: Tensor, peer: int, what: str) -> Handle:
        """Start to receive, into a private buffer where an account is kept.

        Args:
            out: contiguous.
            peer: the rank that sends.
            what: both ends call it.
        """
        with self.tracker.booking(None):
            buffer = torch.empty_like(out) if self._is_recording else out
            work = dist.irecv(as_sent(buffer), peer, group=self._lanes[peer, self.rank])
        return _Message(out, what, work=work, buffer=buffer)

    @property
    def _is_recording(self) -> bool:
        return self.tracker.is_entered

    def ready(self, handle: Handle) -> bool:
        """Waits."""
        if isinstance(handle, _Message) and handle.work is not None:
            handle.work.wait()
            if handle.buffer is not None and handle.buffer is not handle.out:
                with self.tracker.booking(None):
                    handle.out.copy_(handle.buffer)
            handle.work = handle.buffer = None
        if isinstance(handle, _Pending) and handle.pending is not None:
            with self.tracker.booking(None):
                handle.out.copy_(torch.ops._c10d_functional.wait_tensor(handle.pending))
            handle.pending = None
        return True

    def reduce(self, x: Tensor, axis: int, reduction: str = "sum") -> Tensor:
        """x reduced over a mesh axis, at once and in place.

        Args:
            x: what this rank puts in, overwritten.
            axis: of the mesh.
            reduction: "sum", "max" ...
        """
        if self.mesh.shape[axis] > 1:
            dist.all_reduce(as_sent(x), _REDUCE[reduction], group=self._group(axis))
        return x

    def agree(self, x: Tensor, reduction: str = "sum") -> Tensor:
        """x reduced over all ranks of all meshes, at once and in place."""
        if self.num_meshes > 1:
            dist.all_reduce(as_sent(x), _REDUCE[reduction])
            return x
        for axis in range(len(self.mesh.shape)):
            self.reduce(x, axis, reduction)
        return x

    def spread(self, x: Tensor, source: int) -> Tensor:
        """A rank's tensor on all ranks of all meshes."""
        if self.num_meshes > 1:
            x = instructions.fresh(x)  # as in `gather`
            dist.broadcast(as_sent(x), source)
        return x

    def everyones(self, value: Any) -> list[Any]:
        """A small value of every rank of all meshes, in order of the ranks."""
        if not dist.is_initialized():
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def gather(self, x: Tensor, axis: int) -> list[Tensor]:
        """x of every rank along a mesh axis, in order of the coordinate, at once."""
        if self.mesh.shape[axis] == 1:
            return [x]
        x = instructions.fresh(x)  # the backend's threads may hold what they are given a moment longer than the call
        parts = [torch.empty_like(x) for _ in range(self.mesh.shape[axis])]
        dist.all_gather([*map(as_sent, parts)], as_sent(x), group=self._group(axis))
        return parts
