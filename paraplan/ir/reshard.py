"""Changing a tensor's layout: the shortest sequence of one-axis moves.

    P -> R     all_reduce            S(d) -> R     all_gather           R -> S(d)   slice (local)
    P -> S(d)  reduce_scatter        S(d) -> S(e)  all_to_all           R -> P      first_only (local)

Where several axes shard one dim the inner (later) axis is peeled first, since shards are blocks of blocks;
a move on an axis is legal only if no later axis shards the dim it touches. The path is the cheapest by bytes
sent per rank (ties: fewer moves, then by text), so planner, simulator and runtime agree on it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.mesh import Layout, P, Partial, Placement, R, S, Shard, is_shardable, layout_text, local_shape


@dataclass(frozen=True)
class Move:
    """One change along one axis.

    Attributes:
        kind: all_reduce, reduce_scatter, all_gather, all_to_all, slice or first_only.
        axis: mesh axis.
        dim: tensor dim gathered, scattered or sliced (all_to_all: the dim gathered); -1 where none.
        to_dim: all_to_all: the dim split.
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


class NoPath(InvalidPlanError):
    """No sequence of moves leads from one layout to the other."""


@lru_cache(maxsize=200_000)
def reshard_path(
    shape: tuple[int, ...], source: Layout, target: Layout, mesh_shape: tuple[int, ...], frozen: int = 0
) -> tuple[Move, ...]:
    """The moves from one layout to another.

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
    serial = itertools.count()
    queue: list[tuple[float, int, str, int, Layout, tuple[Move, ...]]] = [(0.0, 0, "", next(serial), source, ())]
    done: set[Layout] = set()
    while queue:
        cost, count, _, _, layout, path = heapq.heappop(queue)
        if layout == target:
            return path
        if layout in done:
            continue
        done.add(layout)
        for move in _moves(shape, layout, source, target, mesh_shape, frozen):
            if move.after not in done:
                step = _sent_bytes(shape, move, mesh_shape)
                entry = (cost + step, count + 1, layout_text(move.after), next(serial), move.after, (*path, move))
                heapq.heappush(queue, entry)
    raise NoPath(
        f"no way from layout {layout_text(source)} to {layout_text(target)} for shape {shape} on mesh {mesh_shape}"
    )


def _sent_bytes(shape: tuple[int, ...], move: Move, mesh_shape: tuple[int, ...]) -> float:
    """Elements one rank sends, plus a little for local copies."""
    count = math.prod(local_shape(shape, move.before, mesh_shape))
    n = mesh_shape[move.axis]
    factor = {
        "all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_gather": n - 1.0,
        "all_to_all": (n - 1) / n, "slice": 0.02 / n, "first_only": 0.02,
    }[move.kind]  # fmt: skip
    return factor * count + (0.0 if n == 1 else 1.0)


def _moves(
    shape: tuple[int, ...], layout: Layout, source: Layout, target: Layout, mesh_shape: tuple[int, ...], frozen: int
) -> list[Move]:
    found = []
    for axis, now in enumerate(layout):
        inner = {p.dim for p in layout[axis + 1 :] if isinstance(p, Shard)}
        for then in _placements(source, target, axis):
            if then == now or any(isinstance(p, Shard) and p.dim in inner for p in (now, then)):
                continue
            after = (*layout[:axis], then, *layout[axis + 1 :])
            move = _name(now, then, axis, layout, after)
            if move is None or not is_shardable(shape, after, mesh_shape):
                continue
            if axis < frozen and move.kind not in ("slice", "first_only"):
                continue
            found.append(move)
    return found


def _placements(source: Layout, target: Layout, axis: int) -> list[Placement]:
    """Placements worth visiting along an axis: the goal, whole, and what peeling needs."""
    worth: dict[Placement, None] = dict.fromkeys((target[axis], R))
    for placement in (*target, *source):
        if isinstance(placement, Shard):
            worth[placement] = None
    return list(worth)


def _name(now: Placement, then: Placement, axis: int, before: Layout, after: Layout) -> Move | None:
    if isinstance(now, Partial):
        if then == R:
            return Move("all_reduce", axis, -1, -1, before, after, now.op)
        if isinstance(then, Shard) and now.op == "sum":
            return Move("reduce_scatter", axis, then.dim, -1, before, after, now.op)
        return None
    if isinstance(now, Shard):
        if then == R:
            return Move("all_gather", axis, now.dim, -1, before, after)
        return Move("all_to_all", axis, now.dim, then.dim, before, after) if isinstance(then, Shard) else None
    if isinstance(then, Shard):
        return Move("slice", axis, then.dim, -1, before, after)
    return Move("first_only", axis, -1, -1, before, after) if then == P else None


__all__ = ["Move", "NoPath", "S", "reshard_path"]
