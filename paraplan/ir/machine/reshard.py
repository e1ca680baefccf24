"""Changing a tensor's layout: the cheapest sequence of one-axis moves.

    P -> R     all_reduce            S(d) -> R     all_gather           R -> S(d)   slice (local)
    P -> S(d)  reduce_scatter        S(d) -> S(e)  all_to_all           R -> P      first_only (local)

Where several axes shard one dim the inner (later) axis is peeled first, since shards are blocks of blocks;
a move on an axis is legal only if no later axis shards the dim it touches. A path is the cheapest by elements a
rank sends, where a move also costs as much as sending 64 Ki of them (its latency) and an outer axis, which crosses the
slower links, costs more than an inner one. So a sum over two axes is scattered over the inner one, reduced over the
outer one and gathered again, as hierarchical all-reduce does. What is whole along an axis and is divided there is not
gathered again: that way around sends fewer elements, over links that may be a hundred times as slow, and nothing needs
it. None of this looks at a cluster, so planner, simulator
and runtime agree on every path without consulting each other.

All pairs of layouts are solved at once (Bellman-Ford over the graph of layouts), and once for all shapes that divide
alike and are of like size.

Where a dim does not divide, its blocks are padded (see `mesh`): a move that shards it pads with zeros first, one that
gathers it drops the padding afterwards. Padding counts for nothing in a path's cost.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.machine.collectives import COLLECTIVES, Collective
from paraplan.ir.machine.mesh import (
    Layout,
    P,
    Partial,
    Placement,
    R,
    S,
    Shard,
    layout_text,
    padded_dims,
    pads_little,
)
from paraplan.ir.process.memo import SESSION

MOVE_ELEMENTS, COPY_ELEMENTS = 2.0**16, 2.0**14
"""What a collective and a local copy cost beside the elements they touch."""

OUTER_AXIS = 0.25
"""How much dearer an element is on an axis than on the next inner one."""

SLICE, FIRST_ONLY = "slice", "first_only"
"""Moves without communication."""

_BY_CHANGE = {record.change: record for record in COLLECTIVES.values() if record.change is not None}

Dims = tuple[int, ...]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Move:
    """One change along one axis.

    Attributes:
        kind: a collective's name, `SLICE` or `FIRST_ONLY`.
        axis: mesh axis.
        dim: the tensor dim joined, else the one split or sliced; -1 where none.
        to_dim: the dim split where another is joined.
        before, after: layouts around it.
        reduction: "sum" or "max" where it reduces.
    """

    kind: str
    axis: int
    dim: int
    to_dim: int
    before: Layout
    after: Layout
    reduction: str = ""

    @property
    def collective(self) -> Collective | None:
        """What makes it; None where it is local."""
        return COLLECTIVES.get(self.kind)

    @property
    def is_gather(self) -> bool:
        """See `Collective.is_gather`."""
        return self.collective is not None and self.collective.is_gather

    @property
    def in_place(self) -> bool:
        """See `Collective.in_place`."""
        return self.collective is not None and self.collective.in_place

    @property
    def split_dim(self) -> int:
        """The tensor dim whose blocks are sent to different ranks; -1 where none."""
        if self.collective is None or not self.collective.splits:
            return -1
        return self.to_dim if self.collective.joins else self.dim


class NoPath(InvalidPlanError):
    """No sequence of moves leads from one layout to the other."""


@dataclass(frozen=True, eq=False)
class ReshardTable:
    """The cheapest paths between all layouts of a shape.

    Attributes:
        layouts: in a fixed order.
        index: layout -> its number.
        moves: every legal move.
        last: [source, target] number of the last move on the path; -1 where there is no path or nothing to do.
        hops: [source, target] moves on the path; -1 where there is no path.
    """

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    moves: tuple[Move, ...]
    last: Ints
    hops: Ints

    def path(self, source: Layout, target: Layout) -> tuple[Move, ...] | None:
        """The moves from one layout to another; None where there is no way."""
        start, at = self.index[source], self.index[target]
        if self.hops[start, at] < 0:
            return None
        found: list[Move] = []
        while at != start:
            move = self.moves[self.last[start, at]]
            found.append(move)
            at = self.index[move.before]
        return tuple(reversed(found))

    def totals(self, prices: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums over paths: [source, target, ...] from a price per move [move, ...]; infinite where there is no path."""
        count = len(self.layouts)
        total = np.full((count, count, *prices.shape[1:]), np.inf)
        total[np.arange(count), np.arange(count)] = 0.0
        before = np.array([self.index[move.before] for move in self.moves], np.int64)
        for hop in range(1, int(self.hops.max(initial=0)) + 1):
            sources, targets = np.nonzero(self.hops == hop)
            moves = self.last[sources, targets]
            total[sources, targets] = total[sources, before[moves]] + prices[moves]
        return total


