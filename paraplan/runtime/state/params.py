"""Tensors and their shards: cutting a full tensor by its layout, joining shards again, filling a rank's namespace.

Where several axes shard one dim, the earlier axis is outer: cutting goes over the axes in order, joining
in reverse. A rank's tensors have the padding of an uneven dim; what leaves it has not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from paraplan.ir.errors import InvalidPlanError, PlanMismatchError
from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.rank_program import OuterValue, RankProgram
from paraplan.ir.machine.mesh import Layout, Replicate, Shard, is_shardable, layout_text, parse_layout
from paraplan.ir.machine.tiers import is_in_files
from paraplan.ir.model.program import Program
from paraplan.ir.process.memo import SESSION
from paraplan.runtime.transport.disk_store import Homes

Dims = tuple[int, ...]


class Values(Protocol):
    """Where the values of "param:<name>" and "buffer:<name>" come from."""

    def shard(self, name: str, layout: Layout, mesh_shape: Dims, coordinates: Dims) -> Tensor:
        """A rank's part of a tensor; may be a view, of another dtype, on another device.

        Args:
            name: of the parameter or buffer.
            layout, mesh_shape, coordinates: as of `slices`.
        """


@SESSION.cached(4096)
def slices(shape: Dims, layout: Layout, mesh_shape: Dims, coordinates: Dims) -> tuple[slice, ...]:
    """Where a rank's part lies in a whole tensor, per dim; padding is no part of it, so the last may be short or empty.

    Args:
        shape: of the tensor.
        layout: a placement per mesh axis.
        mesh_shape: size of every axis.
        coordinates: of the rank.
    Raises:
        PlanMismatchError: a dim can be sharded neither evenly nor with little padding.
    """
    if not is_shardable(shape, layout, mesh_shape):
        raise PlanMismatchError(
            f"a tensor of shape {shape} cannot lie as {layout_text(layout)} on a mesh of shape {mesh_shape}"
        )
    bounds = [(0, size) for size in shape]
    for placement, size, coordinate in zip(layout, mesh_shape, coordinates, strict=True):
        if isinstance(placement, Shard):
            start, stop = bounds[placement.dim]
            block = -(-(stop - start) // size)
            begin = start + coordinate * block
            bounds[placement.dim] = (min(begin, stop), min(begin + block, stop))
    return tuple(slice(*each) for each in bounds)


def cut(full: Tensor, layout: Layout, mesh_shape: Dims, coordinates: Dims) -> Tensor:
    """The shard of a full tensor, without padding, as a view; see `slices`.

    Args:
        full: the tensor.
        layout, mesh_shape, coordinates: as of `slices`.
    """
    return full[slices(tuple(full.shape), layout, mesh_shape, coordinates)]


def own_part(shard: Tensor, shape: Dims, layout: Layout, mesh_shape: Dims, coordinates: Dims) -> Tensor:
    """A rank's shard of a tensor of some shape without its padding, as a view: what a DTensor's local tensor is.

    Args:
        shard: with padding.
        shape: of the whole tensor.
        layout, mesh_shape, coordinates: as of `slices`.
    """
    return inside(shard, [at.stop - at.start for at in slices(shape, layout, mesh_shape, coordinates)])


def inside(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of every dim, as a view."""
    for dim, size in enumerate(shape):
        if size != x.shape[dim]:
            x = x.narrow(dim, 0, size)
    return x


def pad(shard: Tensor, shape: Dims) -> Tensor:
    """A shard with zeros past the end of every dim that is shorter than the shape says; itself where none is."""
    if tuple(shard.shape) == shape:
        return shard
    padded = shard.new_zeros(shape)
    inside(padded, shard.shape).copy_(shard)
    return padded


def join(shape: Dims, layout: Layout, mesh_shape: Dims, shard_at: Callable[[Dims], Tensor]) -> Tensor:
    """The full tensor, of some shape, of shards with or without padding; `shard_at` gives the one at coordinates.

    Args:
        shape: of the whole tensor.
        layout, mesh_shape: as of `slices`.
        shard_at: the shard of the rank at coordinates.
    """
    parts = {coords: shard_at(coords) for coords in itertools.product(*map(_needed, layout, mesh_shape))}
    for axis in reversed(range(len(layout))):
        placement = layout[axis]
        rows: dict[Dims, list[Tensor]] = {}
        for coords, part in parts.items():
            rows.setdefault(coords[:axis], []).append(part)
        parts = {
            c: torch.cat(row, placement.dim) if isinstance(placement, Shard) else row[0] for c, row in rows.items()
        }
    return inside(parts[()], shape)


def _needed(placement: object, size: int) -> range:
    return range(size if isinstance(placement, Shard) else 1)


