"""How a value gets from the ranks of one mesh to those of another.

Between meshes of one shape every rank sends its part to the rank in its place, partial sums as they are. Otherwise
partial sums are completed first, a dim stays sharded over the target's axes of the same names, and every receiving rank
gets the parts of its block from ranks that have them: nothing is gathered, and where a block has several holders
receivers are spread over them. Shards of a dim must nest for that (one count divides the other); where they do not, or
a dim is padded, the receivers have that dim whole or the senders gather it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from paraplan.ir.execution.rank_program import PeerTransfer
from paraplan.ir.execution.streams import Channel
from paraplan.ir.machine.mesh import Layout, Mesh, Partial, Placement, R, Shard, local_shape, padded_dims
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.process.memo import SESSION

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Message:
    """A value that crosses between two groups of ranks.

    Attributes:
        name: unique in the plan.
        source, target: indices of the groups.
        spec: global.
        sent, received: layouts on the extended meshes of both.
        wanted: what the target makes of it on arrival.
        of_microbatch: whether there is one per microbatch; else one per step.
    """

    name: str
    source: int
    target: int
    spec: TensorSpec
    sent: Layout
    received: Layout
    wanted: Layout
    of_microbatch: bool = True


@dataclass(frozen=True)
class Ends:
    """Both ends of a message.

    Attributes:
        sends, receives: what every rank of the source sends, and of the target receives, in order.
        pieces: per dim, how many of the received parts lie side by side.
    """

    sends: tuple[PeerTransfer, ...]
    receives: tuple[PeerTransfer, ...]
    pieces: Dims


def crossing_layouts(
    spec: TensorSpec, layout: Layout, source: Mesh, target: Mesh, m: int, in_parts: bool = False
) -> tuple[Layout, Layout]:
    """How a value that lies in some (extended) layout is sent, and how it arrives.

    Args:
        spec, layout: of the value on the source.
        source, target: meshes.
        m: microbatches.
        in_parts: whether, on equal meshes, ranks that hold the same send a part of it each (`Plan.parted_messages`).
    """
    if source.shape == target.shape:
        return layout, _in_parts(spec, layout, (m, *target.shape)) if in_parts else layout
    padded = {dim for dim, _ in padded_dims(spec.shape, layout, (m, *source.shape))}
    sent: list[Placement] = [
        R if isinstance(place, Partial) or (isinstance(place, Shard) and place.dim in padded) else place
        for place in layout[1:]
    ]
    shape = local_shape(spec.shape, layout[:1], (m,))
    received: list[Placement] = [R] * len(target.shape)
    for axis, name in enumerate(target.axes):
        place = sent[source.axes.index(name)] if name in source.axes else R
        if isinstance(place, Shard):
            before, after = _count(sent, source.shape, place.dim), target.shape[axis]
            after *= _count(received, target.shape, place.dim)
            if shape[place.dim] % after == 0 and (before % after == 0 or after % before == 0):
                received[axis] = place
    return (layout[0], *sent), (layout[0], *received)


def _in_parts(spec: TensorSpec, layout: Layout, extended: Dims) -> Layout:
    """A layout sharded over the axes on which it is replicated, along dims that nothing else shards."""
    if any(isinstance(place, Partial) for place in layout) or padded_dims(spec.shape, layout, extended):
        return layout
    found, shape = list(layout), local_shape(spec.shape, layout, extended)
    for axis, n in enumerate(extended):
        taken = {place.dim for place in found if isinstance(place, Shard)}
        dims = (dim for dim, size in enumerate(shape) if dim not in taken and size % n == 0)
        if found[axis] == R and n > 1 and axis and (dim := next(dims, None)) is not None:
            found[axis] = Shard(dim=dim)
    return tuple(found)


def _count(layout: list[Placement], shape: Dims, dim: int) -> int:
    return math.prod(n for place, n in zip(layout, shape, strict=True) if isinstance(place, Shard) and place.dim == dim)


@SESSION.cached(4096)
def ends_of(message: Message, source: Mesh, target: Mesh, m: int) -> Ends:
    """Who sends which part of a message to whom.

    Args:
        message: what is sent, and its layouts at both ends.
        source, target: the meshes.
        m: number of microbatches.
    """
    channel = Channel(source.devices[0], target.devices[0])
    spec, name = message.spec, message.name

    def transfer(shape: Dims, peers: Dims, sends: bool, starts: tuple[Dims, ...] = ()) -> PeerTransfer:
        return PeerTransfer(
            message=name, dtype=spec.dtype, shape=shape, peers=peers, starts=starts, channel=channel, sends=sends
        )

    if source.shape == target.shape and message.sent == message.received:
        shape = local_shape(spec.shape, message.sent, (m, *source.shape))
        sent, received = transfer(shape, target.devices, True), transfer(shape, source.devices, False)
        return Ends((sent,), (received,), (1,) * len(shape))
    whole = local_shape(spec.shape, message.sent[:1], (m,))
    theirs = _blocks(whole, message.sent[1:], source)
    ours = _blocks(whole, message.received[1:], target)
    from_shape = local_shape(whole, message.sent[1:], source.shape)
    to_shape = local_shape(whole, message.received[1:], target.shape)
    piece = tuple(map(min, from_shape, to_shape))
    holders: dict[Dims, list[int]] = {}
    for place, start in enumerate(theirs):
        holders.setdefault(start, []).append(place)
    sends: list[list[tuple[int, Dims]]] = [[] for _ in theirs]
    receives: list[list[int]] = [[] for _ in ours]
    counts = tuple(b // p for b, p in zip(to_shape, piece, strict=True))
    for place, start in enumerate(ours):
        for step in itertools.product(*map(range, counts)):
            at = tuple(s + i * p for s, i, p in zip(start, step, piece, strict=True))
            block = tuple(a // b * b for a, b in zip(at, from_shape, strict=True))
            holder = holders[block][place % len(holders[block])]
            sends[holder].append((target.devices[place], tuple(a - b for a, b in zip(at, block, strict=True))))
            receives[place].append(source.devices[holder])
    most = max(map(len, sends))
    idle = (-1, (0,) * len(piece))
    rows = [each + [idle] * (most - len(each)) for each in sends]
    cuts = piece != from_shape
    return Ends(
        tuple(
            transfer(piece, tuple(row[k][0] for row in rows), True, tuple(row[k][1] for row in rows) if cuts else ())
            for k in range(most)
        ),
        tuple(transfer(piece, tuple(row[k] for row in receives), False) for k in range(len(receives[0]))),
        counts,
    )


def _blocks(shape: Dims, layout: Layout, mesh: Mesh) -> list[Dims]:
    """Where each device's block begins; nothing is padded."""
    found = []
    for coordinates in itertools.product(*map(range, mesh.shape)):
        starts, sizes = [0] * len(shape), list(shape)
        for place, n, at in zip(layout, mesh.shape, coordinates, strict=True):
            if isinstance(place, Shard):
                sizes[place.dim] //= n
                starts[place.dim] += at * sizes[place.dim]
        found.append(tuple(starts))
    return found
