"""From an op's named dims to all its legal strategies on a mesh.

Along one axis an op may shard a named dim, pass partial sums through (where it is linear), or do the same work
on every rank. A strategy picks one of these per axis, and, where the result is a partial sum, what becomes
of it at once: kept, reduced, or reduced and scattered over a dim. Its key spells that out, axes joined by
"|": `b|k>S1` shards b over the first axis and k over the second, reduce-scattering dim 1 of the result.

    <dim>      shard it              +0.2   inputs 0 and 2 partial        -   replicated
    >R, >S<d>  reduce the partial result to replicated, or scattered over dim d
    ring       shard both sides of a product of blocks and pass one of them round the axis, where the op can
    route      shard tokens and experts, and send each token to the ranks of its experts; on several axes, one after
               another
    gather.a.4, scatter.a.4    a product in pieces beside its collective (`overlap`); found by name only
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paraplan.ir.machine.mesh import Layout, Partial, Placement, R, S, is_shardable, padded_dims, pads_little
from paraplan.ir.model.graph import Op
from paraplan.ir.model.tensor import TensorSpec
from paraplan.rules.carried_rules import definition_of
from paraplan.rules.choices import (
    AxisChoice,
    axis_choices,
    axis_part,
    axis_parts,
    axis_texts,
    mesh_choices,
    ring_choices,
)
from paraplan.rules.dims import RING, ROUTING, STRIPES, WHOLE, OpDims, replicated
from paraplan.rules.expansions.overlap import GATHER, SCATTER, parse_pieces, pieces_choice

EXPANDED = (RING, STRIPES, ROUTING, GATHER, SCATTER)
"""What the keys of strategies of several instructions begin with."""

AxisKeys = tuple[frozenset[str] | None, ...]
"""Per mesh axis, what an op may do there, by key without the reduction; None for everything."""


@dataclass(frozen=True)
class Strategy:
    """What an op does on a mesh.

    Attributes:
        key: text form.
        inputs: layout each tensor input must have.
        computed: layout of each output as the op computes it.
        outputs: layout of each output after the reduction the strategy asks for; where it differs from
            `computed`, collectives follow the op at once.
    """

    key: str
    inputs: tuple[Layout, ...]
    computed: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]

    @property
    def ring_axis(self) -> int:
        """The (first) axis a ring, a route or pieces run along; -1 for none. Such an op is lowered to its expansion."""
        return next((axis for axis, part in enumerate(axis_texts(self.key)) if is_expanded(part)), -1)


def is_expanded(part: str) -> bool:
    """Whether a strategy's part along an axis takes several instructions."""
    return axis_part(part).does.split(".")[0] in EXPANDED


def dims_of(op: Op, values: dict[str, TensorSpec]) -> OpDims:
    """The named dims of an op in a graph; all whole where there is no rule."""
    inputs = tuple(values[name] for name in op.tensors)
    outputs = tuple(None if name is None else values[name] for name in op.outs)
    definition = definition_of(op)
    return replicated(inputs, outputs) if definition is None else definition.dims(op, inputs, outputs)


def _by_axis(
    op: Op, dims: OpDims, choices: Sequence[AxisChoice], mesh_shape: tuple[int, ...], only: AxisKeys
) -> list[list[AxisChoice]]:
    """Per mesh axis, what an op may do there: `choices` and products in pieces, of those that `only` leaves."""
    return [
        [c for c in (*choices, *_in_pieces(op, dims, keys, size)) if keys is None or c.key in keys]
        for keys, size in zip(only or (None,) * len(mesh_shape), mesh_shape, strict=True)
    ]


