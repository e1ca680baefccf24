"""Bundles: several small tensors in one collective.

What a small collective takes is mostly latency, so tensors that change their layout in the same way travel together:
`paraplan.pack` lays their parts for each rank side by side in one buffer, one collective moves it, and the buffer is
taken apart again, by views where a rank ends with one part of each (`paraplan.unpack`), by copies where it ends with
all (`paraplan.unpack_stacked`). A tensor above `SMALL_BYTES` goes alone: copying it would cost more than the latency.
Only what needs no other order is bundled: parameters gathered for segments (`param_allgather`), and gradients
(`grad_reduction`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.machine.mesh import Layout, local_shape
from paraplan.ir.machine.reshard import Move, pads
from paraplan.ir.model.strides import contiguous_strides
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.process.memo import SESSION

if TYPE_CHECKING:
    from paraplan.lowering.blocks.emit import BlockEmitter

Dims = tuple[int, ...]
Key = tuple[str, tuple[tuple[str, int, str], ...]]

SMALL_BYTES = 1 << 20
"""The most bytes, on a rank, of a tensor that travels with others."""

BUNDLE_BYTES = 8 << 20
"""From how many bytes on any bundle is sent off, where the plan does not say."""


def is_small(spec: TensorSpec, move: Move, mesh_shape: Dims) -> bool:
    """Whether a tensor that is moved is worth bundling: by what is left of it on a rank, of a scatter.

    Padding is neither added to a bundle nor dropped from one.

    Args:
        spec: of the tensor, global.
        move: what is to be done to it.
        mesh_shape: size of every axis.
    """
    nbytes = local_bytes(spec, move.after if move.split_dim >= 0 else move.before, mesh_shape)
    return 0 < nbytes <= SMALL_BYTES and not pads(spec.shape, move, mesh_shape)


@SESSION.cached(1 << 14)
def local_bytes(spec: TensorSpec, layout: Layout, mesh_shape: Dims) -> int:
    """Bytes of a rank's part of a tensor.

    Args:
        spec: of the tensor, global.
        layout: a placement per axis.
        mesh_shape: size of every axis.
    """
    return TensorSpec(spec.dtype, local_shape(spec.shape, layout, mesh_shape)).nbytes


def is_full(nbytes: int, widest_bytes: int = BUNDLE_BYTES, most_bytes: int = BUNDLE_BYTES) -> bool:
    """Whether a bundle is sent off: at twice what one segment alone puts in it, but not below `SMALL_BYTES`, and always
    at `most_bytes`, the plan's bound.

    So what bundles across segments hold stays of the order of what a segment holds anyway.

    Args:
        nbytes: of the bundle.
        widest_bytes: what one segment alone puts in a bundle.
        most_bytes: the plan's bound.
    """
    return nbytes >= min(most_bytes, max(SMALL_BYTES, 2 * widest_bytes))


def bundle_key(spec: TensorSpec, path: Sequence[Move], mesh_shape: Dims) -> Key | None:
    """What a tensor must share with others to travel with them; None where it goes alone.

    Small ones travel together that are summed or scattered over any number of axes, by scatters of one dim, whose parts
    are cut into parts again, or moved by gathers of one dim, whose parts of parts are then in order.

    Args:
        spec: of the tensor, global.
        path: moves it makes.
        mesh_shape: size of every axis.
    """
    found = [move.collective for move in path if move.collective is not None]
    if not found or len(found) < len(path) or any(each.splits and each.joins for each in found):
        return None
    if len(found) > 1 and not (_scatters_one_dim(path) or _gathers_one_dim(path)):
        return None
    if not is_small(spec, path[0], mesh_shape) or any(pads(spec.shape, move, mesh_shape) for move in path[1:]):
        return None
    return spec.dtype, tuple((move.kind, move.axis, move.reduction) for move in path)


def _scatters_one_dim(path: Sequence[Move]) -> bool:
    """Whether a path sums, and splits one dim at most."""
    return not any(move.is_gather for move in path) and len(set(_split_dims(path))) <= 1


def _split_dims(path: Sequence[Move]) -> list[int]:
    """Dims that moves of a path split."""
    return [move.split_dim for move in path if move.split_dim >= 0]


def _gathers_one_dim(path: Sequence[Move]) -> bool:
    return all(move.is_gather and move.dim == path[0].dim for move in path)


def move_together(
    emitter: BlockEmitter, stem: str, locals_: Sequence[str], paths: Sequence[Sequence[Move]]
) -> list[str]:
    """Emit one change of layout of several values.

    Args:
        emitter: of the block.
        stem: for names.
        locals_: the values.
        paths: how each moves, of one `bundle_key`.
    Returns:
        Local names of the results, in order.
    """
    first = paths[0][0]
    n = math.prod(emitter.mesh_shape[move.axis] for move in paths[0] if move.split_dim >= 0)
    values = [emitter.values[local] for local in locals_]
    count = sum(value.nbytes for value in values) // TensorSpec(values[0].dtype, ()).nbytes
    dims = tuple((_split_dims(path) or [path[0].dim])[0] for path in paths)
    args = tuple("%" + local for local in locals_)
    scatters = n > 1
    packed = emitter.local(
        "paraplan.pack",
        (args, n, dims if scatters else (0,) * len(dims)),
        f"{stem}^pack",
        values[0].dtype,
        (count,),
    )
    done = packed
    for move in paths[0]:
        done = emitter.exchange(move, done, f"{stem}^{move.kind}", in_place=True)
    if first.is_gather:
        parts = math.prod(emitter.mesh_shape[move.axis] for move in paths[0])
        return _unstack(emitter, stem, done, values, parts, dims)
    shapes = [value.shape for value in values]
    if scatters:
        shapes = [_cut(shape, dim, n) for shape, dim in zip(shapes, dims, strict=True)]
    return _views(emitter, stem, done, values[0].dtype, shapes)


def _cut(shape: Dims, dim: int, n: int) -> Dims:
    return tuple(size // n if index == dim else size for index, size in enumerate(shape))


def _views(emitter: BlockEmitter, stem: str, buffer: str, dtype: str, shapes: Sequence[Dims]) -> list[str]:
    names = [f"{stem}^{index}" for index in range(len(shapes))]
    base = emitter.values[buffer].base
    for name, shape in zip(names, shapes, strict=True):
        emitter.values[name] = LocalValue(
            dtype=dtype, shape=shape, strides=contiguous_strides(shape), base=base, storage_bytes=0
        )
    emitter.add_many("paraplan.unpack", ("%" + buffer, tuple(shapes)), names)
    return names


def _unstack(
    emitter: BlockEmitter, stem: str, buffer: str, values: Sequence[LocalValue], n: int, dims: Dims
) -> list[str]:
    names = [f"{stem}^{index}" for index in range(len(values))]
    for name, value, dim in zip(names, values, dims, strict=True):
        shape = tuple(size * n if index == dim else size for index, size in enumerate(value.shape))
        emitter.fresh(name, value.dtype, shape)
    shards = tuple(value.shape for value in values)
    emitter.add_many("paraplan.unpack_stacked", ("%" + buffer, n, shards, dims), names)
    return names
