"""Saved values that wait on a tier: the steps around the blocks that copy them there and back.

A forward block begins to copy a value as soon as it is made. The copy is waited for, and the value's memory given back,
once the next segment's forward has been passed, or at the end of the action: so it has that segment's time, and nothing
is under way when an action is over. The copy back is begun one segment ahead: before the block of the segment behind
it in the backward; the backward block waits for it just before the value is first read. At most two segments' values
are on the device for this, either way.
"""

from __future__ import annotations

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.names import saved
from paraplan.ir.execution.rank_program import Block, BlockRole
from paraplan.lowering.steps.step_writer import BlockCache, Transfer
from paraplan.lowering.transfers.copies import Copy, issue_block, wait_block


def offload_saved(cache: BlockCache, offloads: tuple[Copy, ...], segment: int, m: int) -> Transfer:
    """The copies away of what a segment saves, which its forward block issues.

    Args:
        cache: the rank's blocks.
        offloads: the copies.
        segment, m: whose, and the microbatch.
    """
    block = cache.get("away.", wait_block, offloads, BlockRole.OFFLOAD)
    return Transfer((None, block), _saved_names(block, segment, m), microbatch=m, segment=segment)


def prefetch_saved(cache: BlockCache, prefetches: tuple[Copy, ...], segment: int, m: int) -> Transfer | None:
    """The copies back of what a segment saved, for which its backward block waits.

    Args:
        cache: the rank's blocks.
        prefetches: the copies.
        segment, m: whose, and the microbatch.
    """
    if not prefetches:
        return None
    block = cache.get("back.", issue_block, prefetches, BlockRole.PREFETCH)
    return Transfer((block, None), _saved_names(block, segment, m), microbatch=m, segment=segment)


def _saved_names(block: Block, segment: int, m: int) -> dict[str, Name]:
    return {local: saved(segment, local, m) for local in (*block.inputs, *block.outputs) if local is not None}