def op_strategies(
    op: Op,
    values: dict[str, TensorSpec],
    mesh_shape: tuple[int, ...],
    micro: AxisChoice | None = None,
    num_microbatches: int = 1,
    only: AxisKeys = (),
    reduced: bool = True,
) -> tuple[Strategy, ...]:
    """All legal strategies of an op.

    Args:
        op, values: the op and the specs of its graph.
        mesh_shape: axis sizes.
        micro: what the op does along the microbatch axis, which counts for divisibility.
        num_microbatches: that axis' size.
        only: per axis, the keys of what the op may do there; None, or nothing given, for everything.
        reduced: whether to list what may become of partial results too; without, they are kept.
    Returns:
        Strategies in a fixed order, the fully replicated one first; keys are unique.
    """
    dims = dims_of(op, values)
    inputs = tuple(values[name] for name in op.tensors)
    outputs = tuple(None if name is None else values[name] for name in op.outs)
    micro_dim = micro.dim if micro is not None else ""
    found: dict[str, Strategy] = {}
    turns = dims.ring.turns if dims.ring is not None else ""
    choices = [choice for choice in mesh_choices(dims) if not _sums_truths(choice, inputs, outputs)]
    if turns and micro_dim == turns:
        choices = [choice for choice in choices if not is_expanded(choice.key)]
    shardable = _Shardable(micro, (num_microbatches, *mesh_shape))
    ends: dict[object, list[tuple[tuple[str, ...], tuple[Layout | None, ...]]]] = {}
    for combo in itertools.product(*_by_axis(op, dims, choices, mesh_shape, only)):
        if not _divides(dims, combo, mesh_shape, micro_dim, num_microbatches):
            continue
        keys = [choice.key for choice in combo]
        expanded = sum(map(is_expanded, keys))
        if expanded and expanded + sum(key in _turns(keys, turns) for key in (*keys, micro_dim)) > _levels(keys):
            continue
        in_layouts = (
            tuple(zip(*(choice.inputs for choice in combo), strict=True)) if mesh_shape else ((),) * len(inputs)
        )
        if STRIPES in keys and _stripes_are_uneven(dims, keys.index(STRIPES), outputs, mesh_shape):
            continue
        if expanded and any(map(padded_dims, (x.shape for x in inputs), in_layouts, itertools.repeat(mesh_shape))):
            continue
        if not shardable(inputs, in_layouts):
            continue
        computed: tuple[Layout | None, ...] = tuple(
            None if spec is None else tuple(choice.outputs[i] or R for choice in combo)
            for i, spec in enumerate(outputs)
        )
        if computed not in ends:
            kept = [(("",) * len(mesh_shape), computed)]
            options = _reductions(computed, outputs, mesh_shape) if reduced else kept
            ends[computed] = [end for end in options if shardable(outputs, end[1], of_outputs=True)]
        for suffixes, outs in ends[computed]:
            key = "|".join(map(str.__add__, keys, suffixes))
            found.setdefault(key, Strategy(key, in_layouts, computed, outs))
    return tuple(found.values())


def choices_named(op: Op, values: dict[str, TensorSpec], key: str) -> tuple[AxisChoice, ...]:
    """What an op does along every axis, from a strategy's key: dims, rings, routes and pieces alike.

    Args:
        op, values: the op and the specs of its graph.
        key: of a strategy, with reductions or without.
    Raises:
        KeyError: the op has no such strategy.
    """
    dims, found = dims_of(op, values), []
    named = {choice.key: choice for choice in mesh_choices(dims)}
    for part in (part.does for part in axis_parts(key) if part.does):
        choice = named.get(part) or pieces_choice(op, dims, part, 1)
        if choice is None:
            raise KeyError(f"{op.target} has no strategy {part!r}; it has {', '.join(named)}")
        found.append(choice)
    return tuple(found)


def _in_pieces(op: Op, dims: OpDims, keys: frozenset[str] | None, size: int) -> tuple[AxisChoice, ...]:
    """The products in pieces among some keys."""
    found = (pieces_choice(op, dims, key, size) for key in sorted(keys or ()))
    return tuple(choice for choice in found if choice is not None)


def _levels(keys: list[str]) -> int:
    """How many axes may be expanded: one, but rows that were routed over an axis may be routed on over others."""
    return max(keys.count(ROUTING), 1)


def _turns(keys: list[str], ring: str) -> frozenset[str]:
    """The dims that no other axis may shard: those whose blocks or pieces are passed round."""
    of_pieces = (pieces.dim for key in keys if (pieces := parse_pieces(key)) is not None)
    dealt = "s" if STRIPES in keys else ""
    return frozenset(filter(None, (ring, dealt, *of_pieces)))


def _stripes_are_uneven(
    dims: OpDims, axis: int, outputs: tuple[TensorSpec | None, ...], mesh_shape: tuple[int, ...]
) -> bool:
    """Whether a rank's queries do not come to equal stripes for all ranks."""
    pairs = zip(dims.outputs, outputs, strict=True)
    rows = next(out.shape[names.index("s")] for names, out in pairs if names and out is not None and "s" in names)
    return rows % mesh_shape[axis] ** 2 != 0


class _Shardable:
    """Whether tensors may lie so together with the microbatch axis; asked once per layouts."""

    def __init__(self, micro: AxisChoice | None, extended: tuple[int, ...]) -> None:
        self.micro, self.extended, self.known = micro, extended, dict[object, bool]()

    def __call__(
        self, specs: Sequence[TensorSpec | None], layouts: tuple[Layout | None, ...], of_outputs: bool = False
    ) -> bool:
        key = (layouts, of_outputs)
        if key not in self.known:
            self.known[key] = _shardable(specs, _with_micro(self.micro, layouts, of_outputs), self.extended)
        return self.known[key]