def reshard_path(shape: Dims, source: Layout, target: Layout, mesh_shape: Dims, frozen: int = 0) -> tuple[Move, ...]:
    """The moves from one layout to another; none along an axis of one rank, where all placements are the same.

    Args:
        shape: global shape.
        source, target: layouts.
        mesh_shape: axis sizes.
        frozen: leading axes that carry no communication (the microbatch axis): along them a tensor may be
            sliced or counted once, nothing else.
    Raises:
        NoPath: there is none (to partial maxima, or across a frozen axis).
    """
    if source == target:
        return ()
    table = reshard_table(shape, mesh_shape, frozen, (source, target))
    path = table.path(source, target) if {source, target} <= table.index.keys() else None
    if path is None:
        raise NoPath(
            f"no way from layout {layout_text(source)} to {layout_text(target)} for shape {shape} on mesh {mesh_shape}"
        )
    return tuple(move for move in path if mesh_shape[move.axis] > 1)


def only_gathers(shape: Dims, source: Layout, target: Layout, mesh_shape: Dims) -> bool:
    """Whether gathers, one at least, lead from one layout to the other and nothing else is needed.

    Args:
        shape: of the tensor, global.
        source, target: layouts, a placement per mesh axis.
        mesh_shape: size of every axis.
    """
    path = reshard_path(shape, source, target, mesh_shape)
    return bool(path) and all(move.is_gather for move in path)


def reshard_table(shape: Dims, mesh_shape: Dims, frozen: int, ends: tuple[Layout, ...]) -> ReshardTable:
    """The table that holds the paths between some layouts of a shape.

    Args:
        shape: global shape.
        mesh_shape: axis sizes.
        frozen: see `reshard_path`.
        ends: layouts that paths start from or lead to; the table holds many more.
    """
    devices = math.prod(mesh_shape)
    divides = tuple(math.gcd(size, devices) for size in shape)
    padded = tuple(_padded_axes(size, mesh_shape, frozen) for size in shape)
    along = tuple(
        tuple(sorted({R, *(layout[axis] for layout in ends)}, key=str)) if axis < frozen else ()
        for axis in range(frozen)
    )
    maxima = any(isinstance(p, Partial) and p.op != "sum" for layout in ends for p in layout)
    return _table(divides, padded, math.prod(shape).bit_length(), mesh_shape, along, maxima)


@SESSION.cached(4096)
def _padded_axes(size: int, mesh_shape: Dims, frozen: int) -> Dims:
    """The axes that may shard a dim with padding."""
    return tuple(axis for axis, n in enumerate(mesh_shape) if axis >= frozen and size % n and pads_little(size, n))


def _may_lie(shape: Dims, padded: tuple[Dims, ...], layout: Layout, mesh_shape: Dims) -> bool:
    for dim, size in enumerate(shape):
        axes = [axis for axis, place in enumerate(layout) if place == S(dim) and mesh_shape[axis] > 1]
        if size % math.prod(mesh_shape[axis] for axis in axes) and (len(axes) > 1 or axes[0] not in padded[dim]):
            return False
    return True


@SESSION.cached(1024)
def _table(
    shape: Dims,
    padded: tuple[Dims, ...],
    size: int,
    mesh_shape: Dims,
    along: tuple[tuple[Placement, ...], ...],
    maxima: bool,
) -> ReshardTable:
    free: tuple[Placement, ...] = (R, P, *((Partial(op="max"),) if maxima else ()), *(S(d) for d in range(len(shape))))
    options = (*along, *((free,) * (len(mesh_shape) - len(along))))
    layouts = tuple(lay for lay in itertools.product(*options) if _may_lie(shape, padded, lay, mesh_shape))
    index = {layout: number for number, layout in enumerate(layouts)}
    moves = tuple(move for layout in layouts for move in _moves(layout, options, len(along)) if move.after in index)
    scale = 2.0**size / math.prod(shape)
    costs = np.array([_cost(shape, move, mesh_shape, scale) for move in moves])
    whole = np.array([[place == R for place in layout] for layout in layouts])
    axes, gathers = [move.axis for move in moves], np.array([move.after[move.axis] == R for move in moves], bool)
    costs = np.where(whole[:, axes] & gathers, np.inf, costs)  # [source, move]
    last, hops = _shortest(len(layouts), moves, index, costs)
    return ReshardTable(layouts, index, moves, last, hops)


