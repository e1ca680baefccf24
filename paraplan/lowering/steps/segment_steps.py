"""The steps of one rank, part by part: running segments forward and backward.

Names of the outer namespace are those of `ir.execution.names`; of M microbatches, the microbatch M stands for all of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import Block, BlockRole, StepKind
from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.ir.machine.mesh import R, parse_layout
from paraplan.ir.machine.reshard import Move, reshard_path
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.backward import LoweredBackward
from paraplan.lowering.blocks.bundle import SMALL_BYTES, bundle_key, local_bytes
from paraplan.lowering.blocks.small_blocks import zero_block
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.stage_blocks import StageBlocks
from paraplan.lowering.steps.backward_halves import half_of, needs_zero, prefetches
from paraplan.lowering.steps.cast_steps import CastSteps
from paraplan.lowering.steps.gradients import Gradients
from paraplan.lowering.steps.loss_steps import LossSteps
from paraplan.lowering.steps.outer import seed_name
from paraplan.lowering.steps.step_writer import StepWriter
from paraplan.lowering.transfers.activation_offload import offload_saved, prefetch_saved
from paraplan.lowering.transfers.boundary_offload import BoundaryOffload
from paraplan.lowering.transfers.bundled_transfers import BundleBlocks, BundledValue
from paraplan.lowering.transfers.param_allgather import each_alone, gather_groups
from paraplan.lowering.transfers.param_prefetch import ParamPrefetch
from paraplan.lowering.transfers.transfer_queue import TransferQueue, consumers

UNSHARDED_AHEAD = 2
"""Groups of parameters that rest sharded and are being gathered. In a pipeline all are at once: it stands still at
first."""


class SegmentSteps:
    """Writes the steps that run segments.

    Args:
        rank, writer: whose steps are written.
        gradients: take those of parameters.
        losses: what is to be known of the loss.
    """

    def __init__(self, rank: RankGroup, writer: StepWriter, gradients: Gradients, losses: LossSteps) -> None:
        self._rank, self._writer, self._gradients, self._losses = rank, writer, gradients, losses
        self._program = rank.program
        self._casts = CastSteps(rank, writer)
        depth = UNSHARDED_AHEAD if len(rank.lowered.held) == 1 else len(rank.program.segments)
        self._unsharded, self._unsharded_first = TransferQueue(writer, depth), TransferQueue(writer, depth)
        self._small, self._large, self._fetched, self._saved, self._boundaries, self._offloads = (
            TransferQueue(writer) for _ in range(6)
        )
        self._gathered = self._small, self._large
        self._params = ParamPrefetch(rank, writer.cache)
        self._boundary_offload = BoundaryOffload(rank, writer.cache)

    def unshard(self, actions: Sequence[Action]) -> None:
        """The step begins: what rests sharded is gathered in the order in which segments first read it.

        In a pipeline all of it is under way at once. What is small and has two ways to go goes first: its second
        collective would come after all that large ones send, which its first segment would wait for.
        """
        reads = dict.fromkeys(
            (name, index)
            for action in actions
            if action.kind is ActionKind.F
            for index in range(self._rank.plan.stages[action.stage].first, self._rank.plan.stages[action.stage].stop)
            for name in self._program.segments[index].params
            if self._rank.holding.params[name].ahead and name not in self._rank.lowered.casts
        )
        first = dict(reversed(reads))
        gathers: dict[int, list[BundledValue]] = {}
        before: dict[int, list[BundledValue]] = {}
        for name, index in reads:
            if first[name] == index:
                value = self._unsharding(name)
                whole_bytes = local_bytes(value.spec, value.path[-1].after, self._rank.extended)
                goes_first = len(value.path) > 1 and whole_bytes <= SMALL_BYTES
                goes_first = goes_first and self._unsharded.depth > UNSHARDED_AHEAD
                (before if goes_first else gathers).setdefault(index, []).append(value)
        blocks = self._gathering("hold.")
        self._unsharded_first.prefetch(gather_groups(before, blocks, self._rank.plan.bundle_bytes))
        self._unsharded_first.issue_rest()
        self._unsharded.prefetch(gather_groups(gathers, blocks, self._rank.plan.bundle_bytes))
        self._unsharded.begin()

    def reach(self, index: int) -> None:
        """A segment is next: what rested sharded is whole, before its input is waited for."""
        self._unsharded_first.reach(index)
        self._unsharded.reach(index)

    def _gathering(self, stem: str) -> BundleBlocks:
        return BundleBlocks(self._writer.cache, stem, BlockRole.GATHER, self._rank.extended, overwrites=False)

    def _gather(self, order: Sequence[int], early_of: Callable[[int], Sequence[Move | None]]) -> None:
        """What segments read is gathered before they are run, in this order."""
        blocks = self._gathering("gather.")
        small: dict[int, list[BundledValue]] = {index: [] for index in order}
        large: dict[int, list[BundledValue]] = {index: [] for index in order}
        for index in order:
            for value in self._gathers(index, early_of(index)):
                alone = bundle_key(value.spec, value.path, self._rank.extended) is None
                (large if alone else small)[index].append(value)
        self._small.prefetch(gather_groups(small, blocks, self._rank.plan.bundle_bytes))
        self._large.prefetch(each_alone(large, blocks))

    def _unsharding(self, name: str) -> BundledValue:
        """The way of a stored copy from where it rests."""
        spec, layouts = self._program.params[name].spec, self._rank.holding.params[name]
        rests, whole = ((R, *parse_layout(text)) for text in (layouts.resting, layouts.stored))
        path = reshard_path(spec.shape, rests, whole, self._rank.extended, frozen=1)
        return BundledValue(outer_names.param(name), outer_names.held(name), spec, path)

    def _gathers(self, index: int, early: Sequence[Move | None]) -> list[BundledValue]:
        """What is gathered for a segment before its block is called."""
        segment = self._program.segments[index]
        return [
            BundledValue(outer_names.param(name), self._whole(index, slot), self._program.params[name].spec, (move,))
            for slot, (name, move) in enumerate(zip(segment.params, early, strict=True))
            if move is not None
        ]

    def _prefetch_params(self, order: Sequence[int], m: int, blocks: Sequence[Block]) -> None:
        """Parameters on tiers that segments' blocks read come before them, in this order."""
        found = zip(order, blocks, strict=True)
        action = self._writer.action
        self._fetched.prefetch(
            consumers(order, [self._params.transfer(index, m, block, action) for index, block in found])
        )

    def _param(self, index: int, slot: int, name: str, early: Sequence[Move | None]) -> Name:
        """What a segment's block is given for a parameter."""
        if early[slot] is not None:
            return self._whole(index, slot)
        if self._params.is_offloaded(name):
            return outer_names.fetched(index, slot, self._writer.action)
        return self._rank.stored(name)

    def _whole(self, index: int, slot: int) -> Name:
        return outer_names.gathered(index, slot, self._writer.action)

    def _sources(self, index: int, m: int, early: Sequence[Move | None]) -> dict[str, Name]:
        """Local name in a segment's blocks -> outer name."""
        segment = self._program.segments[index]
        kind = self._program.kinds[segment.kind]
        names = {
            local: self._param(index, slot, outer, early)
            for slot, (local, outer) in enumerate(zip(kind.params, segment.params, strict=True))
        }
        names |= {local: self._rank.at(outer, m) for local, outer in zip(kind.inputs, segment.inputs, strict=True)}
        seeds = zip(kind.seeds, segment.seeds, strict=True)
        return names | {local: seed_name(self._program, number, m) for local, number in seeds}

    def run_forward(self, order: range, m: int) -> None:
        """Run some segments' forward."""
        forwards = self._rank.parts(m).forwards
        self._gather(order, lambda index: forwards[index].early)
        self._prefetch_params(order, m, [forwards[index].block for index in order])
        offloaded = self._offloaded_boundaries(order, m)
        for index in order:
            segment, lowered = self._program.segments[index], forwards[index]
            self.reach(index)
            self._casts.reach(index)
            for coming in (*self._gathered, self._fetched):
                coming.reach(index)
            names = self._sources(index, m, lowered.early)
            tangents = zip(self._program.kinds[segment.kind].tangents, segment.outputs, strict=True)
            known = {t: out for t, out in tangents if t in lowered.block.inputs and t is not None}
            names |= {t: self._losses.tangent_of[out] for t, out in known.items()}
            if known:
                self._losses.end_waits()
            asides = segment.asides if self._rank.lowered.evaluates else ()
            outs = tuple(outer_names.value(out, m) for out in (*segment.outputs, *asides))
            saved = tuple(outer_names.saved(index, local, m) for local in lowered.block.saved)
            args = tuple(names[local] for local in lowered.block.inputs)
            self._writer.call(lowered.block, args, (*outs, *saved), m, index)
            for out in segment.outputs:
                if out in self._losses.numerators:
                    args = (outer_names.numerator(self._losses.numerators[out]), outer_names.value(out, m))
                    self._writer.add(StepKind.ACCUMULATE, args=args, microbatch=m, segment=index)
            self._offloads.wait_all()
            if lowered.offloads:
                self._offloads.issue(offload_saved(self._writer.cache, tuple(lowered.offloads.values()), index, m))
            if offloaded.get(index):
                self._offloads.issue(self._boundary_offload.offload(offloaded[index], index, m))
        self._offloads.wait_all()

    def _offloaded_boundaries(self, every: range, m: int) -> dict[int, tuple[str, ...]]:
        """Segment -> the boundary values that leave for a tier once it is through: those that a backward reads."""
        parts, tiers = self._rank.parts(m), self._boundary_offload.tiers
        if not tiers:
            return {}
        read = {name for index in every for half in ActionKind for name in self._read(parts, index, half)}
        last = {n: i for i in every for n in (*self._program.segments[i].outputs, *self._program.segments[i].inputs)}
        return {i: tuple(n for n in last if last[n] == i and n in tiers and n in read) for i in every}

    def _read(self, parts: StageBlocks, index: int, half: ActionKind) -> tuple[str, ...]:
        """The boundary values that a segment's backward, or half of it, reads."""
        segment, inputs = self._program.segments[index], half_of(parts, index, half).block.inputs
        kind = self._program.kinds[segment.kind]
        named = zip((*kind.inputs, *kind.outputs), (*segment.inputs, *segment.outputs), strict=True)
        return tuple(outer for local, outer in named if local in inputs)

    def run_backward(
        self,
        order: Sequence[int],
        m: int,
        half: ActionKind,
        final: dict[int, list[str]],
        ahead: Callable[[], None] | None = None,
    ) -> None:
        """Run some segments' backward, or half of it.

        Args:
            order, m: the segments, from the last on, and of which microbatch.
            half: B for all of it.
            final: segment -> the parameters whose gradients are complete once it is through.
            ahead: writes what is to be under way beside the last segment.
        """
        parts = self._rank.parts(m)
        lowered_of = {index: half_of(parts, index, half) for index in order}
        self._gather(order, lambda index: lowered_of[index].early)
        back = [prefetch_saved(self._writer.cache, prefetches(parts, index, half), index, m) for index in order]
        self._saved.prefetch(consumers(order, back))
        self._prefetch_params(order, m, [lowered_of[index].block for index in order])
        self._boundaries.prefetch(self._boundary_offload.prefetch([(i, self._read(parts, i, half)) for i in order], m))
        self._gradients.start(order, m)
        for index in order:
            segment, lowered = self._program.segments[index], lowered_of[index]
            kind = self._program.kinds[segment.kind]
            for coming in (*self._gathered, self._fetched, self._saved, self._boundaries):
                coming.reach(index)
            if ahead is not None and index == order[-1]:
                ahead()
            names = self._sources(index, m, lowered.early)
            given = zip(kind.outputs, segment.outputs, strict=True)
            names |= {local: outer_names.value(outer, m) for local, outer in given}
            names |= {local: outer_names.saved(index, local, m) for local in parts.forwards[index].block.saved}
            for copy in prefetches(parts, index, half):
                read = copy.issued.base, copy.source.base
                names |= {local: outer_names.saved(index, local, m) for local in read}
            if half is ActionKind.W:
                kept = half_of(parts, index, ActionKind.I).block.saved
                names |= {local: outer_names.half(index, local, m) for local in kept}
            for tangent, local, out in zip(kind.tangents, kind.outputs, segment.outputs, strict=True):
                if tangent is not None:
                    names[tangent] = self._losses.tangent_of.get(out) or outer_names.grad_of(out, m)
                    if out in parts.zeros and needs_zero(parts, index, half, tangent):
                        self._zero(kind.graph.values[local], out, m, index)
            self._call_backward(index, m, lowered, names)
            self._gradients.passed(final.get(index, ()))

    def _zero(self, spec: TensorSpec, out: str, m: int, index: int) -> None:
        block = zero_block(f"zero.{out}", spec, self._rank.parts(m).grads[out].layout, self._rank.extended)
        self._writer.call(block, (), (outer_names.grad_of(out, m),), m, index)

    def _call_backward(self, index: int, m: int, lowered: LoweredBackward, names: dict[str, Name]) -> None:
        segment, block = self._program.segments[index], lowered.block
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
        self._writer.call(block, tuple(names[local] for local in block.inputs), (*outs, *saved), m, index)
        for position, (out, local, target) in enumerate(zip(outs, block.outputs, targets, strict=True)):
            if out is None or local is None:
                continue
            if position < first:
                self._writer.add(StepKind.ACCUMULATE, args=(target, out), microbatch=m, segment=index)
            else:
                slot = position - first
                path = lowered.partial[slot]
                self._gradients.add(segment.params[slot], out, block.values[local], path, m, index)
