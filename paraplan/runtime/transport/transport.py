"""How ranks exchange tensors: what a transport is, and the one that runs every rank in this process.

A rank deals with a `Port`: it issues a collective or a message, goes on, and later asks whether it is done. The
in-process transport matches the k-th collective every rank issues over an axis with the k-th of its peers on that axis,
and computes it with plain tensor operations when the last of them arrives (sums in rank order), so results are
the same on every run. One that works in its result has a copy made at issue, or its input; the others read their input
when the last peer issues, which is before any of them can be past its wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paraplan.ir.errors import RuntimeFailure
from paraplan.ir.machine.collectives import COLLECTIVES
from paraplan.ir.machine.mesh import Mesh
from paraplan.runtime.executing import instructions
from paraplan.runtime.executing.torch_private import untracked
from paraplan.runtime.executing.tracker import Tracker
from paraplan.runtime.transport.collectives import IMPLEMENTATIONS, UnevenRoute


@dataclass
class Handle:
    """A collective under way.

    Attributes:
        out: its result, allocated at issue; valid once done.
        done: whether it is.
        what: for messages.
    """

    out: Tensor
    what: str
    done: bool = False


class Port(Protocol):
    """A rank's way out."""

    def issue(
        self, kind: str, x: Tensor, reduction: str, axis: int, in_place: bool = False, route: UnevenRoute | None = None
    ) -> Handle:
        """Start a collective over a mesh axis; `in_place`: its result replaces x.

        Args:
            kind: name of the collective.
            x: what this rank puts in.
            reduction: "sum", "max" ..., where it reduces.
            axis: of the mesh.
            in_place: whether the result replaces x.
            route: rows to and from each rank, of uneven ones.
        """

    def send(self, x: Tensor, peer: int, what: str) -> Handle:
        """Start to send a contiguous tensor to a rank; it is left alone until that is done.

        Args:
            x: contiguous.
            peer: the rank that receives.
            what: both ends call it.
        """

    def receive(self, out: Tensor, peer: int, what: str) -> Handle:
        """Start to receive a rank's next message; `what` both ends call it.

        Args:
            out: contiguous.
            peer: the rank that sends.
            what: both ends call it.
        """

    def ready(self, handle: Handle) -> bool:
        """Whether it is done; a port that can only block does so and says yes."""


class Transport(Protocol):
    """What the ranks of this process share.

    Attributes:
        tracker: books what they allocate.
        num_issued: collectives and messages issued so far; stays 0 where waiting blocks.
    """

    tracker: Tracker
    num_issued: int

    def agree(self, x: Tensor, reduction: str = "sum") -> Tensor:
        """x, reduced over the ranks of this process already, over all ranks, in place."""


class _Letter(NamedTuple):
    """One end of a message that waits for the other."""

    x: Tensor
    what: str
    handle: Handle


@dataclass
class _Meeting:
    """A collective some of its ranks have issued."""

    kind: str
    reduction: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: dict[int, Tensor] = field(default_factory=dict)
    routes: dict[int, UnevenRoute] = field(default_factory=dict)
    handles: dict[int, Handle] = field(default_factory=dict)