def strategy_named(
    op: Op,
    values: dict[str, TensorSpec],
    mesh_shape: tuple[int, ...],
    key: str,
    micro: AxisChoice | None = None,
    num_microbatches: int = 1,
) -> Strategy | None:
    """The legal strategy with a key, found without listing the others; None where there is none.

    Args:
        op: of a graph.
        values: specs of the graph's values, whole.
        mesh_shape: without the microbatch axis.
        key: of the strategy.
        micro: what the op does along the microbatch axis; None where there is none.
        num_microbatches: extent of that axis.
    """
    parts = axis_parts(key)
    if mesh_shape and len(parts) != len(mesh_shape):
        return None
    only = tuple(frozenset({part.does}) for part in parts) if mesh_shape else ()
    legal = op_strategies(op, values, mesh_shape, micro, num_microbatches, only)
    return next((strategy for strategy in legal if strategy.key == key), None)


def _sums_truths(choice: AxisChoice, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec | None, ...]) -> bool:
    """Whether it takes or makes partial bools: no collective adds those."""
    places = (*zip(inputs, choice.inputs, strict=True), *zip(outputs, choice.outputs, strict=True))
    return any(spec is not None and spec.dtype == "bool" and isinstance(place, Partial) for spec, place in places)


def _divides(
    dims: OpDims, combo: tuple[AxisChoice, ...], mesh_shape: tuple[int, ...], micro_dim: str, count: int
) -> bool:
    """Whether every dim divides by the axes that shard it, or may be padded."""
    shards: dict[str, list[int]] = {micro_dim: [count]} if micro_dim else {}
    for choice, size in zip(combo, mesh_shape, strict=True):
        if choice.dim:
            shards.setdefault(choice.dim, []).append(size)
    for dim, parts in shards.items():
        if dims.sizes[dim] % math.prod(parts) == 0:
            continue
        several = [size for size in parts if size > 1]
        in_time = dim == micro_dim and count > 1
        if in_time or len(several) != 1 or not fits_dim(dims, dim, several[0]):
            return False
    return True


def fits_dim(dims: OpDims, dim: str, size: int) -> bool:
    """Whether so many ranks may shard a dim: it divides, or may be padded.

    Args:
        dims: the op's.
        dim: the name of one of them; "" for none, which always may.
        size: number of ranks.
    """
    if not dim or dims.sizes[dim] % size == 0:
        return True
    return dim in dims.uneven and pads_little(dims.sizes[dim], size)


def _with_micro(
    micro: AxisChoice | None, layouts: Sequence[Layout | None], of_outputs: bool = False
) -> tuple[Layout | None, ...]:
    """Layouts with the placement along the microbatch axis in front."""
    if micro is None:
        return tuple(None if layout is None else (R, *layout) for layout in layouts)
    firsts = micro.outputs if of_outputs else micro.inputs
    return tuple(
        None if layout is None or first is None else (first, *layout)
        for first, layout in zip(firsts, layouts, strict=True)
    )


def _shardable(
    specs: Sequence[TensorSpec | None], layouts: Sequence[Layout | None], mesh_shape: tuple[int, ...]
) -> bool:
    """Whether tensors may lie so on the extended mesh."""
    return all(
        spec is None or layout is None or is_shardable(spec.shape, layout, mesh_shape, frozen=1)
        for spec, layout in zip(specs, layouts, strict=True)
    )


def _reductions(
    computed: tuple[Layout | None, ...], outputs: tuple[TensorSpec | None, ...], mesh_shape: tuple[int, ...]
) -> list[tuple[tuple[str, ...], tuple[Layout | None, ...]]]:
    """What may become of partial results: per axis kept, `>R`, or `>S<d>`; ops with several results keep theirs."""
    present = [layout for layout in computed if layout is not None]
    if len(present) != 1:
        return [(("",) * len(mesh_shape), computed)]
    index = computed.index(present[0])
    spec = outputs[index]
    assert spec is not None
    options: list[list[tuple[str, Placement]]] = []
    for placement in present[0]:
        if not isinstance(placement, Partial):
            options.append([("", placement)])
        elif placement.op != "sum":
            options.append([(">R", R)])
        else:
            scatters = [(f">S{dim}", S(dim)) for dim in range(len(spec.shape)) if spec.shape[dim] > 1]
            options.append([("", placement), (">R", R), *scatters])
    found = []
    for combo in itertools.product(*options):
        layout = tuple(placement for _, placement in combo)
        outs = tuple(layout if i == index else None for i in range(len(computed)))
        found.append((tuple(suffix for suffix, _ in combo), outs))
    return found


def kept_whole(op: Op) -> bool:
    """Whether an op has no rule and is therefore replicated."""
    return definition_of(op) is None or (op.rule is not None and op.rule.is_whole)


__all__ = [
    "WHOLE",
    "RING",
    "STRIPES",
    "AxisChoice",
    "AxisKeys",
    "Strategy",
    "axis_choices",
    "choices_named",
    "dims_of",
    "fits_dim",
    "is_expanded",
    "kept_whole",
    "mesh_choices",
    "op_strategies",
    "ring_choices",
    "strategy_named",
]
