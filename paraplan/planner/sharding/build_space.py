"""The option space of a program on a mesh, built: what every op, parameter, gradient and batch input may do, and what
values are moved for it (`space` has the parts).

A value that the forward makes and the backward reads has a decider of its own for the layout it is saved in: as made,
or as both phases read it, where lowering may save it so (`lowering.blocks.forward`). The forward moves it there, the
backward from there.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.mesh import Layout, P, R, Shard, gathered, layout_text, without
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.graph import Op, Phase
from paraplan.ir.model.program import HALVES, SegmentKind, Source, producers, source_of
from paraplan.ir.plan import REDUCE_DTYPES
from paraplan.lowering.blocks.forward import own_grads
from paraplan.planner.assemble import Job
from paraplan.planner.decision_classes import GradClass, ParamClass, grad_classes, param_classes
from paraplan.planner.sharding.layout_options import (
    backward_reads,
    batch_options,
    grad_options,
    param_options,
    saved_roots,
)
from paraplan.planner.sharding.param_memory import param_held
from paraplan.planner.sharding.pins import Pins
from paraplan.planner.sharding.prices import MeshPrices
from paraplan.planner.sharding.space import Alike, End, Space, WantedValue, saved_as
from paraplan.rules.graph_strategies import op_signature
from paraplan.rules.storage_roots import storage_roots
from paraplan.rules.strategies import AxisChoice, AxisKeys, op_strategies
from paraplan.rules.time_axis import KindMicro, dual, extend, program_micro

Dims = tuple[int, ...]


def build_space(
    job: Job,
    prices: MeshPrices,
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
        _KindTransfers(job, space, kind, classes, gradients, num_microbatches, whole).add()
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
    """A parameter class: what its options hold and cost (see `param_memory`)."""
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
    for tier in TIERS:
        if any(each.away.get(tier) for each in held):
            space.away.setdefault(tier, []).append((index, tuple(each.away.get(tier, 0) for each in held)))
            work = tuple(each.away_work.get(tier, 0) for each in held)
            space.away_workspace.setdefault(tier, []).append((index, work))


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
        self,
        job: Job,
        space: Space,
        index: int,
        classes: tuple[ParamClass, ...],
        gradients: tuple[GradClass, ...],
        m: int,
        whole: int,
    ) -> None:
        segments = [at for at, segment in enumerate(job.program.segments) if segment.kind == index]
        self.job, self.space, self.index, self.count, self.whole = job, space, index, len(segments), whole
        self.m = runs = _runs(space, segments[0], m)
        self.in_tail, self.shares = runs < m, job.program.shares(runs)
        self.waits = m if space.micro.has_tail and not self.in_tail else 1  # microbatches that wait at the loss
        self.kind = job.program.kinds[index]
        self.class_of = {slot: c for c, cls in enumerate(classes) for slot in cls.slots}
        self.reader_of = {slot: g for g, cls in enumerate(gradients) for slot in cls.readers}
        self.maker_of = {slot: g for g, cls in enumerate(gradients) for slot in cls.makers}
        self.micro = space.micro.segments[segments[0]]
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
                self.space.transfers.append(
                    WantedValue(
                        self.kind.graph.values[name],
                        saved.get(name, source) if phase is Phase.BACKWARD else source,
                        tuple(dict.fromkeys(ends)),
                        count * self.m,
                        f"{self.kind.name}.{name}.{phase.value}",
                        name,
                        self.index,
                        phase,
                        name in self.kind.params or name in self.kind.param_grads,
                        REDUCE_DTYPES[self.job.reduce_dtype] if name in self.kind.param_grads else "",
                        saved[name].decider if name in saved else -1,
                    )
                )
        for name, end in saved.items():
            what, spec = f"{self.kind.name}.{name}.saved", self.kind.graph.values[name]
            forward = Phase.FORWARD
            self.space.transfers.append(
                WantedValue(
                    spec, made[name], (end,), 1, what, name, self.index, forward, False, "", end.decider, lean=True
                )
            )
        self._saved(made, once)

    def _saved_end(self, name: str, made: End, once: frozenset[Layout]) -> End:
        """In which layout a value is saved: as it is made, or as both phases read it."""
        layouts = tuple(dict.fromkeys((*made.layouts, *sorted(once, key=layout_text))))
        zero = (self.space.prices.zero,) * len(layouts)
        return End(self.space.decide(f"{self.kind.name}.{name} saved", zero), layouts)

    def _once(self, name: str, readers: dict[tuple[str, Phase], list[End]], made: dict[str, End]) -> frozenset[Layout]:
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
            w
            for column, w in enumerate(want)
            if any(0.0 < spared[row, column] < np.inf and saved_as(prices, spec, h, w) for row, h in enumerate(have))
        )

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
        return [(self._gathered(self._producer(source)), count) for source, count in fed.items()]

    def _gathered(self, end: End) -> End:
        """An end as the tail reads it; what brings it there is not priced."""
        if not self.in_tail:
            return end
        return End(end.decider, tuple(gathered(layout) for layout in end.layouts))

    def _producer(self, source: str | tuple[int, int]) -> End:
        if isinstance(source, tuple):
            kind, slot = source
            return self.space.made[kind, self.job.program.kinds[kind].outputs[slot]]
        of, batch = source_of(source)
        if of is Source.BATCH:
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
                for name, storage in roots.items()
                if storage == root
                for layout in once.get(name, ())
            ]
            if less and min(less) < max(held):
                least = tuple(min(nbytes, *less) * self.count * self.waits for nbytes in held)
                self.space.saved_less[len(self.space.at_loss) - 1] = least
