"""What one op does along the microbatch axis: of all that its named dims allow, what takes least of its inputs.

Along the axis a value may be sliced or counted once, never gathered. What no rule covers is refused as mixing samples,
but for gradients of functions of parameters alone (`choose_as_is`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from paraplan.ir.errors import MixedSamples
from paraplan.ir.machine.mesh import P, Partial, Placement, R, is_shardable
from paraplan.ir.model.graph import Graph, Op
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.process.memo import SESSION
from paraplan.rules.strategies import AxisChoice, axis_choices, dims_of

APART = (
    "; or let each microbatch be a batch by itself (compile's per_microbatch=True, --per-microbatch): this op then "
    "sees one microbatch alone, as in eager gradient accumulation, which is another definition of what is computed"
)


def making(
    graph: Graph, op: Op, have: tuple[Placement, ...], m: int, want: Mapping[str, Placement]
) -> AxisChoice | None:
    """The cheapest choice whose results stand as wanted; None where there is none.

    Args:
        graph: with specs.
        op: of it.
        have: where its inputs stand.
        m: extent of the axis.
        want: where its results are to stand, by name.
    """

    def fits(choice: AxisChoice) -> bool:
        made = dict(zip(op.outs, choice.outputs, strict=True))
        return all(made[name] == place for name, place in want.items())

    return _cheapest(filter(fits, feasible(graph, op, m, False)), have, False)


def _cheapest(choices: Iterable[AxisChoice], have: tuple[Placement, ...], in_space: bool) -> AxisChoice | None:
    """The choice whose inputs take the least to be brought about; None where no choice's can be."""
    best: tuple[int, AxisChoice] | None = None
    for choice in choices:
        efforts = [_effort(h, need, in_space) for h, need in zip(have, choice.inputs, strict=True)]
        if None in efforts:
            continue
        effort = sum(each or 0 for each in efforts)
        if best is None or effort < best[0]:
            best = (effort, choice)
    return None if best is None else best[1]


def choose(graph: Graph, op: Op, have: tuple[Placement, ...], m: int, where: str, in_space: bool) -> AxisChoice:
    """What an op does, given where its inputs stand.

    Args:
        graph, op, have, m: as of `making`.
        where: the segment, for the message.
        in_space: whether the axis is of ranks, and not of microbatches.
    Raises:
        MixedSamples: there is nothing that it can do; names it.
    """
    if m == 1 or all(placement == R for placement in have):
        return _options(graph, op, in_space)[0]
    best = _cheapest(feasible(graph, op, m, in_space), have, in_space)
    if best is None:
        raise mixed(graph, op, m, where, in_space)
    return best


def choose_as_is(
    graph: Graph, op: Op, have: tuple[Placement, ...], m: int, where: str, gradients: AbstractSet[str]
) -> AxisChoice:
    """What an op of a backward does that is linear as a whole, though this op may not be linear by itself.

    Gradients of functions of parameters alone are partial sums, one addend a microbatch, and the derivative of such a
    function is a composition of any ops, linear in the gradient: applied to every addend, with what else it reads whole
    each time, it gives the addends of its value (a matrix exponential of a block matrix that holds the gradient). So
    such an op takes all as it is. A gradient that is whole (of a term counted once) is no addend and is refused beside
    partial ones, but where the op is linear in both.

    Args:
        graph, op, have, m, where: as in `choose`.
        gradients: values made of the tangents.
    Raises:
        MixedSamples: an input is neither an addend of a gradient nor whole.
    """
    best = _cheapest(feasible(graph, op, m, False), have, False)
    pairs = list(zip(op.tensors, have, strict=True))
    needs = best.inputs if best is not None else have
    once = any(at == R and need == P and name not in gradients for (name, at), need in zip(pairs, needs, strict=True))
    if best is not None and not once:
        return best
    if any(at != (P if name in gradients else R) for name, at in pairs):
        raise mixed(graph, op, m, where, False)
    return AxisChoice("as is", have, tuple(None if out is None else P for out in op.outs))


def mixed(graph: Graph, op: Op, m: int, where: str, in_space: bool) -> MixedSamples:
    """What says that an op needs to see other samples than a microbatch's, or a rank's.

    Args:
        graph, op, m, where, in_space: as of `choose`.
    """
    split = f"over {m} data-parallel ranks" if in_space else f"into {m} microbatches; use 1 microbatch{APART}"
    named = f"{op.target} ({graph.source_of(op)})"
    return MixedSamples(f"{where}: {named} mixes samples of the batch, so the batch cannot be split {split}", named)


def feasible(graph: Graph, op: Op, m: int, in_space: bool) -> Iterator[AxisChoice]:
    """What an op may do along the axis, if the dims it splits divide.

    Args:
        graph, op, m, in_space: as of `choose`.
    """
    specs = [graph.values[name] for name in (*op.tensors, *(name for name in op.outs if name))]
    for choice in _options(graph, op, in_space):
        places = [*choice.inputs, *(place for place in choice.outputs if place is not None)]
        if all(is_shardable(spec.shape, (at,), (m,), frozen=1) for spec, at in zip(specs, places, strict=True)):
            yield choice


def _effort(have: Placement, need: Placement, in_space: bool) -> int | None:
    """How dear a change is; None where there is none.

    Along the axis a value may be sliced or counted once; in space alone sums over it can be completed and, where an op
    mixes samples (a contrastive loss), shards gathered.
    """
    if have == need:
        return 0
    if have == R:
        return None if isinstance(need, Partial) and need != P else 1
    if not in_space or isinstance(need, Partial):
        return None
    return 3 if have == P else 10


@SESSION.cached(20_000)
def _cached_choices(key: _OpKey) -> tuple[AxisChoice, ...]:
    dims = dims_of(key.op, key.values)
    choices = axis_choices(dims)
    return choices if key.in_space or not dims.apart else tuple(map(_own, choices))


def _own(choice: AxisChoice) -> AxisChoice:
    """A choice whose partial maxima are whole: each microbatch's own."""
    own = tuple(R if isinstance(place, Partial) and place.op == "max" else place for place in choice.outputs)
    return replace(choice, outputs=own)


@dataclass(frozen=True, eq=False)
class _OpKey:
    op: Op
    values: dict[str, TensorSpec]
    in_space: bool

    def __hash__(self) -> int:
        return id(self.op)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OpKey) and self.op is other.op and self.in_space == other.in_space


def _options(graph: Graph, op: Op, in_space: bool) -> tuple[AxisChoice, ...]:
    values = {name: graph.values[name] for name in (*op.tensors, *op.outs) if name is not None}
    return _cached_choices(_OpKey(op, values, in_space))
