"""Microbatches as one more mesh axis, in time instead of space.

A program is captured at its global batch. Running it in M microbatches shards every batch dim M ways along
an axis whose coordinate is the microbatch index: the same rules say what each op does there, constants of
the graph stay those of the global batch, and what is partial along the axis is accumulated, so the result is
exact. No communication exists along it: a value may be sliced or counted once, never gathered; an op that
would need to see other microbatches makes the program not splittable, and is named. But for scales of casts to float8,
which every microbatch has for itself (`OpDims.apart`), and for the *tail*: the last segments, from the first one with
such an op on, run once on the whole batch (a contrastive loss, a function of sums over the batch), after the forwards
of all microbatches and before their backwards. Capture cuts segments so that the tail is as little as can be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paraplan.ir.errors import ConstraintError, MixedSamples
from paraplan.ir.machine.mesh import Layout, P, Partial, Placement, R, S, Shard
from paraplan.ir.model.graph import Graph, Op
from paraplan.ir.model.program import Program, Segment, SegmentKind
from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.rules.strategies import AxisChoice, Strategy
from paraplan.rules.time_axis_ops import choose, choose_as_is, feasible, making, mixed


@dataclass(frozen=True)
class KindMicro:
    """What a kind's ops and values do along the microbatch axis.

    Attributes:
        choices: per op, what it does.
        placements: per value, where it stands (after production).
    """

    choices: tuple[AxisChoice, ...]
    placements: dict[str, Placement]


@dataclass(frozen=True)
class ProgramMicro:
    """What a program does along the microbatch axis.

    Attributes:
        segments: per segment; equal instances share one.
        denominators: per denominator.
        values: placements of program values.
        tail: the first segment that runs once, on the whole batch, as all after it do; their number where none does.
        mixes: why, where one does: the op that sees several samples.
        after: the values that the tail makes.
    """

    segments: tuple[KindMicro, ...]
    denominators: tuple[KindMicro, ...]
    values: dict[str, Placement]
    tail: int
    mixes: str = ""
    after: frozenset[str] = frozenset()

    @property
    def has_tail(self) -> bool:
        """Whether some segments run on the whole batch."""
        return self.tail < len(self.segments)


_MICROS: Lately[ProgramMicro] = SESSION.lately("time_axis.micros", 1 << 6)


def dual(placement: Placement) -> Placement:
    """Where the gradient of a value stands: shards stay, whole values collect sums, sums spread whole."""
    if isinstance(placement, Shard):
        return placement
    return R if isinstance(placement, Partial) else P


def program_micro(program: Program, num_microbatches: int, in_space: bool = False) -> ProgramMicro:
    """What everything does along the microbatch axis; trivially whole for one microbatch.

    Args:
        program: whose ops and values.
        num_microbatches: extent of the axis.
        in_space: it is a data-parallel axis of a mesh, where partial sums can be reduced (batch statistics).
    Raises:
        ConstraintError: the batch does not divide, or an op mixes samples.
    """
    return _MICROS.get(
        (Same(program), num_microbatches, in_space), lambda: _program_micro(program, num_microbatches, in_space)
    )


def _program_micro(program: Program, num_microbatches: int, in_space: bool) -> ProgramMicro:
    if program.apart > 1 and not in_space:
        if num_microbatches != program.apart:
            raise ConstraintError(
                f"{num_microbatches} microbatches, and the program was captured for {program.apart} that are batches "
                "by themselves (per_microbatch); capture it again for another number"
            )
        num_microbatches = 1
    m = num_microbatches
    if m < 1 or program.batch_size % m:
        raise ConstraintError(
            f"a batch of {program.batch_size} does not divide into {m} microbatches; use a divisor of it"
        )
    wanted: dict[str, Placement] = {}
    while True:
        found = _placed(program, m, in_space, wanted)
        more = {} if in_space or m == 1 else _sliced(program, found, wanted)
        if not more:
            return found
        wanted |= more


def _sliced(program: Program, found: ProgramMicro, known: Mapping[str, Placement]) -> dict[str, Placement]:
    """Whole values that every reader slices alike (a learned query expanded over the batch): they are to be made in
    slices, for a gradient in slices cannot become a sum of whole ones."""
    uses: dict[str, set[Placement]] = {}
    for segment, micro in zip(program.segments[: found.tail], found.segments, strict=False):
        kind = program.kinds[segment.kind]
        outer = dict(zip(kind.inputs, segment.inputs, strict=True))
        for op, choice in zip(kind.graph.ops, micro.choices, strict=True):
            for name, place in zip(op.tensors, choice.inputs, strict=True):
                if name in outer:
                    uses.setdefault(outer[name], set()).add(place)
    late = {name for segment in program.segments[found.tail :] for name in segment.inputs}
    made = {
        outer
        for segment in program.segments[: found.tail]
        for outer, tangent in zip(segment.outputs, program.kinds[segment.kind].tangents, strict=True)
        if tangent is not None and found.values[outer] == R and outer not in known and outer not in late
    }
    alike = {name: next(iter(uses[name])) for name in made if len(uses.get(name, ())) == 1}
    return {name: place for name, place in alike.items() if isinstance(place, Shard)}


def _placed(program: Program, m: int, in_space: bool, wanted: Mapping[str, Placement]) -> ProgramMicro:
    """`program_micro` where some values of segments are made as wanted."""
    values: dict[str, Placement] = {f"buffer:{name}": R for name in program.buffers}
    for name, entry in program.batch.items():
        values[f"batch:{name}"] = S(entry.batch_dim) if m > 1 and entry.batch_dim is not None else R
    cache: dict[object, KindMicro] = {}
    segments: list[KindMicro] = []
    tail, mixes = len(program.segments), ""
    for index, segment in enumerate(program.segments):
        kind = program.kinds[segment.kind]
        given = {local: values[outer] for local, outer in zip(kind.inputs, segment.inputs, strict=True)}
        want = {local: wanted[out] for local, out in zip(kind.outputs, segment.outputs, strict=True) if out in wanted}
        key = (segment.kind, (*given.values(), *want.items()), index >= tail)
        if key not in cache and index < tail:
            duals = {t: o for t, o in zip(kind.tangents, kind.outputs, strict=True) if t is not None}
            try:
                made = _kind_micro(kind, given, duals, m, in_space, want)
                if not in_space:
                    _refuse_rows(kind, segment, made, m)
                cache[key] = made
            except MixedSamples as fault:
                if in_space or not _may_end(program, index):
                    raise
                tail, mixes, key = index, fault.op, (*key[:2], True)
        if key not in cache:
            cache[key] = graph_micro(kind.graph, {}, {}, 1, kind.name)
        found = cache[key]
        for local, outer in zip(kind.outputs, segment.outputs, strict=True):
            values[outer] = found.placements[local]
        segments.append(found)
    denominators = tuple(
        graph_micro(
            d.graph, {n: values[o] for n, o in zip(d.graph.inputs, d.inputs, strict=True)}, {}, m, "denominator"
        )
        for d in program.denominators
    )
    after = frozenset(name for each in program.segments[tail:] for name in (*each.outputs, *each.asides))
    return ProgramMicro(tuple(segments), denominators, values, tail, mixes, after)


def _refuse_rows(kind: SegmentKind, segment: Segment, found: KindMicro, m: int) -> None:
    """A parameter of which every sample has a slice is read in slices by microbatches: no gradient of it is a sum. Nor
    is the gradient of an input in slices, of which every microbatch would make an addend.

    Raises:
        MixedSamples: there is one; names it.
    """
    for name, grad in zip(segment.params, kind.param_grads, strict=True):
        if grad is not None and isinstance(found.placements[grad], Shard):
            raise MixedSamples(
                f"{kind.name}: parameter {name!r} has a slice for every sample, so the batch cannot be split into {m} "
                "microbatches; use 1 microbatch",
                f"parameter {name!r}",
            )
    for name, grad in zip(kind.inputs, kind.input_grads, strict=True):
        if grad is None or not isinstance(found.placements[name], Shard):
            continue
        if isinstance(found.placements[grad], Partial):
            raise mixed(kind.graph, next(op for op in kind.graph.ops if grad in op.outs), m, kind.name, False)


def _may_end(program: Program, first: int) -> bool:
    """Whether the segments from one on may be a tail: of kinds of their own, and with the fewer parameters."""
    head, tail = program.segments[:first], program.segments[first:]
    names = {name for segment in tail for name in segment.params}
    sizes = {
        name: math.prod(program.params[name].spec.shape) for segment in program.segments for name in segment.params
    }
    apart = {segment.kind for segment in head}.isdisjoint(segment.kind for segment in tail)
    return apart and bool(head) and 2 * sum(sizes[name] for name in names) <= sum(sizes.values())


def mixing_ops(graph: Graph, given: dict[str, Placement], m: int) -> list[Op]:
    """The ops that mix samples and read nothing that one has made, given where inputs stand (whole by default).

    Args:
        graph: whose ops.
        given: where inputs stand on the axis.
        m: extent of the axis.
    """
    placements: dict[str, Placement | None] = {name: given.get(name, R) for name in graph.inputs}
    found = []
    for op in graph.ops:
        have = [placements[name] for name in op.tensors]
        outputs: tuple[Placement | None, ...] = (None,) * len(op.outs)
        if None not in have:
            try:
                outputs = choose(graph, op, tuple(place for place in have if place is not None), m, "", False).outputs
            except MixedSamples:
                found.append(op)
        placements.update((out, place) for out, place in zip(op.outs, outputs, strict=True) if out is not None)
    return found


def smallest_divisor(n: int) -> int:
    """The smallest number above 1 that divides; 1 where there is none."""
    return next((k for k in range(2, n + 1) if n % k == 0), 1)


def splittable(program: Program, num_microbatches: int) -> bool:
    """Whether a program runs in so many microbatches."""
    try:
        program_micro(program, num_microbatches)
    except ConstraintError:
        return False
    return True


def _kind_micro(
    kind: SegmentKind,
    given: dict[str, Placement],
    duals: dict[str, str],
    m: int,
    in_space: bool,
    wanted: Mapping[str, Placement],
) -> KindMicro:
    """`graph_micro` of a kind; where an op of its backward is not linear, of the backward as the linear whole it is."""
    try:
        return graph_micro(kind.graph, given, duals, m, kind.name, in_space, wanted)
    except MixedSamples as fault:
        if in_space or kind.own_backward:
            raise
        try:
            return graph_micro(kind.graph, given, duals, m, kind.name, wanted=wanted, linear=True)
        except MixedSamples:
            raise fault from None


def graph_micro(
    graph: Graph,
    given: dict[str, Placement],
    duals: dict[str, str],
    m: int,
    where: str,
    in_space: bool = False,
    wanted: Mapping[str, Placement] | None = None,
    linear: bool = False,
) -> KindMicro:
    """What a graph's ops and values do along the microbatch axis.

    Args:
        graph: any graph.
        given: where its inputs stand; whole where nothing is said.
        duals: tangent -> the output whose gradient it is.
        m: microbatches.
        where: for messages.
        in_space: see `program_micro`.
        wanted: values that are made as said, where an op can.
        linear: its results are linear in the tangents as a whole, whatever single ops are (`choose_as_is`).
    Raises:
        ConstraintError: an op mixes samples.
    """
    placements: dict[str, Placement] = {name: given.get(name, R) for name in graph.inputs}
    choices = []
    pending, gradients = dict(duals), set(duals)
    for op in graph.ops:
        for tangent in [t for t in dict.fromkeys(op.tensors) if t in pending]:
            placements[tangent] = dual(placements[pending.pop(tangent)]) if m > 1 else R
            if not graph.values[tangent].shape:
                placements[tangent] = R
        have = tuple(placements[name] for name in op.tensors)
        want = {name: (wanted or {})[name] for name in op.outs if name is not None and name in (wanted or {})}
        choice = making(graph, op, have, m, want) if want else None
        of_tangents = not gradients.isdisjoint(op.tensors)
        if choice is None and linear and of_tangents and any(place != R for place in have):
            choice = choose_as_is(graph, op, have, m, where, gradients)
        choice = choice or choose(graph, op, have, m, where, in_space)
        choices.append(choice)
        if of_tangents:
            gradients.update(name for name in op.outs if name is not None)
        for out, placement in zip(op.outs, choice.outputs, strict=True):
            if out is not None:
                assert placement is not None
                placements[out] = placement
    for tangent, output in pending.items():
        placements[tangent] = dual(placements[output]) if m > 1 and graph.values[tangent].shape else R
    if m > 1:
        _make_in_shards(graph, choices, placements, m, in_space)
    return KindMicro(tuple(choices), placements)


def _make_in_shards(
    graph: Graph, choices: list[AxisChoice], placements: dict[str, Placement], m: int, in_space: bool
) -> None:
    """Changes ops that make from whole values (or nothing, as `full`) what all its readers want in the same shards."""
    kept, readers = set(graph.outputs), dict[str, list[tuple[int, int]]]()
    for index, op in enumerate(graph.ops):
        for position, name in enumerate(op.tensors):
            readers.setdefault(name, []).append((index, position))
    for index, op in reversed([*enumerate(graph.ops)]):
        outs = [name for name in op.outs if name is not None]
        if any(placements[name] != R for name in (*op.tensors, *outs)) or kept.intersection(outs):
            continue
        wanted = [{choices[reader].inputs[at] for reader, at in readers.get(name, ())} for name in outs]
        if any(len(each) != 1 or not isinstance(next(iter(each)), Shard) for each in wanted):
            continue
        fits = [choice for choice in feasible(graph, op, m, in_space) if _makes(choice, wanted)]
        if fits:
            choices[index] = min(fits, key=lambda choice: sum(place != R for place in choice.inputs))
            placements.update({name: next(iter(each)) for name, each in zip(outs, wanted, strict=True)})


def _makes(choice: AxisChoice, wanted: list[set[Placement]]) -> bool:
    """Whether an op's results come as wanted of inputs that are whole or slices."""
    outputs = [{place} for place in choice.outputs if place is not None]
    return outputs == wanted and not any(isinstance(place, Partial) for place in choice.inputs)


def extend(strategy: Strategy, micro: AxisChoice) -> Strategy:
    """A mesh strategy with the microbatch axis put in front."""
    inputs = tuple([(first, *layout) for first, layout in zip(micro.inputs, strategy.inputs, strict=True)])
    computed = _extended(strategy.computed, micro)
    outputs = computed if strategy.outputs == strategy.computed else _extended(strategy.outputs, micro)
    return Strategy(strategy.key, inputs, computed, outputs)


def _extended(layouts: tuple[Layout | None, ...], micro: AxisChoice) -> tuple[Layout | None, ...]:
    return tuple(
        [
            None if layout is None or first is None else (first, *layout)
            for first, layout in zip(micro.outputs, layouts, strict=True)
        ]
    )
