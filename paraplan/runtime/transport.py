"""How ranks exchange tensors: what a transport is, and the one that runs every rank in this process.

A rank deals with a `Port`: it issues a collective or a message, goes on, and later asks whether it is done. The
in-process transport matches the k-th collective every rank issues over an axis with the k-th of its peers on that axis,
and computes it with plain tensor operations when the last of them arrives (sums in rank order), so results are
the same on every run. `all_reduce` works on a copy made at issue, or on its input; the others read their input when
the last peer issues, which is before any of them can be past its wait.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paraplan.ir.errors import RuntimeFailure
from paraplan.ir.mesh import Mesh
from paraplan.runtime import ops
from paraplan.runtime.torch_private import untracked
from paraplan.runtime.tracker import Ledger, Tracker


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


class Route(NamedTuple):
    """How an all-to-all of unequal parts goes: rows sent to and received from each rank, and rows of the result."""

    sent: Tensor
    received: Tensor
    rows: int


class Port(Protocol):
    """A rank's way out."""

    def issue(
        self, kind: str, x: Tensor, reduction: str, axis: int, in_place: bool = False, route: Route | None = None
    ) -> Handle:
        """Start a collective over a mesh axis; `in_place`: an all-reduce whose result replaces x."""

    def send(self, x: Tensor, peer: int, what: str) -> Handle:
        """Start to send a contiguous tensor to a rank; it is left alone until that is done."""

    def receive(self, out: Tensor, peer: int, what: str) -> Handle:
        """Start to receive a rank's next message; `what` both ends call it."""

    def ready(self, handle: Handle) -> bool:
        """Whether it is done; a port that can only block does so and says yes."""

    def booking(self, ledger: Ledger | None) -> AbstractContextManager[None]:
        """While inside, what is allocated is booked to a ledger."""


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
    routes: dict[int, Route] = field(default_factory=dict)
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

    def issue(
        self, rank: int, kind: str, x: Tensor, reduction: str, axis: int, in_place: bool = False,
        route: Route | None = None,
    ) -> Handle:  # fmt: skip
        """See `Port.issue`.

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
        meeting.inputs[rank] = handle.out if kind == "all_reduce" else x
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

    def _result(self, kind: str, x: Tensor, size: int, route: Route | None) -> Tensor:
        with untracked():
            empty = kind != "all_reduce"
            shape = ops.collective_shape(kind, x.shape, size) if route is None else (route.rows, *x.shape[1:])
            result = torch.empty(shape, dtype=x.dtype, device=x.device) if empty else ops.fresh(x)
        if self.tracker.current is not None:
            self.tracker.current.register(result)
        return result


@dataclass(frozen=True)
class InProcessPort:
    """One rank's port of an `InProcessTransport`."""

    transport: InProcessTransport
    rank: int

    def issue(
        self, kind: str, x: Tensor, reduction: str, axis: int, in_place: bool = False, route: Route | None = None
    ) -> Handle:
        """Start a collective."""
        return self.transport.issue(self.rank, kind, x, reduction, axis, in_place, route)

    def send(self, x: Tensor, peer: int, what: str) -> Handle:
        """Start to send."""
        return self.transport.post(self.rank, peer, x, True, what)

    def receive(self, out: Tensor, peer: int, what: str) -> Handle:
        """Start to receive."""
        return self.transport.post(peer, self.rank, out, False, what)

    def ready(self, handle: Handle) -> bool:
        """Whether every peer has issued it."""
        return handle.done

    def booking(self, ledger: Ledger | None) -> AbstractContextManager[None]:
        """Book to a ledger."""
        return self.transport.tracker.booking(ledger)


def _complete(meeting: _Meeting, group: tuple[int, ...]) -> None:
    inputs = [meeting.inputs[rank] for rank in group]
    outs = [meeting.handles[rank].out for rank in group]
    if meeting.kind in ("all_reduce", "reduce_scatter"):
        total = _reduce(inputs, meeting.reduction)
        parts = [total] * len(outs) if meeting.kind == "all_reduce" else list(total.chunk(len(outs)))
    elif meeting.kind == "all_gather":
        parts = [torch.cat(inputs)] * len(outs)
    elif meeting.kind == "permute":
        parts = inputs[-1:] + inputs[:-1]
    elif meeting.kind == "route":
        parts = _routed(inputs, [meeting.routes[rank] for rank in group])
    else:
        parts = [torch.cat([x.chunk(len(group))[index] for x in inputs]) for index in range(len(group))]
    for out, part in zip(outs, parts, strict=True):
        out.copy_(part)
    for handle in meeting.handles.values():
        handle.done = True


def _routed(inputs: list[Tensor], routes: list[Route]) -> list[Tensor]:
    """What each rank has after an all-to-all of unequal parts.

    Raises:
        RuntimeFailure: ranks disagree on what goes from one to another.
    """
    sent = [route.sent.tolist() for route in routes]
    found = []
    for index, route in enumerate(routes):
        if route.received.tolist() != [row[index] for row in sent]:
            raise RuntimeFailure(f"route: place {index} expects {route.received.tolist()} rows, its peers send {sent}")
        places = [sum(row[:index]) for row in sent]
        rows = [x[at : at + row[index]] for x, at, row in zip(inputs, places, sent, strict=True)]
        short = route.rows - sum(row[index] for row in sent)
        found.append(torch.cat([*rows, rows[0].new_zeros((short, *rows[0].shape[1:]))]))
    return found


def _reduce(inputs: list[Tensor], reduction: str) -> Tensor:
    total = inputs[0].clone()
    for x in inputs[1:]:
        total = torch.maximum(total, x) if reduction == "max" else total.add_(x)
    return total
