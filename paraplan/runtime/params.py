"""Tensors and their shards: cutting a full tensor by its layout, joining shards again, filling a rank's namespace.

Where several axes shard one dim, the earlier axis is outer: cutting goes over the axes in order, joining
in reverse.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from paraplan.ir.errors import InvalidPlanError, PlanMismatchError
from paraplan.ir.mesh import Layout, Replicate, Shard, parse_layout
from paraplan.ir.program import Program
from paraplan.ir.rank_program import OuterValue, RankProgram

Dims = tuple[int, ...]


def cut(full: Tensor, layout: Layout, mesh_shape: Dims, coordinates: Dims) -> Tensor:
    """The shard of a full tensor, as a view.

    Raises:
        PlanMismatchError: a dim does not divide.
    """
    for placement, size, coordinate in zip(layout, mesh_shape, coordinates, strict=True):
        if isinstance(placement, Shard):
            whole = full.shape[placement.dim]
            if whole % size:
                raise PlanMismatchError(f"dim {placement.dim} of size {whole} does not divide into {size} shards")
            full = full.narrow(placement.dim, coordinate * (whole // size), whole // size)
    return full


def join(layout: Layout, mesh_shape: Dims, shard_at: Callable[[Dims], Tensor]) -> Tensor:
    """The full tensor of shards; `shard_at` gives the one at some coordinates."""
    parts = {coords: shard_at(coords) for coords in itertools.product(*map(_needed, layout, mesh_shape))}
    for axis in reversed(range(len(layout))):
        placement = layout[axis]
        rows: dict[Dims, list[Tensor]] = {}
        for coords, part in parts.items():
            rows.setdefault(coords[:axis], []).append(part)
        parts = {
            c: torch.cat(row, placement.dim) if isinstance(placement, Shard) else row[0] for c, row in rows.items()
        }
    return parts[()]


def _needed(placement: object, size: int) -> range:
    return range(size if isinstance(placement, Shard) else 1)


def join_over(layout: Layout, shard: Tensor, gather: Callable[[Tensor, int], list[Tensor]]) -> Tensor:
    """The full tensor on every rank: gathers over one axis after the other, innermost first."""
    for axis in reversed(range(len(layout))):
        placement = layout[axis]
        if isinstance(placement, Shard):
            shard = torch.cat(gather(shard, axis), placement.dim)
    return shard


def owned_here(layout: Layout, coordinates: Dims) -> bool:
    """Whether this rank is the one, among those holding the same shard, that counts it."""
    return all(c == 0 for placement, c in zip(layout, coordinates, strict=True) if not isinstance(placement, Shard))


def narrow_state(
    stored: Tensor, stored_layout: Layout, state_layout: Layout, mesh_shape: Dims, coordinates: Dims
) -> Tensor:
    """The state of a parameter as a view of its stored copy.

    Raises:
        InvalidPlanError: the state's block does not lie inside the stored one.
    """
    for axis, (before, after) in enumerate(zip(stored_layout, state_layout, strict=True)):
        if before == after:
            continue
        inner = [p for p in stored_layout[axis + 1 :] if p == after]
        if not isinstance(before, Replicate) or inner:
            raise InvalidPlanError(
                f"state layout {','.join(map(str, state_layout))} is no part of "
                f"stored layout {','.join(map(str, stored_layout))}"
            )
    extra = tuple(
        after if before != after else Replicate() for before, after in zip(stored_layout, state_layout, strict=True)
    )
    return cut(stored, extra, mesh_shape, coordinates)


def full_tensors(program: Program, model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters ("param:<name>") and buffers ("buffer:<name>") that a program names.

    Raises:
        PlanMismatchError: one is missing, has another shape, or has no data.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    wanted = {f"param:{name}": (params.get(name), param.spec) for name, param in program.params.items()}
    wanted |= {f"buffer:{name}": (buffers.get(name), spec) for name, spec in program.buffers.items()}
    found = {}
    for name, (tensor, spec) in wanted.items():
        if tensor is None:
            raise PlanMismatchError(
                f"the plan's model has {name.replace(':', ' ')}, the model given has not; "
                "give the model the plan was made for"
            )
        if tuple(tensor.shape) != spec.shape:
            raise PlanMismatchError(
                f"{name.replace(':', ' ')}: the plan says {spec.shape}, the model has {tuple(tensor.shape)}"
            )
        if tensor.is_meta:
            raise PlanMismatchError(
                f"{name.replace(':', ' ')} is on meta and has no values; "
                "build the model without torch.device('meta') (on cpu) before running it"
            )
        found[name] = tensor.detach()
    return found


def local_tensors(
    program: RankProgram, full: Mapping[str, Tensor], coordinates: Dims, device: str
) -> dict[str, Tensor]:
    """A rank's parameters, optimizer views, buffers and seeds, by outer name, each with storage of its own
    but for states that are views of a stored copy."""
    found: dict[str, Tensor] = {}
    for name, value in program.outer.items():
        if value.role in ("param", "buffer"):
            found[name] = _local(full[name], value, program.mesh_shape, coordinates, device)
        elif value.role == "seed":
            found[name] = torch.zeros((), dtype=torch.int64, device=device)
    for name, value in program.outer.items():
        if value.role != "state":
            continue
        stored = f"param:{value.source}"
        if value.nbytes:
            found[name] = _local(full[stored], value, program.mesh_shape, coordinates, device)
        else:
            layouts = parse_layout(program.outer[stored].layout), parse_layout(value.layout)
            found[name] = narrow_state(found[stored], *layouts, program.mesh_shape, coordinates)
    return found


def _local(full: Tensor, value: OuterValue, mesh_shape: Dims, coordinates: Dims, device: str) -> Tensor:
    part = cut(full, parse_layout(value.layout), mesh_shape, coordinates)
    own = torch.empty(part.shape, dtype=getattr(torch, value.dtype), device=device)
    return own.copy_(part)
