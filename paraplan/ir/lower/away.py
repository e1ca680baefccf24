"""Saved values that wait on a tier: the steps around the blocks that copy them there and back.

A forward block begins to copy a value as soon as it is made. The copy is waited for, and the value's memory given back,
once the next segment's forward has been passed, or at the end of the action: so it has that segment's time, and nothing
is under way when an action is over. The copy back is begun one segment ahead: before the block of the segment behind
it in the backward; the backward block waits for it just before the value is first read. At most two segments' values
are on the device for this, either way.

In the blocks, of a value `x`, `x^host!` is its copy under way, `x^host` that copy, `x^host?` the way back under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from paraplan.ir.lower.finish import finish_block
from paraplan.ir.names import Name, saved
from paraplan.ir.rank_program import Block, BlockRole, Instr, InstrKind, LocalValue
from paraplan.ir.strides import contiguous_strides, is_dense


def away_value(local: str, value: LocalValue, tier: str) -> LocalValue:
    """A value's copy on a tier, as it is issued: it lies as the value does where that is dense, else in rows."""
    strides = value.strides if is_dense(value.shape, value.strides) else contiguous_strides(value.shape)
    return LocalValue(
        dtype=value.dtype, shape=value.shape, strides=strides, base=f"{local}^{tier}!", storage_bytes=value.nbytes,
        tier=tier,
    )  # fmt: skip


@dataclass(frozen=True)
class AwayValue:
    """A saved value that waits on a tier.

    Attributes:
        local: its name in the forward and the backward block.
        strides: as the forward made it.
        issued: what the forward block issues, called by its base.
    """

    local: str
    strides: tuple[int, ...]
    issued: LocalValue

    @property
    def there(self) -> LocalValue:
        """The copy once it was waited for, as what reads it is given it."""
        return msgspec.structs.replace(self.issued, base=f"{self.local}^{self.issued.tier}")

    @property
    def back(self) -> LocalValue:
        """The copy back, as it is issued."""
        return msgspec.structs.replace(self.issued, base=f"{self.local}^{self.issued.tier}?", tier="")

    def returning(self) -> tuple[str, LocalValue, LocalValue]:
        """As `BlockEmitter.arrive` takes it."""
        return self.local, self.back, self.there


class Call(Protocol):
    """Writes a step that calls a block for a segment in a microbatch."""

    def __call__(
        self, block: Block, args: tuple[Name, ...], outs: tuple[Name | None, ...], microbatch: int, segment: int
    ) -> None:
        """Write it."""


@dataclass(frozen=True)
class Visit:
    """A segment and the values it has on tiers."""

    segment: int
    values: tuple[AwayValue, ...]


@dataclass
class Copies:
    """Writes the steps that wait for copies away and those that begin copies back.

    Attributes:
        call: writes one step.
    """

    call: Call
    _under_way: list[tuple[Visit, int]] = field(default_factory=list)
    _ahead: list[Visit] = field(default_factory=list)
    _blocks: dict[tuple[str, tuple[AwayValue, ...]], Block] = field(default_factory=dict)

    def passed(self, visit: Visit, m: int) -> None:
        """A segment's forward was called: the copies of the one before it are waited for."""
        self.end()
        if visit.values:
            self._under_way.append((visit, m))

    def end(self) -> None:
        """Wait for the copies under way."""
        for visit, m in self._under_way:
            self._step(visit, m, "away", away_block)
        self._under_way.clear()

    def start(self, visits: Sequence[Visit], m: int) -> None:
        """A backward begins that passes these segments."""
        self._ahead = list(visits)
        self.reach(m)

    def reach(self, m: int) -> None:
        """A segment's backward is called next: what the one after it needs is begun to be copied back."""
        visit = self._ahead.pop(0) if self._ahead else None
        if visit is not None and visit.values:
            self._step(visit, m, "back", back_block)

    def _step(self, visit: Visit, m: int, stem: str, make: Callable[[str, tuple[AwayValue, ...]], Block]) -> None:
        key = (stem, visit.values)
        block = self._blocks.get(key)
        if block is None:
            number = sum(1 for other, _ in self._blocks if other == stem)
            block = self._blocks[key] = make(f"{stem}.{number}", visit.values)
        args = tuple(saved(visit.segment, local, m) for local in block.inputs)
        outs = tuple(None if local is None else saved(visit.segment, local, m) for local in block.outputs)
        self.call(block, args, outs, m, visit.segment)


def away_block(name: str, values: tuple[AwayValue, ...]) -> Block:
    """Waits for copies away."""
    known: dict[str, LocalValue] = {}
    instrs = []
    for value in values:
        issued, there = value.issued, value.there.base
        known[issued.base] = issued
        known[value.local] = msgspec.structs.replace(issued, base=value.local, strides=value.strides, tier="")
        known[there] = msgspec.structs.replace(issued, storage_bytes=0)
        instrs.append(
            Instr(kind=InstrKind.WAIT, target="wait", args=("%" + issued.base, "%" + value.local), outs=(there,))
        )
    made = tuple(value.there.base for value in values)
    return finish_block(name, tuple(n for n in known if n not in made), made, (), known, instrs, BlockRole.OFFLOAD)


def back_block(name: str, values: tuple[AwayValue, ...], role: BlockRole = BlockRole.PREFETCH) -> Block:
    """Begins copies back."""
    known = {each.base: each for value in values for each in (value.there, value.back)}
    given, made = tuple(value.there.base for value in values), tuple(value.back.base for value in values)
    instrs = [
        Instr(kind=InstrKind.COPY, target="prefetch", args=("%" + there, ":" + value.issued.tier), outs=(back,))
        for value, there, back in zip(values, given, made, strict=True)
    ]
    return finish_block(name, given, made, (), known, instrs, role)
