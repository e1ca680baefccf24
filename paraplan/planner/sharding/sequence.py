"""What context parallelism leaves of the option space: the sequence sharded on one axis, from the batch to the loss.

The sequence dim of every value is found as the batch dim is found for data parallelism (`rules.time_axis`): starting
from the batch inputs, each op does what needs the fewest changes of layout. Where an op mixes positions (a shift of
labels, a view that merges the sequence into another dim) nothing is pinned and its results count as whole; what reads
them next to sharded values is pinned again. Attention mixes positions too, in the way that is asked for:

    gather      every rank has some queries and all keys (keys and values are gathered, their gradients scattered)
    alltoall    sequences are exchanged for heads around it (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509)
    ring        keys and values go round (Liu et al. 2023, arXiv 2310.01889)
    stripes     keys are gathered, and of a causal mask every rank takes as many early queries as late ones
                (`rules.expansions.stripes`); attention without one is in balance, and is done as by gather
"""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.mesh import Partial, Placement, R, S, Shard, is_shardable, pads_little
from paraplan.ir.model.graph import Graph, Op, Phase, target_parts
from paraplan.ir.model.program import Program
from paraplan.ir.option_words import OptionName, OptionValue
from paraplan.planner.options.values import CP_MODES
from paraplan.rules.strategies import RING, STRIPES, AxisChoice, axis_choices, dims_of, fits_dim, ring_choices

KEYS = {"gather": "s", "alltoall": "h", "ring": RING, "stripes": STRIPES}
ATTENTION = ("paraplan.attention", "paraplan.attention_grad")

Keys = frozenset[str] | None
"""What an op may do along the axis; None: anything."""
_SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax"})


def sequence_length(program: Program) -> int:
    """The size of dim 1 of the first batch input that has one; -1 where none does."""
    return next((entry.spec.shape[1] for entry in program.batch.values() if len(entry.spec.shape) >= 2), -1)


def batch_placement(program: Program, name: str) -> Placement:
    """Where a batch input lies on the axis: sharded in dim 1 where that is the sequence."""
    shape = program.batch[name].spec.shape
    return S(1) if len(shape) >= 2 and shape[1] == sequence_length(program) else R


def sequence_keys(program: Program, size: int, mode: str | None) -> tuple[tuple[Keys, ...], ...]:
    """Per kind, per op, what it may do along a context-parallel axis.

    Args:
        program: whose ops.
        size: of the axis.
        mode: how attention goes, see the module's head; None: any of them.
    Raises:
        ConstraintError: the sequence cannot be sharded so, the heads do not divide, or no attention takes the mode.
    """
    length = sequence_length(program)
    if length < 0 or not pads_little(length, size):
        has = f"a sequence of {length}" if length >= 0 else "a batch without a sequence dim"
        cp = OptionValue("cp", size)
        raise ConstraintError("{}: {} does not divide over {} context-parallel ranks", cp, has, size)
    modes: tuple[str, ...] = CP_MODES if mode is None else (mode,)
    if length % size:
        if modes == ("ring",):
            raise ConstraintError(
                f"cp_mode=ring: a sequence of {length} does not divide over {size} ranks, and a ring's blocks are not "
                "padded; use cp_mode=gather or alltoall, or pad the sequence in the batch"
            )
        modes = tuple(each for each in modes if each != "ring")
    if length % size**2:
        if modes == ("stripes",):
            raise ConstraintError(
                f"cp_mode=stripes: a sequence of {length} does not divide into {size} stripes for each of {size} "
                f"ranks; use cp_mode=gather or alltoall, or sequences that {size**2} divides"
            )
        modes = tuple(each for each in modes if each != "stripes")
    walk = _Walk(size, modes)
    values: dict[str, Placement] = {f"batch:{name}": batch_placement(program, name) for name in program.batch}
    found: dict[int, tuple[Keys, ...]] = {}
    for segment in program.segments:
        kind = program.kinds[segment.kind]
        given = {local: values.get(outer, R) for local, outer in zip(kind.inputs, segment.inputs, strict=True)}
        tangents = {t: out for t, out in zip(kind.tangents, kind.outputs, strict=True) if t is not None}
        keys, placements = walk.graph(kind.graph, given, tangents)
        found.setdefault(segment.kind, keys)
        values |= {outer: placements[local] for local, outer in zip(kind.outputs, segment.outputs, strict=True)}
    if mode is not None and not walk.taken:
        raise ConstraintError(_not_taken(program, mode))
    if walk.summed and not walk.kept:
        names = [f"{name} {list(entry.spec.shape)}" for name, entry in program.batch.items()]
        raise ConstraintError(_NO_SEQUENCE, OptionValue("cp", size), ", ".join(names), walk.summed, OptionName("cp"))
    return tuple(found.get(index, ()) for index in range(len(program.kinds)))


