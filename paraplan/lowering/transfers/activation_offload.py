"""Saved values that wait on a tier: the steps around the blocks that copy them there and back.

A forward block begins to copy a value as soon as it is made. The copy is waited for, and the value's memory given back,
once the next segment's forward has been passed, or at the end of the action: so it has that segment's time, and nothing
is under way when an action is over. The copy back is begun one segment ahead: before the block of the segment behind
it in the backward; the backward block waits for it just before the value is first read. At most two segments' values
are on the device for this, either way.

In the blocks, of a value `x`, `x^host!` is its copy under way, `x^host` that copy, `x^host?` the way back under way.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.names import saved
from paraplan.ir.execution.rank_program import Block, BlockRole, Instr, InstrKind, LocalValue
from paraplan.ir.model.strides import contiguous_strides, is_dense
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.finish import finish_block
from paraplan.lowering.steps.step_writer import BlockCache, Flight


def away_value(local: str, value: LocalValue, tier: str) -> LocalValue:
    """A value's copy on a tier, as it is issued: it lies as the value does where that is dense, else in rows.

    Args:
        local: name of the value.
        value: as the block has it.
        tier: where it goes.
    """
    strides = value.strides if is_dense(value.shape, value.strides) else contiguous_strides(value.shape)
    return LocalValue(
        dtype=value.dtype,
        shape=value.shape,
        strides=strides,
        base=f"{local}^{tier}!",
        storage_bytes=value.nbytes,
        tier=tier,
    )


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

    def names(self, here: Name) -> dict[str, Name]:
        """The outer names of all of these, of a value that the outer namespace has."""
        tier = self.issued.tier
        return {
            self.local: here,
            self.issued.base: here.leaving(tier),
            self.there.base: here.on(tier),
            self.back.base: here.coming(tier),
        }

    def returning(self) -> tuple[str, LocalValue, LocalValue]:
        """As `BlockEmitter.arrive` takes it."""
        return self.local, self.back, self.there


def leaving(local: str, part: TensorSpec, tier: str, strides: tuple[int, ...] | None = None) -> AwayValue:
    """A rank's part of a value that is to wait on a tier; contiguous where no strides are given.

    Args:
        local: name of the value.
        part: the rank's part.
        tier: where it goes.
        strides: of the part; None for row-major.
    """
    strides = strides or contiguous_strides(part.shape)
    value = LocalValue(dtype=part.dtype, shape=part.shape, strides=strides, base=local, storage_bytes=part.nbytes)
    return AwayValue(local, strides, away_value(local, value, tier))


def copies_away(blocks: BlockCache, values: tuple[AwayValue, ...], segment: int, m: int) -> Flight:
    """The copies away of what a segment saves, which its forward block issues.

    Args:
        blocks: made before.
        values: that leave.
        segment, m: whose, and the microbatch.
    """
    block = blocks.get("away.", away_block, values)
    return Flight((None, block), _saved_names(block, segment, m), microbatch=m, segment=segment)


def copies_back(blocks: BlockCache, values: tuple[AwayValue, ...], segment: int, m: int) -> Flight | None:
    """The copies back of what a segment saved, for which its backward block waits.

    Args:
        blocks: made before.
        values: that come back.
        segment, m: whose, and the microbatch.
    """
    if not values:
        return None
    block = blocks.get("back.", back_block, values)
    return Flight((block, None), _saved_names(block, segment, m), microbatch=m, segment=segment)


def _saved_names(block: Block, segment: int, m: int) -> dict[str, Name]:
    return {local: saved(segment, local, m) for local in (*block.inputs, *block.outputs) if local is not None}


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
    """Begins copies back.

    Args:
        name: of the block.
        values: that come back.
        role: of the block.
    """
    known = {each.base: each for value in values for each in (value.there, value.back)}
    given, made = tuple(value.there.base for value in values), tuple(value.back.base for value in values)
    instrs = [
        Instr(kind=InstrKind.COPY, target="prefetch", args=("%" + there, ":" + value.issued.tier), outs=(back,))
        for value, there, back in zip(values, given, made, strict=True)
    ]
    return finish_block(name, given, made, (), known, instrs, role)
