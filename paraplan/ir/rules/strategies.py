"""From an op's named dims to all its legal strategies on a mesh.

Along one axis an op may shard a letter, pass partial sums through (where it is linear), or do the same work
on every rank. A strategy picks one of these per axis, and, where the result is a partial sum, what becomes
of it at once: kept, reduced, or reduced and scattered over a dim. Its key spells that out, axes joined by
"|": `b|k>S1` shards b over the first axis and k over the second, reduce-scattering dim 1 of the result.

    letter     shard it              +0.2   inputs 0 and 2 partial        -   replicated
    >R, >S<d>  reduce the partial result to replicated, or scattered over dim d
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from paraplan.ir.graph import Graph, Op
from paraplan.ir.mesh import Layout, P, Partial, Placement, R, S, is_shardable
from paraplan.ir.rules.dims import WHOLE, OpDims, op_def, replicated
from paraplan.ir.tensor import TensorSpec


@dataclass(frozen=True)
class AxisChoice:
    """What an op does along one axis.

    Attributes:
        key: text, see the module's head, without the reduction.
        inputs: placement of each tensor input.
        outputs: placement of each output as computed; None for an absent one.
        letter: the sharded letter, if any.
    """

    key: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    letter: str = ""


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


def dims_of(op: Op, values: dict[str, TensorSpec]) -> OpDims:
    """The named dims of an op in a graph; all whole where there is no rule."""
    inputs = tuple(values[name] for name in op.tensors)
    outputs = tuple(None if name is None else values[name] for name in op.outs)
    definition = op_def(op.target)
    return replicated(inputs, outputs) if definition is None else definition.dims(op, inputs, outputs)


def axis_choices(dims: OpDims) -> tuple[AxisChoice, ...]:
    """Everything an op may do along an axis: replicate first, then its letters, then partial sums."""
    none = AxisChoice("-", (R,) * len(dims.inputs), tuple(None if out is None else R for out in dims.outputs))
    found = [none]
    for letter, size in dims.sizes.items():
        if size > 1:
            choice = _shard_letter(dims, letter)
            if choice is not None:
                found.append(choice)
    for group in dims.linear:
        inputs = tuple(P if index in group else R for index in range(len(dims.inputs)))
        key = "+" + ".".join(map(str, group))
        found.append(AxisChoice(key, inputs, tuple(None if out is None else P for out in dims.outputs)))
    return tuple(found)


def _shard_letter(dims: OpDims, letter: str) -> AxisChoice | None:
    inputs: list[Placement] = [S(names.index(letter)) if letter in names else R for names in dims.inputs]
    outputs: list[Placement | None] = []
    reduction = dims.contracted.get(letter)
    for names in dims.outputs:
        if names is None:
            outputs.append(None)
        elif letter in names:
            outputs.append(S(names.index(letter)))
        elif reduction is not None:
            outputs.append(Partial(op=reduction))
        else:
            return None
    if reduction is not None:
        for index in dims.addends:
            if inputs[index] == R:
                inputs[index] = P
    return AxisChoice(letter, tuple(inputs), tuple(outputs), letter)


def op_strategies(op: Op, values: dict[str, TensorSpec], mesh_shape: tuple[int, ...], micro: AxisChoice | None = None,
                  num_microbatches: int = 1) -> tuple[Strategy, ...]:  # fmt: skip
    """All legal strategies of an op.

    Args:
        op, values: the op and the specs of its graph.
        mesh_shape: axis sizes.
        micro: what the op does along the microbatch axis, which counts for divisibility.
        num_microbatches: that axis' size.
    Returns:
        Strategies in a fixed order, the fully replicated one first; keys are unique.
    """
    dims = dims_of(op, values)
    inputs = tuple(values[name] for name in op.tensors)
    outputs = tuple(None if name is None else values[name] for name in op.outs)
    micro_letter = micro.letter if micro is not None else ""
    extended = (num_microbatches, *mesh_shape)
    found: dict[str, Strategy] = {}
    choices = [choice for choice in axis_choices(dims) if not _sums_truths(choice, inputs, outputs)]
    for combo in itertools.product(choices, repeat=len(mesh_shape)):
        if not _divides(dims, combo, mesh_shape, micro_letter, num_microbatches):
            continue
        in_layouts = tuple(tuple(choice.inputs[i] for choice in combo) for i in range(len(inputs)))
        computed: tuple[Layout | None, ...] = tuple(
            None if spec is None else tuple(choice.outputs[i] or R for choice in combo)
            for i, spec in enumerate(outputs)
        )  # type: tuple[Layout | None, ...]
        for suffixes, outs in _reductions(computed, outputs, mesh_shape):
            full = _with_micro(micro, in_layouts, outs)
            if not all(
                is_shardable(spec.shape, layout, extended) for spec, layout in zip(inputs, full[0], strict=True)
            ):
                continue
            if not all(
                spec is None or layout is None or is_shardable(spec.shape, layout, extended)
                for spec, layout in zip(outputs, full[1], strict=True)
            ):
                continue
            key = "|".join(choice.key + suffix for choice, suffix in zip(combo, suffixes, strict=True))
            found.setdefault(key, Strategy(key, in_layouts, computed, outs))
    return tuple(found.values())


def _sums_truths(choice: AxisChoice, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec | None, ...]) -> bool:
    """Whether it takes or makes partial bools: no collective adds those."""
    places = (*zip(inputs, choice.inputs, strict=True), *zip(outputs, choice.outputs, strict=True))
    return any(spec is not None and spec.dtype == "bool" and isinstance(place, Partial) for spec, place in places)


def _divides(
    dims: OpDims, combo: tuple[AxisChoice, ...], mesh_shape: tuple[int, ...], micro_letter: str, count: int
) -> bool:
    shards: dict[str, int] = {micro_letter: count} if micro_letter else {}
    for choice, size in zip(combo, mesh_shape, strict=True):
        if choice.letter:
            shards[choice.letter] = shards.get(choice.letter, 1) * size
    return all(dims.sizes[letter] % parts == 0 for letter, parts in shards.items())


def _with_micro(
    micro: AxisChoice | None, inputs: tuple[Layout, ...], outputs: tuple[Layout | None, ...]
) -> tuple[tuple[Layout, ...], tuple[Layout | None, ...]]:
    if micro is None:
        return tuple((R, *layout) for layout in inputs), tuple(None if o is None else (R, *o) for o in outputs)
    return (
        tuple((first, *layout) for first, layout in zip(micro.inputs, inputs, strict=True)),
        tuple(
            None if layout is None or first is None else (first, *layout)
            for first, layout in zip(micro.outputs, outputs, strict=True)
        ),
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


@lru_cache(maxsize=256)
def graph_strategies(graph_key: GraphKey) -> tuple[tuple[Strategy, ...], ...]:
    """Per op of a graph, its strategies; cached by graph identity and mesh."""
    graph = graph_key.graph
    micros = graph_key.micro or (None,) * len(graph.ops)
    return tuple(
        op_strategies(op, graph.values, graph_key.mesh_shape, micro, graph_key.num_microbatches)
        for op, micro in zip(graph.ops, micros, strict=True)
    )


@dataclass(frozen=True, eq=False)
class GraphKey:
    """Cache key of `graph_strategies`; compares by identity of the graph."""

    graph: Graph
    mesh_shape: tuple[int, ...]
    micro: tuple[AxisChoice | None, ...] = ()
    num_microbatches: int = 1

    def __hash__(self) -> int:
        return hash((id(self.graph), self.mesh_shape, self.num_microbatches))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, GraphKey) and self.graph is other.graph and self.mesh_shape == other.mesh_shape
            and self.micro == other.micro and self.num_microbatches == other.num_microbatches
        )  # fmt: skip


def kept_whole(op: Op) -> bool:
    """Whether an op has no rule and is therefore replicated."""
    return op_def(op.target) is None


__all__ = [
    "WHOLE",
    "AxisChoice",
    "GraphKey",
    "Strategy",
    "axis_choices",
    "dims_of",
    "graph_strategies",
    "kept_whole",
    "op_strategies",
]
