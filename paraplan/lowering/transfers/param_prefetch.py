"""Stored parameters that live on a tier: copied to the device a segment ahead, and given up after it.

A class with a `stored_tier` has its parameters in the host's memory alone (Pudipeddi et al. 2020, L2L; Rajbhandari et
al. 2021, ZeRO-Infinity). Before a segment's block is called in either phase, the copies of what it reads are waited for
and those of the next segment in line are begun; so they have this segment's time, and at most two segments' parameters
are on the device. What is sharded is copied as it is stored and gathered by the block. As the optimizer's copy lies in
the same storage (the verifier sees to it), an update is seen by the next step's copies without more. Where that storage
has the optimizer's dtype and ops read another (bf16), what has come is cast, and what came given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paraplan.ir.execution.names import fetched, param
from paraplan.ir.execution.rank_program import BlockRole
from paraplan.ir.machine.mesh import local_shape, parse_layout
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.steps.step_writer import BlockCache, Transfer
from paraplan.lowering.transfers.copies import Copy, issue_block, local_value, prefetch, wait_block


@dataclass
class ParamPrefetch:
    """The copies of parameters to the device.

    Attributes:
        rank: that they are of.
        cache: its blocks.
    """

    rank: RankGroup
    cache: BlockCache

    def is_away(self, name: str) -> bool:
        """Whether a parameter is not on the device."""
        return bool(self.rank.holding.params[name].stored_tier)

    def transfer(self, read: Sequence[tuple[int, str]], segment: int, m: int, action: str) -> Transfer | None:
        """The copies of the parameters on tiers that a segment's block reads, by slot.

        Args:
            read: (slot, parameter) of those on tiers that the block reads.
            segment, m: whose block, and the microbatch.
            action: that it belongs to.
        """
        if not read:
            return None
        copies = tuple(self._copy(position, name) for position, (_, name) in enumerate(read))
        dtypes = tuple(self.rank.program.params[name].spec.dtype for _, name in read)
        issues = self.cache.get("fetch.p", issue_block, copies, BlockRole.FETCH)
        waits = self.cache.get("came.p", wait_block, copies, BlockRole.FETCH, dtypes)
        here = tuple(fetched(segment, slot, action) for slot, _ in read)
        names = {copy.source.base: param(name) for copy, (_, name) in zip(copies, read, strict=True)}
        names |= {copy.issued.base: name.coming() for copy, name in zip(copies, here, strict=True)}
        return Transfer((issues, waits), names, here, m, segment)

    def _copy(self, position: int, name: str) -> Copy:
        layouts, is_trained = self.rank.holding.params[name], name in self.rank.trained
        spec = self.rank.grad_spec(name) if is_trained else self.rank.program.params[name].spec
        shape = local_shape(spec.shape, parse_layout(layouts.stored), self.rank.holding.mesh.shape)
        return prefetch(local_value(f"p{position}", spec.dtype, shape), layouts.stored_tier)
