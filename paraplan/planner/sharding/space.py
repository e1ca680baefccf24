"""The option space of a sharding problem: who decides, what is moved, what is kept.

Deciders each take one of their options: every op of every kind (a strategy), every parameter class (where it
is stored, how its gradient accumulates, where it is updated), every class of boundary gradients (the layout it
is handed over in) and every batch input. A `Transfer` is a value that readers want in layouts of their own: it
is moved once per distinct layout wanted, in each phase. `Kept` is memory that a decider's option holds.

Equal segments take equal options here, and op strategies with partial inputs are offered only where all
inputs are partial together: both belong to the certificate's scope.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from paraplan.ir.errors import ConstraintError
from paraplan.ir.graph import Op, Phase
from paraplan.ir.lower.kind import extend, own_grads
from paraplan.ir.mesh import Layout, P, R, Shard, gathered, layout_text, without
from paraplan.ir.micro import KindMicro, ProgramMicro, dual, program_micro
from paraplan.ir.plan import REDUCE_DTYPES
from paraplan.ir.program import HALVES, SegmentKind, producers
from paraplan.ir.rules.strategies import AxisChoice, AxisKeys, Strategy, op_signature, op_strategies
from paraplan.ir.tensor import TensorSpec
from paraplan.planner.assemble import Job
from paraplan.planner.classes import GradClass, ParamClass, grad_classes, param_classes
from paraplan.planner.sharding.held import param_held
from paraplan.planner.sharding.options import (
    ParamOption,
    backward_reads,
    batch_options,
    grad_options,
    param_options,
    saved_roots,
    storage_roots,
)
from paraplan.planner.sharding.pins import Pins
from paraplan.planner.sharding.prices import Floats, Price, Prices

Dims = tuple[int, ...]


@dataclass(frozen=True)
class End:
    """One end of a transfer: a decider, and the layout (on the extended mesh) each of its options means there."""

    decider: int
    layouts: tuple[Layout, ...]


@dataclass(frozen=True)
class Transfer:
    """A value some readers want.

    Attributes:
        spec: of the value, global.
        source: where it comes from.
        readers: who wants it.
        count: how often a step does this (instances times microbatches).
        what: for people.
        kind, phase: where.
        bundled: whether small ones share a collective with others (parameters and their gradients).
        wire: what they are cast to before they are summed over ranks; "" for nothing.
        saved: of what a forward makes and hands to the backward, who decides in which layout it is saved; -1: nobody.
        lean: whether only that it may be saved there is said: as it was made, or in a layout of no more bytes; free.
    """

    spec: TensorSpec
    source: End
    readers: tuple[End, ...]
    count: int
    what: str
    kind: int
    phase: Phase
    bundled: bool
    wire: str = ""
    saved: int = -1
    lean: bool = False

    def prices(self, prices: Prices, have: tuple[Layout, ...], want: tuple[Layout, ...]) -> Floats:
        """[have, want, stream] of each move, once; infinite where there is no way."""
        found = prices.transfers(self.spec, have, want, self.bundled, self.wire)
        if self.lean:
            may = np.array([[saved_as(prices, self.spec, h, w) for w in want] for h in have])[..., None]
            return np.where(may & np.isfinite(found), 0.0, np.inf)
        return found


def saved_as(prices: Prices, spec: TensorSpec, made: Layout, read: Layout) -> bool:
    """Whether lowering may save what it makes in one layout in another one, to which the forward brings it."""
    return made == read or prices.nbytes(spec, read) <= prices.nbytes(spec, made)


@dataclass(frozen=True)
class Decider:
    """One decision: its name, the number of options, and per option the price of a whole step."""

    name: str
    prices: tuple[Price, ...]


@dataclass(frozen=True, eq=False)
class Alike:
    """The options of an op.

    Attributes:
        options: on the mesh.
        inputs, outputs: per slot, the layout on the extended mesh under each option.
        prices: [option, stream] of running it once.
    """

    options: tuple[Strategy, ...]
    inputs: tuple[tuple[Layout, ...], ...]
    outputs: tuple[tuple[Layout | None, ...], ...]
    prices: Floats

    def only(self, kept: list[int]) -> Alike:
        """With some of the options."""
        options = tuple(self.options[number] for number in kept)
        inputs = tuple(tuple(layouts[number] for number in kept) for layouts in self.inputs)
        outputs = tuple(tuple(layouts[number] for number in kept) for layouts in self.outputs)
        return Alike(options, inputs, outputs, self.prices[kept])


@dataclass
class Space:
    """A sharding problem.

    Attributes:
        prices: of the mesh.
        deciders, transfers: see the module's head.
        at_loss, at_update: bytes each decider's options hold at these two instants: (decider, bytes per option).
        saved_less: the entries of `at_loss` that may turn out smaller, as a value may be saved in the smaller layout it
            is read in: (entry, bytes per option at least).
        update_workspace: bytes needed while one parameter updates: (decider, bytes per option).
        away, away_workspace: on the host, states and their gradients at the update, and what the update of one
            parameter needs besides: (decider, bytes per option).
        disk: likewise on disk.
        kept: per parameter class, what is alive all through the step: (decider, bytes per option).
        comes: per parameter class, bytes of one parameter on the device where a segment reads it though it is stored
            elsewhere, and whose: (decider, bytes per option, class).
        grads: per parameter class, bytes of one parameter's gradient per option, and whose: (decider, bytes, class).
        saved: per (kind, value), bytes one microbatch of one instance keeps for the backward: (decider, bytes).
        made: (kind, value) -> the op that makes it, and the layout it has under each option.
        lies: (kind, op) -> per tensor read, the layout wanted under each option.
        alike: what ops that differ in names only have in common.
        op_decider: (kind, op) -> decider; likewise for parameter classes, gradient classes and batch inputs.
        strategies: per (kind, op), the options on the mesh.
    """

    prices: Prices
    micro: ProgramMicro
    deciders: list[Decider] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    at_loss: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    at_update: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    saved_less: dict[int, tuple[int, ...]] = field(default_factory=dict)
    update_workspace: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    away: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    away_workspace: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    disk: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    kept: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    comes: list[tuple[int, tuple[int, ...], ParamClass]] = field(default_factory=list)
    grads: list[tuple[int, tuple[int, ...], ParamClass]] = field(default_factory=list)
    saved: dict[tuple[int, str], tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    made: dict[tuple[int, str], End] = field(default_factory=dict)
    lies: dict[tuple[int, int], tuple[tuple[Layout, ...], ...]] = field(default_factory=dict)
    alike: dict[object, Alike] = field(default_factory=dict, repr=False)
    op_decider: dict[tuple[int, int], int] = field(default_factory=dict)
    strategies: dict[tuple[int, int], tuple[Strategy, ...]] = field(default_factory=dict)
    param_decider: list[int] = field(default_factory=list)
    param_options: list[tuple[ParamOption, ...]] = field(default_factory=list)
    grad_decider: list[int] = field(default_factory=list)
    grad_options: list[tuple[Layout, ...]] = field(default_factory=list)
    batch_decider: dict[str, int] = field(default_factory=dict)
    batch_options: dict[str, tuple[Layout, ...]] = field(default_factory=dict)

    def decide(self, name: str, prices: tuple[Price, ...]) -> int:
        self.deciders.append(Decider(name, prices))
        return len(self.deciders) - 1


def build_space(
    job: Job,
    prices: Prices,
    num_microbatches: int,
    pins: Pins,
) -> Space:
    """The option space of a program on a mesh.

    Args:
        job: what is planned.
        prices: on the mesh (extended by the microbatch axis).
        num_microbatches: of a step.
        pins: what constraints leave over.
    """
    space = Space(prices, program_micro(job.program, num_microbatches))
    shares = job.program.shares(num_microbatches)
    counts = Counter(segment.kind for segment in job.program.segments)
    first_of = {segment.kind: index for index, segment in reversed(list(enumerate(job.program.segments)))}
    classes, gradients = param_classes(job.program), grad_classes(job.program)
    for kind, _ in enumerate(job.program.kinds):
        micro = space.micro.segments[first_of[kind]]
        runs = counts[kind] * _runs(space, first_of[kind], num_microbatches)
        _ops(job, space, kind, micro, runs, shares, pins)
    for cls in classes:
        _param(job, space, cls, num_microbatches, pins)
    for gradient in gradients:
        _gradient(job, space, gradient, shares)
    for name, entry in job.program.batch.items():
        first = space.micro.values[f"batch:{name}"]
        options = tuple(lay for lay in batch_options(entry, prices.extended, first) if pins.batch(name, lay))
        space.batch_options[name] = options
        space.batch_decider[name] = space.decide(f"batch {name}", (prices.zero,) * len(options))
    whole = space.decide("whole", (prices.zero,))
    for kind, _ in enumerate(job.program.kinds):
        runs = _runs(space, first_of[kind], num_microbatches)
        _KindTransfers(job, space, kind, classes, gradients, counts[kind], runs, num_microbatches, whole).add()
    return space


def _runs(space: Space, segment: int, m: int) -> int:
    """How often a step runs a segment."""
    return m if segment < space.micro.tail else 1


def _ops(job: Job, space: Space, index: int, micro: KindMicro, count: int, m: int, pins: Pins) -> None:
    kind = job.program.kinds[index]
    casts = REDUCE_DTYPES[job.reduce_dtype] not in ("", HALVES.get(job.program.precision))
    late = own_grads(kind) if casts else frozenset[str]()  # lowering sums them when they leave
    for position, (op, along) in enumerate(zip(kind.graph.ops, micro.choices, strict=True)):
        alike = _alike(space, op, kind, along, m, pins.keys(kind, position))
        kept = [number for number, option in enumerate(alike.options) if pins.op(kind, position, option)]
        if not late.isdisjoint(op.outs):
            kept = [n for n in kept if alike.options[n].outputs == alike.options[n].computed] or kept
        if not kept:
            alike, kept = _alike(space, op, kind, along, m, (frozenset("-"),) * (len(space.prices.extended) - 1)), [0]
        if len(kept) < len(alike.options):
            alike = alike.only(kept)
        space.strategies[index, position], space.lies[index, position] = alike.options, alike.inputs
        priced = tuple(map(tuple, (alike.prices * count).tolist()))
        decider = space.op_decider[index, position] = space.decide(f"{kind.name}.{op.target}[{position}]", priced)
        for out, layouts in zip(op.outs, alike.outputs, strict=True):
            if out is not None:
                space.made[index, out] = End(decider, layouts)  # type: ignore[arg-type]


def _alike(space: Space, op: Op, kind: SegmentKind, along: AxisChoice, m: int, keys: AxisKeys) -> Alike:
    """What all ops have in common that differ from this one in names only."""
    values = kind.graph.values
    key = (op_signature(op, values), along, keys)
    if key not in space.alike:
        options = op_strategies(op, values, space.prices.extended[1:], along, m, keys)
        extended = [extend(option, along) for option in options]
        space.alike[key] = Alike(
            options,
            tuple(tuple(option.inputs[slot] for option in extended) for slot in range(len(op.tensors))),
            tuple(tuple(option.outputs[slot] for option in extended) for slot in range(len(op.outs))),
            space.prices.ops(op, kind.graph, extended),
        )
    return space.alike[key]


def _param(job: Job, space: Space, cls: ParamClass, m: int, pins: Pins) -> None:
    """A parameter class: what its options hold and cost (see `held`)."""
    prices = space.prices
    every = param_options(job.program.precision, cls, prices.extended[1:], prices.places)
    options = tuple(option for option in every if pins.param(cls, option))
    if not options:
        raise ConstraintError(
            f"nothing is left for {cls.params[0]} {cls.spec} on mesh {prices.extended[1:]}: its pinned layouts and "
            "tiers contradict each other (a parameter off the device lies there as its state does)"
        )
    held = [param_held(job, prices, cls, option, m) for option in options]
    index = space.decide(f"param {cls.params[0]}", tuple(each.cost for each in held))
    space.param_decider.append(index)
    space.param_options.append(options)
    space.at_loss.append((index, tuple(each.loss for each in held)))
    space.kept.append((index, tuple(each.loss for each in held)))
    space.grads.append((index, tuple(each.grad for each in held), cls))
    space.at_update.append((index, tuple(each.update for each in held)))
    space.update_workspace.append((index, tuple(each.work for each in held)))
    if any(each.here for each in held):
        space.comes.append((index, tuple(each.here for each in held), cls))
    if any(each.disk for each in held):
        space.disk.append((index, tuple(each.disk for each in held)))
    if any(each.away for each in held):
        space.away.append((index, tuple(each.away for each in held)))
        space.away_workspace.append((index, tuple(each.away_work for each in held)))


def _gradient(job: Job, space: Space, cls: GradClass, m: int) -> None:
    kind, slot = cls.readers[0]
    segment = next(index for index, each in enumerate(job.program.segments) if each.kind == kind)
    place = space.micro.values[job.program.segments[segment].inputs[slot]]
    options = grad_options(cls.spec, space.prices.extended, dual(place) if m > 1 else R)
    space.grad_options.append(options)
    space.grad_decider.append(space.decide("gradient", (space.prices.zero,) * len(options)))


class _KindTransfers:
    """Adds the transfers of one kind, and what its values hold at the loss."""

    def __init__(
        self, job: Job, space: Space, index: int, classes: tuple[ParamClass, ...], gradients: tuple[GradClass, ...],
        count: int, runs: int, m: int, whole: int,
    ) -> None:  # fmt: skip
        self.job, self.space, self.index, self.count, self.m, self.whole = job, space, index, count, runs, whole
        self.in_tail, self.shares = runs < m, job.program.shares(runs)
        self.waits = m if space.micro.has_tail and not self.in_tail else 1  # microbatches that wait at the loss
        self.kind = job.program.kinds[index]
        self.class_of = {slot: c for c, cls in enumerate(classes) for slot in cls.slots}
        self.reader_of = {slot: g for g, cls in enumerate(gradients) for slot in cls.readers}
        self.maker_of = {slot: g for g, cls in enumerate(gradients) for slot in cls.makers}
        segment = next(i for i, s in enumerate(job.program.segments) if s.kind == index)
        self.micro = space.micro.segments[segment]
        self.producers = producers(job.program)

    def add(self) -> None:
        readers: dict[tuple[str, Phase], list[End]] = {}
        made: dict[str, End] = {}
        for position, op in enumerate(self.kind.graph.ops):
            decider = self.space.op_decider[self.index, position]
            for name, layouts in zip(op.tensors, self.space.lies[self.index, position], strict=True):
                readers.setdefault((name, op.phase), []).append(End(decider, layouts))
            made |= {out: self.space.made[self.index, out] for out in op.outs if out is not None}
        self._grad_readers(readers)
        once = {name: self._once(name, readers, made) for name, phase in readers if phase is Phase.BACKWARD}
        saved = {name: self._saved_end(name, made[name], layouts) for name, layouts in once.items() if layouts}
        for name, end in saved.items():
            readers[name, Phase.FORWARD].append(end)
        for (name, phase), ends in readers.items():
            for source, count in self._sources(name, made):
                self.space.transfers.append(Transfer(
                    self.kind.graph.values[name], saved.get(name, source) if phase is Phase.BACKWARD else source,
                    tuple(dict.fromkeys(ends)), count * self.m, f"{self.kind.name}.{name}.{phase.value}",
                    self.index, phase, name in self.kind.params or name in self.kind.param_grads,
                    REDUCE_DTYPES[self.job.reduce_dtype] if name in self.kind.param_grads else "",
                    saved[name].decider if name in saved else -1,
                ))  # fmt: skip
        for name, end in saved.items():
            what, spec = f"{self.kind.name}.{name}.saved", self.kind.graph.values[name]
            forward = Phase.FORWARD
            self.space.transfers.append(
                Transfer(spec, made[name], (end,), 1, what, self.index, forward, False, "", end.decider, lean=True)
            )
        self._saved(made, once)

    def _saved_end(self, name: str, made: End, once: frozenset[Layout]) -> End:
        """In which layout a value is saved: as it is made, or as both phases read it."""
        layouts = tuple(dict.fromkeys((*made.layouts, *sorted(once, key=layout_text))))
        zero = (self.space.prices.zero,) * len(layouts)
        return End(self.space.decide(f"{self.kind.name}.{name} saved", zero), layouts)

    def _once(
        self, name: str, readers: dict[tuple[str, Phase], list[End]], made: dict[str, End]
    ) -> frozenset[Layout]:  # fmt: skip
        """Layouts in which lowering may save a value because forward and backward read it so; none where no move to
        them could be spared."""
        kind, first = self.kind, readers.get((name, Phase.FORWARD), [])
        held = (*kind.outputs, *kind.param_grads, *kind.input_grads)  # never saved, or only as they were made
        if name not in made or name in held or not first:
            return frozenset()
        later = {layout for end in readers[name, Phase.BACKWARD] for layout in end.layouts}
        have = tuple(dict.fromkeys(made[name].layouts))
        want = tuple(dict.fromkeys(layout for end in first for layout in end.layouts if layout in later))
        if not want:
            return frozenset()
        prices, spec = self.space.prices, kind.graph.values[name]
        spared = prices.transfers(spec, have, want).sum(-1)
        return frozenset(
            w for column, w in enumerate(want)
            if any(0.0 < spared[row, column] < np.inf and saved_as(prices, spec, h, w) for row, h in enumerate(have))
        )  # fmt: skip

    def _grad_readers(self, readers: dict[tuple[str, Phase], list[End]]) -> None:
        """Gradients leave the block in the layouts their classes decide."""
        first = P if self.shares > 1 else R
        for slot, grad in enumerate(self.kind.param_grads):
            if grad is not None:
                c = self.class_of[self.index, slot]
                layouts = tuple((first, *option.grad) for option in self.space.param_options[c])
                readers.setdefault((grad, Phase.BACKWARD), []).append(End(self.space.param_decider[c], layouts))
        for slot, grad in enumerate(self.kind.input_grads):
            if grad is not None:
                readers.setdefault((grad, Phase.BACKWARD), []).append(
                    self._grad_end(self.reader_of[self.index, slot], self.kind.inputs[slot])
                )

    def _grad_end(self, g: int, value: str) -> End:
        first = dual(self.micro.placements[value]) if self.shares > 1 else R
        options = self.space.grad_options[g]
        if self.in_tail and value in self.kind.inputs:
            options = tuple(without(layout, self._rows(self.kind.inputs.index(value))) for layout in options)
        return End(self.space.grad_decider[g], tuple((first, *layout) for layout in options))

    def _rows(self, slot: int) -> int | None:
        """The dim of an input of the kind that microbatches cut."""
        outer = next(s.inputs[slot] for s in self.job.program.segments if s.kind == self.index)
        place = self.space.micro.values[outer]
        return place.dim if isinstance(place, Shard) else None

    def _sources(self, name: str, made: dict[str, End]) -> list[tuple[End, int]]:
        """Where a value of the kind comes from: (end, instances fed so)."""
        kind = self.kind
        whole = End(self.whole, ((R,) * len(self.space.prices.extended),))
        if name in made:
            return [(made[name], self.count)]
        if name in kind.params:
            c = self.class_of[self.index, kind.params.index(name)]
            layouts = tuple((R, *option.stored) for option in self.space.param_options[c])
            return [(End(self.space.param_decider[c], layouts), self.count)]
        if name in kind.tangents:
            slot = kind.tangents.index(name)
            g = self.maker_of.get((self.index, slot))
            return [(whole if g is None else self._grad_end(g, kind.outputs[slot]), self.count)]
        if name not in kind.inputs:
            return [(whole, self.count)]
        slot = kind.inputs.index(name)
        fed = Counter(
            s.inputs[slot] if s.inputs[slot] not in self.producers else self.producers[s.inputs[slot]]
            for s in self.job.program.segments
            if s.kind == self.index
        )
        return [(self._gathered(self._producer(source, name)), count) for source, count in fed.items()]

    def _gathered(self, end: End) -> End:
        """An end as the tail reads it; what brings it there is not priced."""
        if not self.in_tail:
            return end
        return End(end.decider, tuple(gathered(layout) for layout in end.layouts))

    def _producer(self, source: str | tuple[int, int], name: str) -> End:
        if isinstance(source, tuple):
            kind, slot = source
            return self.space.made[kind, self.job.program.kinds[kind].outputs[slot]]
        if source.startswith("batch:"):
            batch = source.removeprefix("batch:")
            first = self.space.micro.values[source]
            return End(self.space.batch_decider[batch], tuple((first, *lay) for lay in self.space.batch_options[batch]))
        return End(self.whole, ((R,) * len(self.space.prices.extended),))

    def _saved(self, made: dict[str, End], once: dict[str, frozenset[Layout]]) -> None:
        """What lives at the loss: each storage the backward reads, once, in the layout it was made in."""
        later = set()
        for segment in self.job.program.segments:
            reader = self.job.program.kinds[segment.kind]
            reads = backward_reads(reader)
            for local, outer in zip(reader.inputs, segment.inputs, strict=True):
                made_by = self.producers.get(outer)
                if local in reads and isinstance(made_by, tuple) and made_by[0] == self.index:
                    later.add(self.kind.outputs[made_by[1]])
        roots = storage_roots(self.kind)
        for root in saved_roots(self.kind, frozenset(later)):
            end, spec = made[root], self.kind.graph.values[root]
            held = tuple(self.space.prices.nbytes(spec, layout) for layout in end.layouts)
            self.space.saved[self.index, root] = end.decider, held
            self.space.at_loss.append((end.decider, tuple(nbytes * self.count * self.waits for nbytes in held)))
            less = [
                self.space.prices.nbytes(self.kind.graph.values[name], layout)
                for name, storage in roots.items() if storage == root for layout in once.get(name, ())
            ]  # fmt: skip
            if less and min(less) < max(held):
                least = tuple(min(nbytes, *less) * self.count * self.waits for nbytes in held)
                self.space.saved_less[len(self.space.at_loss) - 1] = least
