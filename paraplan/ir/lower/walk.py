"""The steps of one rank, part by part: running segments forward and backward.

Names of the outer namespace are those of `ir.names`; of M microbatches, the microbatch M stands for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from paraplan.ir import names as outer_names
from paraplan.ir.fused import fusible_places
from paraplan.ir.lower.accumulators import Accumulators
from paraplan.ir.lower.ahead import Visit, gather_groups
from paraplan.ir.lower.away import copies_away, copies_back
from paraplan.ir.lower.backward import LoweredBackward
from paraplan.ir.lower.between import Boundaries, boundary_tiers
from paraplan.ir.lower.fetch import Fetches
from paraplan.ir.lower.flights import BlockCache, Flight, Flights, FlightWriter, Stop, stops
from paraplan.ir.lower.groups import Groups
from paraplan.ir.lower.halves import half_of, needs_zero, returning
from paraplan.ir.lower.held import hold_casts
from paraplan.ir.lower.kind import Given
from paraplan.ir.lower.outer import seed_name
from paraplan.ir.lower.parcels import Parcel, ParcelBlocks, local_bytes
from paraplan.ir.lower.reduce import Partials, Reductions
from paraplan.ir.lower.stage import PlanBlocks, StageBlocks
from paraplan.ir.lower.states import StateCopies
from paraplan.ir.lower.updates import zero_block
from paraplan.ir.lower.whole import Turn
from paraplan.ir.mesh import R, parse_layout
from paraplan.ir.names import Name
from paraplan.ir.program import master_dtype
from paraplan.ir.rank_program import Block, BlockRole, Step, StepKind
from paraplan.ir.reshard import Move, reshard_path
from paraplan.ir.schedule import Action, ActionKind
from paraplan.ir.tensor import TensorSpec

AWAKE = 2
"""Groups of parameters under way from where they rest. In a pipeline all set out at once: it stands still at first."""


class SegmentSteps:
    """The part of `RankSteps` that runs segments.

    Args:
        blocks: of the plan.
        group: the group of ranks whose steps are written.
    """

    def __init__(self, blocks: PlanBlocks, group: int) -> None:
        plan = blocks.plan
        self.plan, self.program, self.lowered, self.group = plan, plan.program, blocks, group
        self.holding, self.evaluates = blocks.held[group], blocks.evaluates
        self.m, self.micro = plan.num_microbatches, blocks.micro
        self.turn: Turn | None = None
        self.extended = (plan.num_shares, *self.holding.mesh.shape)
        self.blocks: dict[str, Block] = {}
        self.steps: list[Step] = []
        self.tangent_of: dict[str, Name] = {}
        self.waits: list[Callable[[], None]] = []  # what ends the denominators
        self.strides_of: dict[Name, tuple[int, ...]] = {}
        self.are_cast: set[str] = set()  # the weights whose casts are held
        self.action = ""
        self.trained = self.holding.trained
        self.fused = fusible_places(plan.program, blocks.held) if plan.optimizer.fused else frozenset[str]()
        params, shape = self.holding.params, self.holding.mesh.shape
        specs = {name: self.grad_spec(name) for name in self.trained}
        self.writer = FlightWriter(self.call, BlockCache())
        holders = Counter(name for holding in blocks.held for name in holding.trained)
        self.tied = frozenset(name for name, count in holders.items() if count > 1)
        self.states = StateCopies(params, specs, shape, self.writer)
        made = {name: specs[name] for name in self.holding.graded}
        accumulated = {name: blocks.accumulates(group, name) for name in made}
        self.accumulators = Accumulators(params, accumulated, self.fused, self.extended, self.call, self.writer.blocks)
        self.reductions = Reductions(
            params, made, accumulated, shape, self.writer, plan.bundle_bytes, plan.reducing_bytes,
            plan.wire_dtype, self._reduced,
        )  # fmt: skip
        self.groups = Groups((), 1)
        self.partials = Partials(
            self.extended, self.writer, self._accumulate, self.reductions.final, plan.bundle_bytes,
            plan.reducing_bytes if plan.group > 1 else 0,
        )  # fmt: skip
        self.waking = Flights(self.writer, AWAKE if len(blocks.held) == 1 else len(plan.program.segments))
        self.gathers, self.fetched, self.returning, self.handed_back, self.leaving = (
            Flights(self.writer) for _ in range(5)
        )
        self.fetches = Fetches(self.program.params, params, specs, shape, self.writer.blocks)
        tiers: dict[str, str] = {}
        for stage in () if self.evaluates else self.holding.stages:
            tiers |= boundary_tiers(self.program, plan.stages[stage], blocks.micro.tail)
        self.boundaries = Boundaries(tiers, self.writer.blocks)
        for name in tiers:
            self.boundaries.lies(name, self.made(name), blocks.spec_of(name), self.extended)
        self.numerators = {
            term.numerator: index
            for index, term in enumerate(self.program.loss)
            if group in blocks.groups_of(blocks.maker[term.numerator])
        }

    def parts(self, m: int) -> StageBlocks:
        """What is run here for a microbatch; the tail for all of them."""
        return self.lowered.route(m % self.m).parts[self.group]

    def made(self, value: str) -> Given:
        """How a value that is made here lies; strides apart, the same for every microbatch."""
        return self.lowered.part(self.lowered.maker[value], self.group).given[value]

    def grad_spec(self, name: str) -> TensorSpec:
        """The spec of a parameter's gradient as it accumulates."""
        spec = self.program.params[name].spec
        return TensorSpec(master_dtype(self.program.precision, spec.dtype), spec.shape)

    def _reduced(self, name: str, grad: Name) -> None:
        """A gradient is in the optimizer's layout; other groups' are added to a tied parameter's first."""
        if self.states.leaves(name) and name not in self.tied:
            strides = self.strides_of.get(grad)
            self.reductions.grads[name] = self.states.leave(name, grad, strides)

    def call(
        self, block: Block, args: tuple[Name, ...], outs: tuple[Name | None, ...], microbatch: int = -1,
        segment: int = -1,
    ) -> None:  # fmt: skip
        """Write a step that calls a block."""
        self.add(StepKind.CALL, block, args=args, outs=outs, microbatch=microbatch, segment=segment)

    def add(self, kind: StepKind, block: Block | None = None, **fields: object) -> None:
        """Write a step."""
        if fields.get("microbatch") == self.m:  # of all of them
            fields["microbatch"] = -1
        if block is not None:
            self.blocks[block.name] = block
            fields["block"] = block.name
        self.steps.append(Step(kind=kind, action=self.action, **fields))  # type: ignore[arg-type]

    def _at(self, value: str, m: int) -> Name:
        """The outer name of what a segment is given."""
        if m == self.m and value not in self.micro.after and value not in self.parts(0).wholes:
            m = 0  # every microbatch has the same
        return outer_names.value(value, m)

    def stored(self, name: str) -> Name:
        """The outer name of a parameter as segments read it."""
        return outer_names.held(name) if self.holding.params[name].ahead else outer_names.param(name)

    def wake(self, actions: Sequence[Action]) -> None:
        """The step begins: what rests sharded is gathered in the order in which segments first read it."""
        order = dict.fromkeys(
            (name, index)
            for action in actions
            if action.kind is ActionKind.F
            for index in range(self.plan.stages[action.stage].first, self.plan.stages[action.stage].stop)
            for name in self.program.segments[index].params
            if self.holding.params[name].ahead and name not in self.lowered.casts
        )
        first = dict(reversed(order))
        parcels: dict[int, list[Parcel]] = {}
        for name, index in order:
            if first[name] == index:
                parcels.setdefault(index, []).append(self._woken(name))
        visits = [Visit(index, tuple(found)) for index, found in parcels.items()]
        self.waking.line_up(self._gathers(visits, "hold."))

    def _gathers(self, visits: Sequence[Visit], stem: str = "gather.") -> Iterator[Stop]:
        blocks = ParcelBlocks(self.writer.blocks, stem, BlockRole.GATHER, self.extended, overwrites=False)
        return gather_groups(visits, blocks, self.plan.bundle_bytes)

    def _woken(self, name: str) -> Parcel:
        """The way of a stored copy from where it rests."""
        spec, layouts = self.program.params[name].spec, self.holding.params[name]
        rests, whole = ((R, *parse_layout(text)) for text in (layouts.resting, layouts.stored))
        path = reshard_path(spec.shape, rests, whole, self.extended, frozen=1)
        return Parcel(outer_names.param(name), outer_names.held(name), spec, path)

    def _visit(self, index: int, early: Sequence[Move | None]) -> Visit:
        """What is gathered for a segment before its block is called."""
        segment = self.program.segments[index]
        parcels = (
            Parcel(outer_names.param(name), self._whole(index, slot), self.program.params[name].spec, (move,))
            for slot, (name, move) in enumerate(zip(segment.params, early, strict=True))
            if move is not None
        )
        return Visit(index, tuple(parcels))

    def _fetch(self, index: int, m: int, block: Block) -> Flight | None:
        """What copies to the device the parameters that a segment's block reads."""
        segment, kind = self.program.segments[index], self.program.kinds[self.program.segments[index].kind]
        read = [
            (slot, name)
            for slot, (local, name) in enumerate(zip(kind.params, segment.params, strict=True))
            if local in block.inputs and self.fetches.is_away(name)
        ]
        return self.fetches.flight(read, index, m, self.action)

    def _param(self, index: int, slot: int, name: str, early: Sequence[Move | None]) -> Name:
        """What a segment's block is given for a parameter."""
        if early[slot] is not None:
            return self._whole(index, slot)
        return outer_names.fetched(index, slot, self.action) if self.fetches.is_away(name) else self.stored(name)

    def _whole(self, index: int, slot: int) -> Name:
        return outer_names.gathered(index, slot, self.action)

    def _sources(self, index: int, m: int, early: Sequence[Move | None]) -> dict[str, Name]:
        """Local name in a segment's blocks -> outer name."""
        segment = self.program.segments[index]
        kind = self.program.kinds[segment.kind]
        names = {
            local: self._param(index, slot, outer, early)
            for slot, (local, outer) in enumerate(zip(kind.params, segment.params, strict=True))
        }
        names |= {local: self._at(outer, m) for local, outer in zip(kind.inputs, segment.inputs, strict=True)}
        seeds = zip(kind.seeds, segment.seeds, strict=True)
        return names | {local: seed_name(self.program, number, m) for local, number in seeds}

    def run_forward(self, order: range, m: int) -> None:
        """Run some segments' forward."""
        forwards = self.parts(m).forwards
        self.gathers.line_up(self._gathers([self._visit(index, forwards[index].early) for index in order]))
        self.fetched.line_up(stops(order, [self._fetch(index, m, forwards[index].block) for index in order]))
        leaving = self._leaving(order, m)
        for index in order:
            segment, lowered = self.program.segments[index], forwards[index]
            self.waking.reach(index)
            hold_casts(self, index)
            self.gathers.reach(index)
            self.fetched.reach(index)
            names = self._sources(index, m, lowered.early)
            tangents = zip(self.program.kinds[segment.kind].tangents, segment.outputs, strict=True)
            known = {t: self.tangent_of[out] for t, out in tangents if t in lowered.block.inputs and t is not None}
            names |= known
            if known:
                self.end_waits()
            asides = segment.asides if self.evaluates else ()
            outs = tuple(outer_names.value(out, m) for out in (*segment.outputs, *asides))
            saved = tuple(outer_names.saved(index, local, m) for local in lowered.block.saved)
            args = tuple(names[local] for local in lowered.block.inputs)
            self.add(StepKind.CALL, lowered.block, args=args, outs=(*outs, *saved), microbatch=m, segment=index)
            for out in segment.outputs:
                if out in self.numerators:
                    args = (outer_names.numerator(self.numerators[out]), outer_names.value(out, m))
                    self.add(StepKind.ACCUMULATE, args=args, microbatch=m, segment=index)
            self.leaving.end()
            if lowered.away:
                self.leaving.send(copies_away(self.writer.blocks, tuple(lowered.away.values()), index, m))
            if leaving.get(index):
                self.leaving.send(self.boundaries.away(leaving[index], index, m))
        self.leaving.end()

    def _leaving(self, every: range, m: int) -> dict[int, tuple[str, ...]]:
        """Segment -> the boundary values that leave for a tier once it is through: those that a backward reads."""
        parts, tiers = self.parts(m), self.boundaries.tiers
        if not tiers:
            return {}
        read = {name for index in every for half in ActionKind for name in self._read(parts, index, half)}
        last = {n: i for i in every for n in (*self.program.segments[i].outputs, *self.program.segments[i].inputs)}
        return {i: tuple(n for n in last if last[n] == i and n in tiers and n in read) for i in every}

    def _read(self, parts: StageBlocks, index: int, half: ActionKind) -> tuple[str, ...]:
        """The boundary values that a segment's backward, or half of it, reads."""
        segment, inputs = self.program.segments[index], half_of(parts, index, half).block.inputs
        kind = self.program.kinds[segment.kind]
        named = zip((*kind.inputs, *kind.outputs), (*segment.inputs, *segment.outputs), strict=True)
        return tuple(outer for local, outer in named if local in inputs)

    def end_waits(self) -> None:
        """Denominators are whole and gradients of numerators known from here on."""
        while self.waits:
            self.waits.pop(0)()

    def run_backward(
        self, order: Sequence[int], m: int, half: ActionKind, final: dict[int, list[str]],
        ahead: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Run some segments' backward, or half of it.

        Args:
            order, m: the segments, from the last on, and of which microbatch.
            half: B for all of it.
            final: segment -> the parameters whose gradients are complete once it is through.
            ahead: writes what is to be under way beside the last segment.
        """
        parts = self.parts(m)
        lowered_of = {index: half_of(parts, index, half) for index in order}
        self.gathers.line_up(self._gathers([self._visit(index, lowered_of[index].early) for index in order]))
        back = [copies_back(self.writer.blocks, returning(parts, index, half), index, m) for index in order]
        self.returning.line_up(stops(order, back))
        self.fetched.line_up(stops(order, [self._fetch(index, m, lowered_of[index].block) for index in order]))
        self.handed_back.line_up(self.boundaries.back([(i, self._read(parts, i, half)) for i in order], m))
        self.partials.start(max((self._partial_bytes(parts, index) for index in order), default=0))
        for index in order:
            segment, lowered = self.program.segments[index], lowered_of[index]
            kind = self.program.kinds[segment.kind]
            for coming in (self.gathers, self.fetched, self.returning, self.handed_back):
                coming.reach(index)
            if ahead is not None and index == order[-1]:
                ahead()
            names = self._sources(index, m, lowered.early)
            given = zip(kind.outputs, segment.outputs, strict=True)
            names |= {local: outer_names.value(outer, m) for local, outer in given}
            names |= {local: outer_names.saved(index, local, m) for local in parts.forwards[index].block.saved}
            for value in returning(parts, index, half):
                copies = value.back.base, value.there.base
                names |= {local: outer_names.saved(index, local, m) for local in copies}
            if half is ActionKind.W:
                kept = half_of(parts, index, ActionKind.I).block.saved
                names |= {local: outer_names.half(index, local, m) for local in kept}
            for tangent, local, out in zip(kind.tangents, kind.outputs, segment.outputs, strict=True):
                if tangent is not None:
                    names[tangent] = self.tangent_of.get(out) or outer_names.grad_of(out, m)
                    if out in parts.zeros and needs_zero(parts, index, half, tangent):
                        self._zero(kind.graph.values[local], out, m, index)
            self._call_backward(index, m, lowered, names)
            self.partials.passed(final.get(index, ()))
            self.states.grads.passed()

    def finals(self, actions: Sequence[Action]) -> dict[int, dict[int, list[str]]]:
        """Action, by its place -> segment -> the parameters whose gradients it is the last to add to."""
        last: dict[str, tuple[int, int]] = {}
        for position, action in enumerate(actions):
            if action.kind not in (ActionKind.B, ActionKind.W):
                continue
            stage, parts = self.plan.stages[action.stage], self.parts(action.microbatch)
            begins = self.turn is not None and self.turn.begins(action.stage, action.microbatch, action.kind)
            for index in reversed(range(stage.first, stage.stop if begins else min(stage.stop, self.micro.tail))):
                params = self.program.segments[index].params
                grads = half_of(parts, index, action.kind).block.outputs[-len(params) :] if params else ()
                last.update({n: (position, index) for n, grad in zip(params, grads, strict=True) if grad is not None})
        found: dict[int, dict[int, list[str]]] = {}
        for name in self.holding.graded:
            position, index = last[name]
            found.setdefault(position, {}).setdefault(index, []).append(name)
        return found

    def _zero(self, spec: TensorSpec, out: str, m: int, index: int) -> None:
        block = zero_block(f"zero.{out}", spec, self.parts(m).grads[out].layout, self.extended)
        self.add(StepKind.CALL, block, args=(), outs=(outer_names.grad_of(out, m),), microbatch=m, segment=index)

    def _call_backward(self, index: int, m: int, lowered: LoweredBackward, names: dict[str, Name]) -> None:
        segment, block = self.program.segments[index], lowered.block
        first = len(segment.inputs)
        targets = [outer_names.grad_of(outer, m) for outer in segment.inputs]
        targets += [outer_names.accumulator(outer) for outer in segment.params]
        if not any(local is not None for local in (*block.outputs, *block.saved)):
            return
        outs = tuple(
            None if local is None else target.addend(index, position)
            for position, (local, target) in enumerate(zip(block.outputs, targets, strict=True))
        )
        saved = tuple(outer_names.half(index, local, m) for local in block.saved)
        args = tuple(names[local] for local in block.inputs)
        self.add(StepKind.CALL, block, args=args, outs=(*outs, *saved), microbatch=m, segment=index)
        for position, (out, target) in enumerate(zip(outs, targets, strict=True)):
            path = lowered.partial[position - first] if position >= first else ()
            if out is not None and not path:
                local = block.outputs[position]
                assert local is not None
                value = block.values[local]
                if position >= first:
                    out, value = self.accumulators.begin(segment.params[position - first], out, value, m, index)
                self.strides_of.setdefault(target, value.strides)
                self.add(StepKind.ACCUMULATE, args=(target, out), microbatch=m, segment=index)
            elif out is not None:
                name, value = segment.params[position - first], block.values[str(block.outputs[position])]
                if self.groups.every > 1 and index < self.micro.tail:
                    self.groups.add_up(self, name, out, value, m, index, path)
                    continue
                self._send(name, self.accumulators.laid_out(name, out, value, value.dtype, m, index)[0], path)

    def _partial_bytes(self, parts: StageBlocks, index: int) -> int:
        """Bytes of the gradients that a segment's backward leaves as they were made."""
        params, paths = self.program.segments[index].params, parts.backwards[index].partial
        found = zip(map(self._made_spec, params), paths, strict=True)
        return sum(local_bytes(spec, path[0].before, self.extended) for spec, path in found if path)

    def _send(self, name: str, out: Name, path: tuple[Move, ...]) -> None:
        dtype = self.accumulators.dtype_on_arrival(name, path)
        self.partials.send(name, Parcel(out, out.moved, self._made_spec(name), path, dtype))

    def _made_spec(self, name: str) -> TensorSpec:
        """The spec of a gradient that leaves its block as a sum over ranks."""
        spec = self.program.params[name].spec
        return TensorSpec(self.lowered.reduce_dtype or spec.dtype, spec.shape)

    def _accumulate(self, name: str, addend: Name) -> None:
        self.accumulators.mark(name)
        self.add(StepKind.ACCUMULATE, args=(outer_names.accumulator(name), addend))
