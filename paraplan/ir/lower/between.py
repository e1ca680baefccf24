"""Values that segments hand on, and that wait on a tier between their last reader in the forward and the backward.

A choice may name outputs of its kind (`KindChoice.activations`). Such a value is held by the outer namespace, not by a
block, so its copies are steps of their own: away once the last segment that reads it in the forward was called, waited
for a segment later or at the end of the action, when its memory is given back; back a segment ahead of the first
backward that reads it, under the name it had. So recomputing all that segments keep need not keep their inputs either.

Limits: of values made and read within one stage, that lie dense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.lower.away import AwayValue, Call, away_block, away_value, back_block
from paraplan.ir.lower.fetch import came_block
from paraplan.ir.lower.kind import Given
from paraplan.ir.lower.states import leave_block
from paraplan.ir.mesh import local_shape
from paraplan.ir.names import Name, value
from paraplan.ir.plan import Stage
from paraplan.ir.program import Program
from paraplan.ir.rank_program import Block, LocalValue
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
    """Writes the steps that copy such values.

    Attributes:
        tiers: of each of them.
        call: writes one step.
    """

    tiers: Mapping[str, str]
    call: Call
    _lies: dict[str, AwayValue] = field(default_factory=dict)
    _there: set[tuple[str, int]] = field(default_factory=set)
    _leaving: list[tuple[Names, int, int]] = field(default_factory=list)
    _ahead: list[tuple[Names, int]] = field(default_factory=list)
    _blocks: dict[tuple[str, tuple[AwayValue, ...]], Block] = field(default_factory=dict)

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

    def passed(self, segment: int, names: Names, m: int) -> None:
        """A segment's forward was called, after which nothing of it reads these: the copies begun before are ended."""
        self.end()
        if names:
            self._leaving.append((names, segment, m))
            self._step("leave", leave_block, names, segment, m)

    def end(self) -> None:
        """Wait for the copies under way."""
        for names, segment, m in self._leaving:
            self._step("left", away_block, names, segment, m)
            self._there.update((name, m) for name in names)
        self._leaving.clear()

    def start(self, reads: Sequence[tuple[int, Names]], m: int) -> None:
        """A backward begins that passes these segments, each with what it reads."""
        seen: set[str] = set()
        self._ahead = []
        for segment, names in reads:
            first = tuple(name for name in dict.fromkeys(names) if (name, m) in self._there and name not in seen)
            seen.update(first)
            self._ahead.append((first, segment))
        for names, segment in self._ahead[:1]:
            self._step("back", back_block, names, segment, m)

    def reach(self, m: int) -> None:
        """The next segment is run: what it reads has come, and what the one after it reads is under way."""
        names, segment = self._ahead.pop(0)
        self._step("came", came_block, names, segment, m)
        self._there.difference_update((name, m) for name in names)
        for following, behind in self._ahead[:1]:
            self._step("back", back_block, following, behind, m)

    def _step(
        self, stem: str, make: Callable[[str, tuple[AwayValue, ...]], Block], names: Names, segment: int, m: int
    ) -> None:
        if not names:
            return
        values = tuple(self._numbered(name, position) for position, name in enumerate(names))
        key = (stem, values)
        if key not in self._blocks:
            self._blocks[key] = make(f"{stem}.b{sum(1 for other, _ in self._blocks if other == stem)}", values)
        block = self._blocks[key]
        outer: dict[str, Name] = {}
        for name, each in zip(names, values, strict=True):
            tier, here = self.tiers[name], value(name, m)
            outer |= {
                each.local: here, each.issued.base: here.leaving(tier), each.there.base: here.on(tier),
                each.back.base: here.coming(tier),
            }  # fmt: skip
        outs = tuple(None if local is None else outer[local] for local in block.outputs)
        self.call(block, tuple(outer[local] for local in block.inputs), outs, m, segment)

    def _numbered(self, name: str, position: int) -> AwayValue:
        """The value as a block of several calls it."""
        lies, local = self._lies[name], f"x{position}"
        here = LocalValue(
            dtype=lies.issued.dtype, shape=lies.issued.shape, strides=lies.strides, base=local,
            storage_bytes=lies.issued.storage_bytes,
        )  # fmt: skip
        return AwayValue(local, lies.strides, away_value(local, here, lies.issued.tier))