def _not_taken(program: Program, mode: str) -> str:
    """That no attention takes a pinned mode: what was looked for, where, and the ways out."""
    graphs = [program.kinds[segment.kind].graph for segment in program.segments]
    forward = [(op.target, graph.source_of(op)) for graph in graphs for op in graph.ops if op.phase is Phase.FORWARD]
    places = [source for target, source in forward if target == ATTENTION[0]]
    written = [source for target, source in forward if target_parts(target).name in _SOFTMAX]
    if places:
        found = f"{len(places)} were found (the first at {places[0]}), none of which has a sharded sequence to go over"
    else:
        found = "0 were found"
        found += f" (the softmax at {written[0]} is planned with the products around it)" if written else ""
    return (
        f"cp_mode={mode} says how attention ops (F.scaled_dot_product_attention) go over a sharded sequence, and of "
        f"those {found}; leave cp_mode out, or compute attention by F.scaled_dot_product_attention"
    )


_NO_SEQUENCE = (
    "{}: dim 1 of the batch ({}) is no sequence, as {} sums over it, and nothing else keeps it sharded; leave {} out"
)


class _Walk:
    """Follows the sequence through graphs.

    Attributes:
        taken: attention ops that take one of the modes.
        kept: other ops of forwards with a sum, which the sequence goes through.
        summed: the first one that sums over it; "" where none does.
    """

    def __init__(self, size: int, modes: tuple[str, ...]) -> None:
        self.size, self.modes, self.taken, self.kept, self.summed = size, modes, 0, 0, ""

    def graph(
        self, graph: Graph, given: dict[str, Placement], tangents: dict[str, str]
    ) -> tuple[tuple[Keys, ...], dict[str, Placement]]:
        """Per op its keys, and where each value lies; a gradient lies as its value does, sums being whole."""
        placements: dict[str, Placement] = {name: given.get(name, R) for name in graph.inputs}
        found: list[Keys] = []
        for op in graph.ops:
            for name in op.tensors:
                if name in tangents:
                    of = placements[tangents[name]]
                    placements[name] = of if isinstance(of, Shard) else R
            keys, outs = self._op(graph, op, tuple(placements[name] for name in op.tensors))
            found.append(keys)
            placements |= {name: place for name, place in zip(op.outs, outs, strict=True) if name is not None}
        return tuple(found), placements

    def _op(self, graph: Graph, op: Op, have: tuple[Placement, ...]) -> tuple[Keys, tuple[Placement, ...]]:
        whole = (R,) * len(op.outs)
        if all(place == R for place in have):
            return None, whole
        dims = dims_of(op, graph.values)
        rings = {choice.key: choice for choice in ring_choices(dims)}
        if op.target in ATTENTION and rings:
            if self.modes == ("alltoall",) and dims.sizes["h"] % self.size:
                raise ConstraintError(
                    f"cp_mode=alltoall: {dims.sizes['h']} key/value heads do not divide over {self.size} ranks "
                    f"({graph.source_of(op)}); use cp_mode=gather or ring, or a cp that divides the heads"
                )
            self.taken += 1
            modes = ("gather",) if self.modes == ("stripes",) and STRIPES not in rings else self.modes
            return frozenset(KEYS[mode] for mode in modes), _placed(rings[RING])
        fitting = [
            choice
            for choice in axis_choices(dims)
            if fits_dim(dims, choice.dim, self.size) and self._fits(graph, op, choice, have)
        ]
        if not fitting:
            return None, whole
        best = min(fitting, key=lambda choice: sum(h != need for h, need in zip(have, choice.inputs, strict=True)))
        if op.phase is Phase.FORWARD:
            self._count(graph, op, best, axis_choices(dims))
        return frozenset({best.key}), _placed(best)

    def _count(self, graph: Graph, op: Op, taken: AxisChoice, choices: Sequence[AxisChoice]) -> None:
        """An op that may sum over a sharded dim: whether it does over the sequence."""
        if any(isinstance(place, Partial) for place in taken.outputs):
            self.summed = self.summed or graph.source_of(op)
        elif any(isinstance(place, Partial) for choice in choices for place in choice.outputs):
            self.kept += 1

    def _fits(self, graph: Graph, op: Op, choice: AxisChoice, have: tuple[Placement, ...]) -> bool:
        """Whether an op may do this without communication, slicing whole inputs where it has to."""
        if any(h not in (need, R) for h, need in zip(have, choice.inputs, strict=True)):
            return False
        places = (*zip(op.tensors, choice.inputs, strict=True), *zip(op.outs, choice.outputs, strict=True))
        specs = [(graph.values[name], place) for name, place in places if name is not None and place is not None]
        return all(is_shardable(spec.shape, (place,), (self.size,)) for spec, place in specs)


def _placed(choice: AxisChoice) -> tuple[Placement, ...]:
    return tuple(R if place is None or place == Partial(op="max") else place for place in choice.outputs)
