"""What every instruction of a rank program computes, as plain functions of tensors.

These are the ops that lowering itself adds (cuts, joins, copies); `targets` finds them, and all others, by name.
All return fresh contiguous storage, as lowering assumes; `write` and those whose names end in "_" return nothing.

Collectives appear twice: `collective` and `wait` are the abstract forms a graph holds until it is bound to
process groups (an interpreter hands them to a transport); `wait_holding`, `copy_alone` and the starts of
`runtime.transport.collectives` are bound forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paraplan.ir.errors import CodegenError
from paraplan.kernels import reference_kernels
from paraplan.kernels.scan_kernels import scan
from paraplan.runtime.executing.products_into import linear_grad_weight_, linear_into_, linear_rows
from paraplan.runtime.optimizers.grad_norms import magnitude
from paraplan.runtime.transport.tier_copies import Copier, TierTensor

# Keys of node.meta in emitted graphs, see `codegen.block_graph`.
INSTR, LOCAL, OFFSET, COPIER = "instr", "local", "offset", "copier"
GROWN = 1 << 17
"""Elements of a gradient of another dtype that a CPU casts and adds at a time: few enough for its cache."""


def fresh(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return x.clone(memory_format=torch.contiguous_format)


def shard(x: Tensor, dim: int, length: int, start: int) -> Tensor:
    """x[..., start : start + length, ...] along `dim`; zeros past the end.

    Args:
        x: any tensor.
        dim: that is cut.
        length: of the shard.
        start: where it begins.
    """
    return fresh(x.narrow(dim, start, length)) if start + length <= x.shape[dim] else _padded(x, dim, length, start)


def _padded(x: Tensor, dim: int, length: int, start: int = 0) -> Tensor:
    start = min(start, x.shape[dim])
    there = min(length, x.shape[dim] - start)
    out = x.new_empty((*x.shape[:dim], length, *x.shape[dim + 1 :]))
    out.narrow(dim, 0, there).copy_(x.narrow(dim, start, there))
    out.narrow(dim, there, length - there).zero_()
    return out


def stack(x: Tensor, n: int, dim: int, block: int = 0) -> Tensor:
    """The n chunks of x along `dim`, one after another along dim 0.

    Args:
        x: a rank's part.
        n: chunks.
        dim: along which.
        block: elements of every chunk, zeros where x has none; 0: x divides evenly.
    """
    if not block:
        return fresh(x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)).flatten(0, 1)
    if dim == 0:
        return _padded(x, 0, n * block)
    first, *rest = (block if index == dim else size for index, size in enumerate(x.shape))
    out = x.new_empty((n, first, *rest))
    for index in range(n):
        start = min(index * block, x.shape[dim])
        there = min(block, x.shape[dim] - start)
        out[index].narrow(dim, 0, there).copy_(x.narrow(dim, start, there))
        out[index].narrow(dim, there, block - there).zero_()
    return out.flatten(0, 1)


def unstack(x: Tensor, n: int, dim: int, size: int = 0) -> Tensor:
    """The n chunks of x along dim 0, side by side along `dim`: the inverse of `stack`.

    Args:
        x: chunks one after another along dim 0.
        n: chunks.
        dim: along which they are joined.
        size: elements of the result there, the first so many; 0: all.
    """
    parts = x.unflatten(0, (n, x.shape[0] // n))
    if not size:
        return fresh(parts.movedim(0, dim)).flatten(dim, dim + 1)
    block = parts.shape[dim + 1]
    out = x.new_empty((*parts.shape[1 : dim + 1], size, *parts.shape[dim + 2 :]))
    for index, part in enumerate(parts):
        start = min(index * block, size)
        there = min(block, size - start)
        out.narrow(dim, start, there).copy_(part.narrow(dim, 0, there))
    return out


def fill_tail_(x: Tensor, dim: int, size: int, start: int, value: float = 0) -> Tensor:
    """x with padding overwritten.

    Args:
        x: a block of the whole along a dim.
        dim: which.
        size: elements of the whole there, beyond which is padding.
        start: where the block begins in it.
        value: written.
    """
    there = min(max(size - start, 0), x.shape[dim])
    x.narrow(dim, there, x.shape[dim] - there).fill_(value)
    return x.view_as(x)


def fill_tail(x: Tensor, dim: int, size: int, start: int, value: float = 0) -> Tensor:
    """A copy of x with its padding overwritten.

    Args:
        x, dim, size, start, value: as of `fill_tail_`.
    """
    return fill_tail_(fresh(x), dim, size, start, value)


def first_only(x: Tensor, coordinate: int) -> Tensor:
    """x on the axis' first rank, zeros on the others: the addends of x."""
    return fresh(x) if coordinate == 0 else torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def reshape_copy(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A contiguous copy with another shape."""
    return fresh(x).view(tuple(shape))


def pack(tensors: Sequence[Tensor], n: int, dims: Sequence[int]) -> Tensor:
    """One flat buffer of n parts: the r-th holds every tensor's r-th chunk along its dim, one after another.

    Args:
        tensors: of one dtype.
        n: parts.
        dims: per tensor, the one that is cut.
    """
    if not any(dims) and all(x.is_contiguous() for x in tensors):
        return torch.cat([x.view(n, -1) for x in tensors], 1).view(-1)
    out, place = tensors[0].new_empty((n, sum(x.numel() for x in tensors) // n)), 0
    for x, dim in zip(tensors, dims, strict=True):
        chunks = x.unsqueeze(0) if n == 1 else x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)
        width = x.numel() // n
        out.narrow(1, place, width).view(chunks.shape).copy_(chunks)
        place += width
    return out.view(-1)


def unpack(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors of these shapes that lie one after another in a buffer, as views."""
    return [part.view(shape) for part, shape in zip(buffer.split([*map(math.prod, shapes)]), shapes, strict=True)]


def unpack_stacked(buffer: Tensor, n: int, shapes: Sequence[Sequence[int]], dims: Sequence[int]) -> list[Tensor]:
    """n buffers one after another, each of shards of these shapes: every tensor's shards joined along its dim.

    Args:
        buffer: n buffers, flat.
        n: ranks.
        shapes: of one rank's shard of each tensor.
        dims: along which each tensor's shards are joined.
    """
    parts = buffer.view(n, -1).split([*map(math.prod, shapes)], 1)
    return [
        fresh(part.unflatten(1, tuple(shape)).movedim(0, dim)).flatten(dim, dim + 1)
        for part, shape, dim in zip(parts, shapes, dims, strict=True)
    ]


def write(dst: Tensor, src: Tensor) -> None:
    """dst := src, in place."""
    dst.copy_(src)


def write_many(dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> None:
    """Every dst := its src, in place, by one call."""
    torch.ops.aten._foreach_copy_.default(list(dsts), list(srcs))


def cast_many(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Dense tensors in another dtype, each laid out as it was, by one call."""
    made = [torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device) for x in tensors]
    write_many(made, tensors)
    return made


def put_(whole: Tensor, part: Tensor, dim: int, start: int) -> None:
    """whole[..., start : start + length, ...] := part along `dim`, in place.

    Args:
        whole: that is written.
        part: what is put there.
        dim, start: where.
    """
    whole.narrow(dim, start, part.shape[dim]).copy_(part)


def grow_(total: Tensor, addend: Tensor) -> None:
    """total := total + addend, in place; on a CPU, where torch casts all of another dtype first, piece by piece."""
    if total.dtype == addend.dtype or total.device.type != "cpu" or total.numel() <= GROWN:
        total.add_(addend)
        return
    if total.is_contiguous() and addend.is_contiguous():
        total, addend = total.view(-1), addend.view(-1)
    rows = max(1, GROWN * total.shape[0] // total.numel())
    for into, part in zip(total.split(rows), addend.split(rows), strict=True):
        into.add_(part)


def constant(
    values: Sequence[float | int | bool], dtype: torch.dtype, shape: Sequence[int], device: str = "cpu"
) -> Tensor:
    """A small tensor written out in the program.

    Args:
        values: in row-major order.
        dtype, shape, device: of the tensor.
    """
    return reference_kernels.constant(values, dtype, shape).to(device)


def collective(x: Tensor, kind: str, reduction: str, axis: int, *more: object) -> Tensor:
    """A collective that no process group is bound to yet; only a transport can run it.

    Args:
        x: sent.
        kind: of the collective.
        reduction: of it; "" where it has none.
        axis: of the mesh.
        more: further arguments.
    """
    raise CodegenError(f"{kind} over axis {axis} was called before it was bound to a process group")


def wait(issued: Tensor, *held: Tensor) -> Tensor:
    """The wait of an unbound collective; `held` are its inputs, alive until here."""
    raise CodegenError("wait was called before its collective was bound to a process group")


def wait_holding(issued: Tensor, *held: Tensor) -> Tensor:
    """Waits for a collective; `held` keeps its input alive until then."""
    return torch.ops._c10d_functional.wait_tensor(issued)  # type: ignore[no-any-return]


def offload(x: Tensor, tier: str, copier: Copier) -> TierTensor:
    """Begins to copy x to a tier.

    Args:
        x: on the device.
        tier: where to.
        copier: of the rank.
    """
    return copier.offload(x, tier)


def prefetch(away: TierTensor, tier: str, copier: Copier) -> Tensor:
    """Begins to copy a tensor back from a tier.

    Args:
        away: on a tier.
        tier: which.
        copier: of the rank.
    """
    return copier.prefetch(away, tier)


def bring(away: TierTensor, tier: str, copier: Copier) -> Tensor:
    """Begins to copy what lives on a tier to the device.

    Args:
        away, tier, copier: as of `prefetch`.
    """
    return copier.bring(away, tier)


def lift(away: TierTensor, tier: str, copier: Copier) -> TierTensor:
    """Begins to copy a tensor from disk to the host's memory.

    Args:
        away, tier, copier: as of `prefetch`.
    """
    return copier.lift(away, tier)


def store(x: Tensor | TierTensor, tier: str, home: TierTensor, copier: Copier) -> TierTensor:
    """Begins to overwrite a tensor that lives on a tier.

    Args:
        x: the new values.
        tier: where they live.
        home: what is overwritten.
        copier: of the rank.
    """
    return copier.store(x, tier, home)


def keep(x: Tensor, tier: str, home: TierTensor, copier: Copier) -> TierTensor:
    """Begins to overwrite, or to add to, a gradient that waits on a tier.

    Args:
        x: the gradient.
        tier: where it waits.
        home: what is overwritten or added to.
        copier: of the rank.
    """
    return copier.store(x, tier, home)


def wait_copy(issued: Any, held: Any, copier: Copier) -> Any:
    """Waits for a copy.

    Args:
        issued: what was returned where it was issued.
        held: what it reads, alive until here.
        copier: that issued it.
    """
    return copier.wait(issued)


COPIES: dict[str, Callable[..., Any]] = {
    "offload": offload,
    "prefetch": prefetch,
    "bring": bring,
    "lift": lift,
    "store": store,
    "keep": keep,
}
"""By an instruction's target."""

COPY_KERNELS: frozenset[Callable[..., Any]] = frozenset((*COPIES.values(), wait_copy))
"""All that these make is their results, too."""


def same(issued: Tensor, *held: Tensor) -> Tensor:
    """What needs no communication: in place over an axis of one rank, and any wait over one."""
    return issued


def copy_alone(x: Tensor) -> Tensor:
    """Any collective over an axis of one rank."""
    return fresh(x)


OWN: dict[str, Callable[..., Any]] = {
    "shard": shard,
    "stack": stack,
    "unstack": unstack,
    "first_only": first_only,
    "reshape_copy": reshape_copy,
    "write": write,
    "write_many": write_many,
    "cast_many": cast_many,
    "constant": constant,
    "pack": pack,
    "unpack": unpack,
    "unpack_stacked": unpack_stacked,
    "fill_tail": fill_tail,
    "fill_tail_": fill_tail_,
    "put_": put_,
    "grow_": grow_,
    "linear_into_": linear_into_,
    "linear_rows": linear_rows,
}

LAYOUT_KERNELS: frozenset[Callable[..., Any]] = frozenset(OWN.values())
"""The functions above, which lowering itself adds; all they ever make are their results."""

WORKING: dict[str, Callable[..., Any]] = {
    "magnitude": magnitude,
    "linear_grad_weight_": linear_grad_weight_,
    "scan": scan,
}
"""Likewise, with workspace."""
