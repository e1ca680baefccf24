"""What an op may do along one axis of a mesh, from its named dims.

It shards a named dim wherever that stands, passes partial sums through where it is linear, does the same work on every
rank, or runs one of its expansions (a ring).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paraplan.ir.machine.mesh import P, Partial, Placement, R, S
from paraplan.rules.dims import OpDims

WHOLE_KEY = "-"
"""What a key says of an op that does the same work on every rank."""


@dataclass(frozen=True)
class AxisChoice:
    """What an op does along one axis.

    Attributes:
        key: text, see the module's head, without the reduction.
        inputs: placement of each tensor input.
        outputs: placement of each output as computed; None for an absent one.
        dim: the named dim it shards; "" for none.
    """

    key: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    dim: str = ""


def axis_choices(dims: OpDims) -> tuple[AxisChoice, ...]:
    """Everything an op may do along an axis: replicate first, then its dims, then partial sums."""
    none = AxisChoice(WHOLE_KEY, (R,) * len(dims.inputs), tuple(None if out is None else R for out in dims.outputs))
    found = [none]
    for dim, size in dims.sizes.items():
        if size > 1:
            choice = shard_dim(dims, dim)
            if choice is not None:
                found.append(choice)
    for group in dims.linear:
        inputs = tuple(P if index in group else R for index in range(len(dims.inputs)))
        key = "+" + ".".join(map(str, group))
        found.append(AxisChoice(key, inputs, tuple(None if out is None else P for out in dims.outputs)))
    return tuple(found)


def ring_choices(dims: OpDims) -> tuple[AxisChoice, ...]:
    """The ring along an axis, where the op has one, and what else shards as it does. They communicate, so they are
    nothing for the microbatch axis."""
    ring = dims.ring
    if ring is None:
        return ()
    inputs = tuple(S(names.index(dim)) if dim else R for names, dim in zip(dims.inputs, ring.inputs, strict=True))
    outputs: tuple[Placement | None, ...] = tuple(
        None if names is None or dim is None else S(names.index(dim)) if dim else P
        for names, dim in zip(dims.outputs, ring.outputs, strict=True)
    )
    return tuple(AxisChoice(key, inputs, outputs) for key in ring.keys)


def mesh_choices(dims: OpDims) -> tuple[AxisChoice, ...]:
    """Everything an op may do along an axis of the mesh: `axis_choices`, and the ring where it has one."""
    return (*axis_choices(dims), *ring_choices(dims))


def shard_dim(dims: OpDims, dim: str) -> AxisChoice | None:
    """What an op does that shards a dim; None where an output lacks it and no reduction joins the shards."""
    inputs: list[Placement] = [S(names.index(dim)) if dim in names else R for names in dims.inputs]
    outputs: list[Placement | None] = []
    reduction = dims.contracted.get(dim)
    for names in dims.outputs:
        if names is None:
            outputs.append(None)
        elif dim in names:
            outputs.append(S(names.index(dim)))
        elif reduction is not None:
            outputs.append(Partial(op=reduction))
        else:
            return None
    if reduction is not None:
        for index in dims.addends:
            if inputs[index] == R:
                inputs[index] = P
    return AxisChoice(dim, tuple(inputs), tuple(outputs), dim)


class AxisPart(NamedTuple):
    """What a strategy's key says of one mesh axis: what the op does there, and the layout its result is reduced to."""

    does: str
    reduced_to: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the op runs whole on every rank."""
        return self.does == WHOLE_KEY

    @property
    def is_sum(self) -> bool:
        """Whether its inputs are partial sums."""
        return self.does.startswith("+")


def axis_part(text: str) -> AxisPart:
    """A strategy's key along one axis, read."""
    does, _, reduced_to = text.partition(">")
    return AxisPart(does, reduced_to)


def axis_texts(key: str) -> tuple[str, ...]:
    """A strategy's key, one text for each mesh axis."""
    return tuple(key.split("|"))


def axis_parts(key: str) -> tuple[AxisPart, ...]:
    """A strategy's key, read; one part for each mesh axis."""
    return tuple(map(axis_part, axis_texts(key)))