def join_over(shape: Dims, layout: Layout, shard: Tensor, gather: Callable[[Tensor, int], list[Tensor]]) -> Tensor:
    """The full tensor, of some shape, on every rank: gathers over one axis after the other, innermost first.

    The shard has its padding, so that all ranks give as much.

    Args:
        shape: of the whole tensor.
        layout: a placement per mesh axis.
        shard: this rank's.
        gather: tensors of all ranks along an axis.
    """
    for axis in reversed(range(len(layout))):
        placement = layout[axis]
        if isinstance(placement, Shard):
            shard = torch.cat(gather(shard, axis), placement.dim)
    return inside(shard, shape)


def owned_here(layout: Layout, coordinates: Dims) -> bool:
    """Whether this rank is the one, among those holding the same shard, that counts it."""
    return all(c == 0 for placement, c in zip(layout, coordinates, strict=True) if not isinstance(placement, Shard))


def narrow_state(
    stored: Tensor, stored_layout: Layout, state_layout: Layout, mesh_shape: Dims, coordinates: Dims
) -> Tensor:
    """The state of a parameter as a view of its stored copy.

    Args:
        stored: this rank's stored copy.
        stored_layout, state_layout: of both.
        mesh_shape, coordinates: as of `slices`.
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


def travels(key: str, value: object, param: Tensor) -> bool:
    """Whether an optimizer's state goes where a parameter's states go: what is as it is, but for a count of steps.

    Args:
        key: of the state.
        value: of it.
        param: whose state it is.
    """
    alike = isinstance(value, Tensor) and value.shape == param.shape and value.dtype == param.dtype
    return alike and key != "step"


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


class Whole(dict[str, Tensor]):
    """Full tensors by "param:<name>" and "buffer:<name>", of which ranks take their parts."""

    def shard(self, name: str, layout: Layout, mesh_shape: Dims, coordinates: Dims) -> Tensor:
        """A rank's part, as a view.

        Args:
            name, layout, mesh_shape, coordinates: as of `Values.shard`.
        """
        return cut(self[name], layout, mesh_shape, coordinates)


class Nothing:
    """A source of no values, for ranks that share all of theirs."""

    def shard(self, name: str, layout: Layout, mesh_shape: Dims, coordinates: Dims) -> Tensor:
        """Fails: nothing should be asked for.

        Args:
            name, layout, mesh_shape, coordinates: as of `Values.shard`.
        Raises:
            PlanMismatchError: always.
        """
        raise PlanMismatchError(f"{name.replace(':', ' ')} is not among what the plans share")


def local_tensors(
    program: RankProgram,
    values: Values,
    coordinates: Dims,
    device: str,
    homes: Homes,
    held: Mapping[Name, Tensor] | None = None,
) -> dict[Name, Tensor]:
    """A rank's parameters, optimizer views and states, buffers and seeds, by outer name, each with storage of its own
    but for states that are views of a stored copy. A parameter and its state are asked for one after the other. What
    is on disk lies in `homes`. Those `held` already are taken as they are.

    Args:
        program: of the rank.
        values: where they come from.
        coordinates: of the rank on its mesh.
        device: of the rank.
        homes: of what is on disk.
        held: tensors there already.
    Raises:
        RuntimeFailure: the disk has no room for what is to live there.
    """
    found: dict[Name, Tensor] = {name: x for name, x in (held or {}).items() if name.role is not Role.SEED}
    homes.reserve([x.nbytes for name, x in program.outer.items() if is_in_files(x.tier) and name not in found])

    def blank(value: OuterValue, padded: bool) -> Tensor:
        dtype = getattr(torch, value.dtype)
        if is_in_files(value.tier):
            return homes.make(value.shape, dtype)
        made = torch.zeros if padded else torch.empty  # padding is zero
        place = {"device": "cpu", "pin_memory": device == "cuda"} if value.tier else {"device": device}
        return made(value.shape, dtype=dtype, **place)  # type: ignore[no-any-return]

    def fill(name: Name, source: Name) -> None:
        value = program.outer[name]
        layout = parse_layout(value.layout)
        part = values.shard(str(source), layout, program.mesh_shape, coordinates)
        found[name] = blank(value, tuple(part.shape) != value.shape)
        inside(found[name], part.shape).copy_(part)

    for name, value in program.outer.items():
        if name in found:
            continue
        if value.role in (Role.PARAMETER, Role.BUFFER):
            fill(name, name)
            state = outer_names.state(value.source)
            if value.role is Role.BUFFER or state not in program.outer:
                continue
            if program.outer[state].nbytes:
                fill(state, name)
            else:
                layouts = parse_layout(value.layout), parse_layout(program.outer[state].layout)
                found[state] = narrow_state(found[name], *layouts, program.mesh_shape, coordinates)
        elif value.role in (Role.SLOTS, Role.WAITING):
            found[name] = blank(value, padded=True)
        elif value.role is Role.SEED:
            found[name] = torch.zeros((), dtype=torch.int64, device=device)
        elif value.role is Role.LOSS_SCALE:
            found[name] = torch.ones((), dtype=torch.float32, device=device)
    return found