class InProcessTransport:
    """All ranks of some meshes, in this process.

    Messages between two ranks have to be received in the order they are sent in, as NCCL's have, and a send ends when
    it is received.

    Args:
        meshes: no two of which share a rank.

    Attributes:
        mesh_of: the mesh of every rank.
        tracker: books what they allocate; the inside of a collective is booked to nobody.
        num_issued: collectives and messages issued so far, by any rank.
    """

    def __init__(self, *meshes: Mesh) -> None:
        self.mesh_of = {device: mesh for mesh in meshes for device in mesh.devices}
        self._lanes: dict[tuple[int, int], tuple[deque[_Letter], deque[_Letter]]] = {}
        self.tracker = Tracker()
        self.num_issued = 0
        self._groups: dict[tuple[int, int], tuple[int, ...]] = {}
        self._issued: dict[tuple[int, int], int] = {}
        self._meetings: dict[tuple[int, tuple[int, ...], int], _Meeting] = {}

    def port(self, rank: int) -> InProcessPort:
        """The port of a device of the mesh."""
        return InProcessPort(self, rank)

    def agree(self, x: Tensor, reduction: str = "sum") -> Tensor:
        """All ranks are in this process."""
        return x

    def issue(
        self,
        rank: int,
        kind: str,
        x: Tensor,
        reduction: str,
        axis: int,
        in_place: bool = False,
        route: UnevenRoute | None = None,
    ) -> Handle:
        """See `Port.issue`.

        Args:
            rank: that issues.
            kind, x, reduction, axis, in_place, route: as of `Port.issue`.
        Raises:
            RuntimeFailure: peers issued something else in its place.
        """
        self.num_issued += 1
        mesh = self.mesh_of[rank]
        group = self._groups.get((rank, axis)) or self._groups.setdefault((rank, axis), mesh.group(rank, axis))
        count = self._issued[rank, axis] = self._issued.get((rank, axis), -1) + 1
        what = f"{kind} {count} over axis {mesh.axes[axis]}"
        handle = Handle(x if in_place else self._result(kind, x, len(group), route), what)
        found = _Meeting(kind, reduction, tuple(x.shape), x.dtype)
        meeting = self._meetings.setdefault((axis, group, count), found)
        here, there = (
            (kind, reduction, tuple(x.shape), x.dtype),
            (meeting.kind, meeting.reduction, meeting.shape, meeting.dtype),
        )
        if here != there:
            raise RuntimeFailure(
                f"{what}: rank {rank} issues {here}, its peer {next(iter(meeting.inputs))} issued {there}"
            )
        meeting.inputs[rank] = handle.out if COLLECTIVES[kind].in_place else x
        meeting.handles[rank] = handle
        if route is not None:
            meeting.routes[rank] = route
        if len(meeting.handles) == len(group):
            del self._meetings[axis, group, count]
            with untracked():
                _complete(meeting, group)
        return handle

    def post(self, source: int, target: int, x: Tensor, sends: bool, what: str) -> Handle:
        """One end of a message between two ranks.

        Args:
            source, target: the ranks.
            x: what is sent, or where it arrives.
            sends: whether this end sends.
            what: both ends call it.
        Raises:
            RuntimeFailure: the other end's next message in this direction is another one.
        """
        self.num_issued += 1
        handle = Handle(x, what)
        lane = self._lanes.setdefault((source, target), (deque(), deque()))
        lane[sends].append(_Letter(x, what, handle))
        while lane[0] and lane[1]:
            received, sent = lane[0].popleft(), lane[1].popleft()
            here, there = ((each.what, tuple(each.x.shape), each.x.dtype) for each in (received, sent))
            if here != there:
                raise RuntimeFailure(f"rank {target} receives {here} where rank {source} sends {there}")
            with untracked():
                received.x.copy_(sent.x)
            received.handle.done = sent.handle.done = True
        return handle

    def _result(self, kind: str, x: Tensor, size: int, route: UnevenRoute | None) -> Tensor:
        with untracked():
            shape = COLLECTIVES[kind].result_shape(x.shape, size, 0 if route is None else route.rows)
            copied = COLLECTIVES[kind].in_place
            result = instructions.fresh(x) if copied else torch.empty(shape, dtype=x.dtype, device=x.device)
        if self.tracker.current is not None:
            self.tracker.current.register(result)
        return result


@dataclass(frozen=True)
class InProcessPort:
    """One rank's port of an `InProcessTransport`."""

    transport: InProcessTransport
    rank: int

    def issue(
        self, kind: str, x: Tensor, reduction: str, axis: int, in_place: bool = False, route: UnevenRoute | None = None
    ) -> Handle:
        """Start a collective.

        Args:
            kind, x, reduction, axis, in_place, route: as of `Port.issue`.
        """
        return self.transport.issue(self.rank, kind, x, reduction, axis, in_place, route)

    def send(self, x: Tensor, peer: int, what: str) -> Handle:
        """Start to send.

        Args:
            x, peer, what: as of `Port.send`.
        """
        return self.transport.post(self.rank, peer, x, True, what)

    def receive(self, out: Tensor, peer: int, what: str) -> Handle:
        """Start to receive.

        Args:
            out, peer, what: as of `Port.receive`.
        """
        return self.transport.post(peer, self.rank, out, False, what)

    def ready(self, handle: Handle) -> bool:
        """Whether every peer has issued it."""
        return handle.done


def _complete(meeting: _Meeting, group: tuple[int, ...]) -> None:
    inputs = [meeting.inputs[rank] for rank in group]
    routes = [meeting.routes[rank] for rank in group if rank in meeting.routes]
    parts = IMPLEMENTATIONS[meeting.kind].exchange(inputs, meeting.reduction, routes)
    for rank, part in zip(group, parts, strict=True):
        meeting.handles[rank].out.copy_(part)
    for handle in meeting.handles.values():
        handle.done = True
