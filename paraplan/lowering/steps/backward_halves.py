"""Backwards that may be done in two parts: which block runs, and what it reads."""

from __future__ import annotations

from paraplan.ir.execution.schedule import ActionKind
from paraplan.lowering.blocks.backward import LoweredBackward
from paraplan.lowering.stage_blocks import StageBlocks
from paraplan.lowering.transfers.copies import Copy


def half_of(parts: StageBlocks, index: int, half: ActionKind) -> LoweredBackward:
    """A segment's backward, or the part of it that an action runs.

    Args:
        parts: a stage's blocks.
        index: of the segment in the stage.
        half: the action: `B` for all of it, `I` for its first part, else the second.
    """
    lowered = parts.backwards[index]
    if lowered.parts is None or half is ActionKind.B:
        return lowered
    return lowered.parts[0 if half is ActionKind.I else 1]


def prefetches(parts: StageBlocks, index: int, half: ActionKind) -> tuple[Copy, ...]:
    """The copies back of what a segment's backward, or half of it, reads from tiers.

    Args:
        parts: the blocks of a stage.
        index: of the segment.
        half: the kind of action: the whole backward, or one of its halves.
    """
    inputs = half_of(parts, index, half).block.inputs
    copies = (copy.back for copy in parts.forwards[index].offloads.values())
    return tuple(copy for copy in copies if copy.issued.base in inputs)


def needs_zero(parts: StageBlocks, index: int, half: ActionKind, tangent: str) -> bool:
    """Whether this half is the first that reads a tangent without a source, which is zero.

    Args:
        parts, index, half: as of `prefetches`.
        tangent: name in the kind.
    """
    first = half is not ActionKind.W or tangent not in half_of(parts, index, ActionKind.I).block.inputs
    return first and tangent in half_of(parts, index, half).block.inputs