def _cost(shape: Dims, move: Move, mesh_shape: Dims, scale: float) -> float:
    """What a move costs, in elements sent over the innermost axis."""
    parts = math.prod(size for place, size in zip(move.before, mesh_shape, strict=True) if isinstance(place, Shard))
    count = math.prod(shape) / parts * scale
    n = mesh_shape[move.axis]
    if move.collective is None:
        return 0.02 * count / (n if move.kind == SLICE else 1) + COPY_ELEMENTS
    sent = move.collective.sent_share(n)
    return (sent * count + MOVE_ELEMENTS) * (1 + OUTER_AXIS * (len(mesh_shape) - 1 - move.axis))


def _shortest(
    count: int, moves: tuple[Move, ...], index: dict[Layout, int], costs: NDArray[np.float64]
) -> tuple[Ints, Ints]:
    """Last move and number of moves of the cheapest path between every two layouts, by what each move costs of a path
    from each layout; the first of equals by number."""
    last, hops = np.full((count, count), -1, np.int64), np.full((count, count), -1, np.int64)
    hops[np.arange(count), np.arange(count)] = 0
    if not moves:
        return last, hops
    ends = np.array([index[move.after] for move in moves])
    order = np.argsort(ends, kind="stable")
    before = np.array([index[move.before] for move in moves])[order]
    weights, targets = costs[:, order], ends[order]
    starts = np.flatnonzero(np.r_[True, targets[1:] != targets[:-1]])
    reached = targets[starts]
    distance = np.full((count, count), np.inf)
    distance[np.arange(count), np.arange(count)] = 0.0
    while True:
        through = np.minimum.reduceat(distance[:, before] + weights, starts, axis=1)
        better = np.minimum(distance[:, reached], through)
        if (better == distance[:, reached]).all():
            break
        distance[:, reached] = better
    for place, (first, target) in enumerate(zip(starts.tolist(), reached.tolist(), strict=True)):
        stop = starts[place + 1] if place + 1 < len(starts) else len(order)
        last[:, target] = order[first + np.argmin(distance[:, before[first:stop]] + weights[:, first:stop], axis=1)]
    last[~np.isfinite(distance)] = -1
    last[np.arange(count), np.arange(count)] = -1
    by_distance = np.argsort(distance, axis=1, kind="stable")
    rows, origin = np.arange(count), np.array([index[move.before] for move in moves])
    for column in by_distance.T[1:]:
        some = last[rows, column] >= 0
        at, to = rows[some], column[some]
        hops[at, to] = hops[at, origin[last[at, to]]] + 1
    return last, hops


def _moves(layout: Layout, options: tuple[tuple[Placement, ...], ...], frozen: int) -> list[Move]:
    found = []
    for axis, now in enumerate(layout):
        inner = {p.dim for p in layout[axis + 1 :] if isinstance(p, Shard)}
        for then in options[axis]:
            if then == now or any(isinstance(p, Shard) and p.dim in inner for p in (now, then)):
                continue
            move = _name(now, then, axis, layout, (*layout[:axis], then, *layout[axis + 1 :]))
            if move is not None and (axis >= frozen or move.collective is None):
                found.append(move)
    return found


@SESSION.cached(1 << 14)
def pads(shape: Dims, move: Move, mesh_shape: Dims) -> bool:
    """Whether a move of a tensor adds padding or drops some.

    Args:
        shape: of the tensor, global.
        move: from one layout to the next.
        mesh_shape: size of every axis.
    """
    return any(
        axis == move.axis for layout in (move.before, move.after) for _, axis in padded_dims(shape, layout, mesh_shape)
    )


def _name(now: Placement, then: Placement, axis: int, before: Layout, after: Layout) -> Move | None:
    dims = [place.dim for place in (now, then) if isinstance(place, Shard)]
    dim, to_dim = (*dims, -1, -1)[:2]
    collective = _BY_CHANGE.get((type(now), type(then)))
    if collective is not None:
        reduction = now.op if isinstance(now, Partial) else ""
        can = not reduction or reduction in collective.reductions
        return Move(collective.name, axis, dim, to_dim, before, after, reduction) if can else None
    if now == R and isinstance(then, Shard):
        return Move(SLICE, axis, dim, -1, before, after)
    return Move(FIRST_ONLY, axis, -1, -1, before, after) if now == R and then == P else None


__all__ = ["Move", "NoPath", "ReshardTable", "S", "reshard_path", "reshard_table"]
