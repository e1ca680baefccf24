"""Values that segments hand on, and that wait on a tier between their last reader in the forward and the backward.

A choice may name outputs of its kind (`KindChoice.activations`). Such a value is held by the outer namespace, not by a
block, so its copies are steps of their own: away once the last segment that reads it in the forward was called, waited
for a segment later or at the end of the action, when its memory is given back; back a segment ahead of the first
backward that reads it, under the name it had. So recomputing all that segments keep need not keep their inputs either.

Limits: of values made and read within one stage, that lie dense.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.names import value
from paraplan.ir.execution.rank_program import BlockRole, LocalValue
from paraplan.ir.machine.mesh import local_shape
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.program import Program
from paraplan.ir.model.strides import is_dense
from paraplan.ir.plan import Stage
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.steps.step_writer import BlockCache, Transfer
from paraplan.lowering.transfers.copies import Copy, CopyWay, copy_transfer, local_value
from paraplan.lowering.transfers.transfer_queue import Consumer

Names = tuple[str, ...]
_OFFLOAD = CopyWay(Copy.offload, "leave.b", "left.b", BlockRole.OFFLOAD)
_PREFETCH = CopyWay(Copy.prefetch, "back.b", "came.b", BlockRole.PREFETCH)


def boundary_tiers(program: Program, stage: Stage, tail: int) -> dict[str, str]:
    """The values a stage's segments hand on that wait on a tier, and which; what is gathered for the tail stays.

    Args:
        program, stage: of the plan.
        tail: number of the first segment that reads all microbatches.
    Raises:
        InvalidPlanError: one is read by a segment of another stage.
    """
    found: dict[str, str] = {}
    for index in range(stage.first, stage.stop):
        segment = program.segments[index]
        kind, choice = program.kinds[segment.kind], stage.choices[stage.segment_choice[index - stage.first]]
        for local, outer in zip(kind.outputs, segment.outputs, strict=True):
            if choice.activations.get(local) in TIERS:
                found[outer] = choice.activations[local]
    gathered = {name for segment in program.segments[tail:] for name in segment.inputs}
    made = {name for segment in program.segments[tail:] for name in segment.outputs}
    found = {name: tier for name, tier in found.items() if name not in gathered - made}
    for index, segment in enumerate(program.segments):
        theirs = found.keys() & set(segment.inputs)
        if theirs and not stage.first <= index < stage.stop:
            raise InvalidPlanError(
                f"{min(theirs)} is to wait on the {found[min(theirs)]}, but segment {index} of another stage reads it; "
                "keep it on the device"
            )
    return found


class BoundaryOffload:
    """The copies of such values.

    Args:
        rank: that they are of.
        cache: its blocks.

    Attributes:
        tiers: of each of them.

    Raises:
        InvalidPlanError: one is read by a segment of another stage, or does not lie dense.
    """

    def __init__(self, rank: RankGroup, cache: BlockCache) -> None:
        self._cache = cache
        self._offloaded: set[tuple[str, int]] = set()
        self.tiers: dict[str, str] = {}
        for stage in () if rank.lowered.evaluates else rank.holding.stages:
            self.tiers |= boundary_tiers(rank.program, rank.plan.stages[stage], rank.micro.tail)
        self._lies = {name: self._part(rank, name, tier) for name, tier in self.tiers.items()}

    def _part(self, rank: RankGroup, name: str, tier: str) -> LocalValue:
        """A rank's part of a value."""
        spec, given = rank.spec_of(name), rank.made(name)
        shape = local_shape(spec.shape, given.layout, rank.extended)
        if given.strides and not is_dense(shape, given.strides):
            raise InvalidPlanError(f"{name} is to wait on the {tier}, but does not lie dense; keep it here")
        return local_value(name, spec.dtype, shape, given.strides)

    def offload(self, names: Names, segment: int, m: int) -> Transfer:
        """The copies away of what a segment's forward is the last to read.

        Args:
            names: that the segment's forward is the last to read.
            segment, m: which, and the microbatch.
        """
        self._offloaded.update((name, m) for name in names)
        return self._transfer(_OFFLOAD, names, segment, m)

    def prefetch(self, reads: Sequence[tuple[int, Names]], m: int) -> list[Consumer]:
        """The copies back before a backward of these segments, each with what it reads."""
        found = []
        for segment, names in reads:
            first = tuple(name for name in dict.fromkeys(names) if (name, m) in self._offloaded)
            self._offloaded.difference_update((name, m) for name in first)
            found.append(Consumer(segment, (self._transfer(_PREFETCH, first, segment, m),) if first else ()))
        return found

    def _transfer(self, way: CopyWay, names: Names, segment: int, m: int) -> Transfer:
        copies = {
            way.make(msgspec.structs.replace(self._lies[name], base=f"x{at}"), self.tiers[name]): value(name, m)
            for at, name in enumerate(names)
        }
        return copy_transfer(self._cache, way, copies, m, segment)
