"""Values that segments hand on, and that wait on a tier between their last reader in the forward and the backward.

A choice may name outputs of its kind (`KindChoice.activations`). Such a value is held by the outer namespace, not by a
block, so its copies are steps of their own: away once the last segment that reads it in the forward was called, waited
for a segment later or at the end of the action, when its memory is given back; back a segment ahead of the first
backward that reads it, under the name it had. So recomputing all that segments keep need not keep their inputs either.

Limits: of values made and read within one stage, that lie dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.lower.away import AwayValue, away_block, away_value, back_block
from paraplan.ir.lower.fetch import came_block
from paraplan.ir.lower.flights import BlockCache, Flight, Stop
from paraplan.ir.lower.kind import Given
from paraplan.ir.lower.states import leave_block
from paraplan.ir.mesh import local_shape
from paraplan.ir.names import Name, value
from paraplan.ir.plan import Stage
from paraplan.ir.program import Program
from paraplan.ir.rank_program import LocalValue
from paraplan.ir.strides import contiguous_strides, is_dense
from paraplan.ir.tensor import TensorSpec
from paraplan.ir.tiers import TIERS

Names = tuple[str, ...]


def boundary_tiers(program: Program, stage: Stage, tail: int) -> dict[str, str]:
    """The values a stage's segments hand on that wait on a tier, and which; what is gathered for the tail stays.

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


@dataclass
class Boundaries:
    """The copies of such values.

    Attributes:
        tiers: of each of them.
        blocks: of the rank.
    """

    tiers: Mapping[str, str]
    blocks: BlockCache
    _lies: dict[str, AwayValue] = field(default_factory=dict)
    _there: set[tuple[str, int]] = field(default_factory=set)

    def lies(self, name: str, given: Given, spec: TensorSpec, extended: tuple[int, ...]) -> None:
        """How a value that is to leave lies on the device.

        Raises:
            InvalidPlanError: with gaps.
        """
        shape = local_shape(spec.shape, given.layout, extended)
        strides = given.strides or contiguous_strides(shape)
        if not is_dense(shape, strides):
            raise InvalidPlanError(f"{name} is to wait on the {self.tiers[name]}, but does not lie dense; keep it here")
        nbytes = TensorSpec(spec.dtype, shape).nbytes
        here = LocalValue(dtype=spec.dtype, shape=shape, strides=strides, base="x", storage_bytes=nbytes)
        self._lies[name] = AwayValue("x", strides, away_value("x", here, self.tiers[name]))

    def away(self, names: Names, segment: int, m: int) -> Flight:
        """The copies away of what a segment's forward is the last to read."""
        self._there.update((name, m) for name in names)
        values, outer = self._values(names, m)
        issues = self.blocks.get("leave.b", leave_block, values)
        waits = self.blocks.get("left.b", away_block, values)
        return Flight((issues, waits), outer, microbatch=m, segment=segment)

    def back(self, reads: Sequence[tuple[int, Names]], m: int) -> list[Stop]:
        """The copies back before a backward of these segments, each with what it reads."""
        found = []
        for segment, names in reads:
            first = tuple(name for name in dict.fromkeys(names) if (name, m) in self._there)
            self._there.difference_update((name, m) for name in first)
            found.append(Stop(segment, self._back(first, segment, m)))
        return found

    def _back(self, names: Names, segment: int, m: int) -> tuple[Flight, ...]:
        if not names:
            return ()
        values, outer = self._values(names, m)
        issues = self.blocks.get("back.b", back_block, values)
        waits = self.blocks.get("came.b", came_block, values)
        return (Flight((issues, waits), outer, microbatch=m, segment=segment),)

    def _values(self, names: Names, m: int) -> tuple[tuple[AwayValue, ...], dict[str, Name]]:
        """Values as a block calls them, and the outer names of their copies."""
        values = tuple(self._numbered(name, position) for position, name in enumerate(names))
        outer: dict[str, Name] = {}
        for name, each in zip(names, values, strict=True):
            outer |= each.names(value(name, m))
        return values, outer

    def _numbered(self, name: str, position: int) -> AwayValue:
        """The value as a block of several calls it."""
        lies, local = self._lies[name], f"x{position}"
        here = LocalValue(
            dtype=lies.issued.dtype, shape=lies.issued.shape, strides=lies.strides, base=local,
            storage_bytes=lies.issued.storage_bytes,
        )  # fmt: skip
        return AwayValue(local, lies.strides, away_value(local, here, lies.issued.tier))
